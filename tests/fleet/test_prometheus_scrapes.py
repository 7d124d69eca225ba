"""A real Prometheus scrapes a live fleet, and every panel and alert has data."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deploy.observe.test_catalogue_is_complete import compared, expressions
from tests.fleet.talk import client, opening, tool_turn
from tests.router.batch.jobs import jsonl
from tests.support.fleet import RunningFleet
from tests.support.prometheus import MISSING, PROMETHEUS, Prometheus
from tests.support.scraped_fleet import scraped
from tests.support.whole_life import CAP_W, WholeLife

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PROMETHEUS, reason=MISSING),
]

QUIET = {"ConserveEngineDown", "ConserveDirectoryAway", "ConserveIntegrityFault", "ConservePowerCapNotSet"}


@pytest.fixture(scope="module")
def scraping(laptop_fleet: RunningFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraped(laptop_fleet, tmp_path_factory.mktemp("prometheus")) as running:
        talk(laptop_fleet)
        settled = "sum(conserve_batch_live_batches) == 0 and sum(conserve_e2e_seconds_count) > 1"
        running.until(lambda: running.ask(settled), "the batch's end")
        time.sleep(2.5)  # and seen twice
        yield running


def talk(fleet: RunningFleet) -> None:
    """Run conversations that call tools and answer users, and a batch job."""
    sdk = client(fleet.url, "scraped").with_options(max_retries=5)
    lines = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": fleet.model, "prompt": f"Number {n}.", "max_tokens": 48},
        }
        for n in range(12)
    ]
    file = sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

    def agent(seed: int) -> None:
        messages = opening(4000 + seed, 60)
        for _ in range(3):
            tool_turn(sdk, fleet.model, messages)
            for choice in (["It is warmer in Rome", "It is warmer in Paris"], ["The two are alike"]):
                stream = sdk.chat.completions.create(
                    model=fleet.model,
                    messages=messages,
                    max_tokens=64,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"structured_outputs": {"choice": choice}},
                )
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": "And then?"})

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(agent, range(2)))


def test_prometheus_scrapes_every_page_of_the_fleet_under_its_component(
    scraping: Prometheus, laptop_fleet: RunningFleet
) -> None:
    up = {
        (series["metric"]["conserve_process"], series["metric"].get("conserve_engine", ""))
        for series in scraping.ask("up == 1")
    }
    engines = set(laptop_fleet.engines())
    of_engines = {(process, engine) for process in ("engine", "keeper") for engine in engines}
    assert up == {("gateway", ""), ("directory", ""), ("batch", "")} | of_engines
    labels = {label for series in scraping.ask('{__name__=~"conserve_.+"}') for label in series["metric"]}
    assert not [label for label in labels if label.startswith("exported_")]


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_every_expression_of_panels_and_alerts_has_data_in_a_live_fleet(
    scraping: Prometheus, life: WholeLife, where: str, expression: str
) -> None:
    """The data come from the laptop fleet, or from the co-serving fleet with simulated GPUs."""
    asked = compared(expression)
    assert scraping.numbers(asked) or life.seen[asked], f"{where}: {expression}"


def test_an_expression_with_an_unknown_metric_has_no_data(scraping: Prometheus) -> None:
    assert not scraping.numbers('sum(rate(conserve_no_such_total{kind="x"}[$__rate_interval]))')


COUNTS = [
    "sum(rate(conserve_coserving_offline_tokens_total[$__rate_interval]))",
    "sum(rate(conserve_coserving_budget_tokens_total[$__rate_interval]))",
    "sum(rate(conserve_coserving_signals_total[$__rate_interval]))",
    "sum(rate(conserve_coserving_aborts_total[$__rate_interval]))",
    "histogram_quantile(0.5, "
    "sum by (le) (rate(conserve_coserving_abort_wait_seconds_bucket[$__rate_interval])))",
    "sum by (cause) (rate(conserve_coserving_offline_tokens_lost_total[$__rate_interval]))",
    "sum(rate(conserve_coserving_late_tokens_total[$__rate_interval]))",
    "sum by (role) (rate(conserve_energy_joules_total[$__rate_interval]))",
]


@pytest.mark.parametrize("expression", COUNTS)
def test_metrics_of_aborted_offline_work_and_its_energy_are_above_zero(
    life: WholeLife, expression: str
) -> None:
    assert max(life.seen[expression]) > 0


def test_metrics_show_the_power_cap_and_the_power_draw_of_a_gpu(life: WholeLife) -> None:
    assert set(life.seen["conserve_power_limit_watts"]) == {float(CAP_W)}
    assert set(life.seen["conserve_power_watts"]) == {75.0}


def test_alerts_without_a_cause_do_not_fire_in_a_live_fleet(scraping: Prometheus) -> None:
    alerts = {alert["labels"]["alertname"]: alert for alert in scraping.get("/api/v1/alerts")["alerts"]}
    assert not QUIET & set(alerts), alerts
    (group,) = scraping.get("/api/v1/rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert {rule["name"] for rule in group["rules"]} >= QUIET


def test_file_discovery_lists_the_pages_that_prometheus_has_scraped(
    scraping: Prometheus, laptop_fleet: RunningFleet
) -> None:
    listed = laptop_fleet.cli("targets", laptop_fleet.fleet.name)
    pages = {address for target in json.loads(listed.stdout) for address in target["targets"]}
    assert pages == {series["metric"]["instance"] for series in scraping.ask("up")}
