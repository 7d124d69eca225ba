"""A real Prometheus scrapes the live fleet, and every panel and alert finds its data there."""

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deploy.observe.test_catalogue_is_complete import compared, expressions
from tests.fleet.talk import client, opening, tool_turn
from tests.router.batch.jobs import jsonl
from tests.support.fleet import ROOT, RunningFleet, environment
from tests.support.prometheus import MISSING, PROMETHEUS, Prometheus, prometheus

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PROMETHEUS, reason=MISSING),
]

NO_GPU = "no GPU whose power could be read"
NO_COSERVING = "configs/laptop.yaml has co-serving off"
NO_DATA_HERE = {
    "energy: Power": NO_GPU,
    "energy: Power limits": NO_GPU,
    "energy: Energy by phase": NO_GPU,
    "energy: Output tokens per joule": NO_GPU,
    "energy: Joules per conversation": NO_GPU,
    "coserving: Tokens computed": NO_COSERVING,
    "coserving: Aborts": NO_COSERVING,
    "coserving: From an arrival to the safepoint": NO_COSERVING,
    "coserving: Offline tokens computed in vain": NO_COSERVING,
    "coserving: Online tokens later than promised": NO_COSERVING,
    "coserving: Latency model against the clock": NO_COSERVING,
}
QUIET = {"ConserveEngineDown", "ConserveDirectoryAway", "ConserveIntegrityFault", "ConservePowerCapNotSet"}


@pytest.fixture(scope="module")
def scraping(laptop_fleet: RunningFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Through HTTP discovery, as a Prometheus on another machine would."""
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "targets",
        laptop_fleet.fleet.name,
        "--serve",
        "127.0.0.1:0",
    ]
    process = subprocess.Popen(
        command, env=environment(laptop_fleet.base), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and select.select([process.stdout], [], [], 120)[0]
        url = process.stdout.readline().partition("url: ")[2].strip().rstrip("}]")
        folder = tmp_path_factory.mktemp("prometheus")
        pages = [{"url": url, "refresh_interval": "5s"}]
        with prometheus(folder, "1s", http_sd_configs=pages) as running:
            processes = 2 + 2 * len(laptop_fleet.engines())
            running.until(lambda: len(running.ask("up == 1")) == processes, f"{processes} pages")
            time.sleep(2.5)  # what counts from here on is an increase
            talk(laptop_fleet)
            settled = "sum(conserve_batch_live_batches) == 0 and sum(conserve_e2e_seconds_count) > 1"
            running.until(lambda: running.ask(settled), "the batch's end")
            time.sleep(2.5)  # and seen twice
            yield running
    finally:
        process.terminate()
        process.wait(30)


def talk(fleet: RunningFleet) -> None:
    """Something of everything: a conversation with a tool, an answer to a user, a batch."""
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


def test_every_page_of_the_fleet_is_scraped_as_what_it_is(
    scraping: Prometheus, laptop_fleet: RunningFleet
) -> None:
    up = {
        (series["metric"]["conserve_process"], series["metric"].get("conserve_engine", ""))
        for series in scraping.ask("up == 1")
    }
    engines = set(laptop_fleet.engines())
    of_engines = {(process, engine) for process in ("engine", "keeper") for engine in engines}
    assert up == {("gateway", ""), ("directory", "")} | of_engines
    labels = {label for series in scraping.ask('{__name__=~"conserve_.+"}') for label in series["metric"]}
    assert not [label for label in labels if label.startswith("exported_")]


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_every_expression_has_data(scraping: Prometheus, where: str, expression: str) -> None:
    found = scraping.numbers(compared(expression))
    if where in NO_DATA_HERE:
        assert not found, f"has data: take it out of NO_DATA_HERE ({NO_DATA_HERE[where]})"
        pytest.skip(NO_DATA_HERE[where])
    assert found, f"{where}: {expression}"


def test_panels_without_data_are_still_panels() -> None:
    assert set(NO_DATA_HERE) <= {where for where, _ in expressions()}


def test_no_alert_says_what_is_not_so(scraping: Prometheus) -> None:
    alerts = {alert["labels"]["alertname"]: alert for alert in scraping.get("/api/v1/alerts")["alerts"]}
    assert not QUIET & set(alerts), alerts
    (group,) = scraping.get("/api/v1/rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert {rule["name"] for rule in group["rules"]} >= QUIET


def test_file_discovery_lists_the_same_pages(scraping: Prometheus, laptop_fleet: RunningFleet) -> None:
    listed = laptop_fleet.cli("targets", laptop_fleet.fleet.name)
    pages = {address for target in json.loads(listed.stdout) for address in target["targets"]}
    assert pages == {series["metric"]["instance"] for series in scraping.ask("up")}
