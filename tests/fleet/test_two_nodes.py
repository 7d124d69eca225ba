"""A fleet like configs/two-nodes.yaml runs on two Ray nodes of this machine, one for each tier.

One node prefills, the other one decodes and co-serves, and callers need keys. KV moves with NIXL if that is
installed (pip install --no-deps nixl nixl-cu12), otherwise with our own transfer.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.fleet.talk import client, conversation, metric, opening, text_turn
from tests.support.fleet import RunningFleet, conserve, fleet_up
from tests.support.nodes import Nodes
from tests.support.shrunk import shrunk
from tests.support.whole_life import submit

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

BACKEND = "nixl" if find_spec("nixl") else "tcp"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
LOOPBACK = {"UCX_TLS": "tcp,self,sysv,posix,cma", "UCX_NET_DEVICES": "lo"}
HOSTS = {"prefill-node": "127.0.0.3", "decode-node": "127.0.0.4"}
RESOURCES = {name: {f"{name.removesuffix('-node')}_tier": 1.0} for name in HOSTS}
TURNS, TRIES, TURNS_A_TRY = 6, 10, 4
ANEW = {"cache_salt": "anew"}
IMPATIENT = {"slo_class": "impatient", "vllm_xargs": {"slo_ttft_ms": 20}}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        made.start_head({"control_node": 10})
        made.join(HOSTS, RESOURCES)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an API key for each owner, and write their hashes to `file`."""
    base = tmp_path_factory.mktemp("keys")
    made = {"file": str(base / "keys.yaml")}
    for owner in ("carried", "anew", "busy", "batches"):
        said = conserve(base, "key", "new", "--owner", owner, "--file", made["file"])
        assert said.returncode == 0, said.stderr
        made[owner] = said.stdout.strip()
    return made


@pytest.fixture(scope="module")
def fleet(nodes: Nodes, keys: dict[str, str]) -> Iterator[RunningFleet]:
    def edit(content: Any) -> None:
        content["tiers"][1]["args"]["max-num-batched-tokens"] = 1024  # longer steps are longer waits for KV
        # NIXL's progress thread takes a core for each idle engine: on two cores a transfer may take 40 s.
        content["transfer"] |= {"backend": BACKEND, "lease": "10m"}
        content["engine"]["env"] |= LOOPBACK
        content["gateway"] |= {"keys_file": keys["file"], "processes": 2}
        content["slos"] = {"default": {}, "impatient": {"ttfet": "20ms", "last_turn_tbt": "1ms"}}
        content["ray"] = {"address": nodes.address, "control_resources": {"control_node": 1}}

    with pytest.MonkeyPatch.context() as patched:
        for name, value in nodes.environment.items():
            patched.setenv(name, value)
        with fleet_up("two-nodes", shrunk({"prefill": 1, "decode": 1}, edit)) as fleet:
            yield fleet


def decoder_page(fleet: RunningFleet) -> str:
    return f"http://{fleet.engines()['decode-0']['http']}"


def by_source(fleet: RunningFleet) -> dict[str, float]:
    sources = ("local_compute", "external_kv_transfer")
    return {source: metric(decoder_page(fleet), BY_SOURCE, source=source) for source in sources}


def test_each_engine_runs_on_the_node_of_its_tier(fleet: RunningFleet) -> None:
    hosts = {name: engine["http"].split(":")[0] for name, engine in fleet.engines().items()}
    assert hosts == {"prefill-0": HOSTS["prefill-node"], "decode-0": HOSTS["decode-node"]}


def test_kv_is_transferred_once_between_two_nodes_and_later_turns_find_it(
    fleet: RunningFleet, keys: dict[str, str]
) -> None:
    messages = opening(91, 200)
    sdk = client(fleet.url, keys["carried"])
    before = by_source(fleet)
    turns = [text_turn(sdk, fleet.model, messages)]
    after = by_source(fleet)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] >= 0.9 * turns[0].prompt_tokens
    assert after["local_compute"] - before["local_compute"] <= 64, "the decoder computed the prompt itself"

    while len(turns) < TURNS:
        before, known = after, turns[-1].prompt_tokens
        messages.append({"role": "user", "content": "Go on."})
        turns.append(text_turn(sdk, fleet.model, messages))
        after = by_source(fleet)
        new = turns[-1].prompt_tokens - known
        assert after["local_compute"] - before["local_compute"] <= new + 32

    found = conversation(fleet, keys["carried"], TURNS)
    assert found["transfers"] == 1 and found["decoder"] == "decode-0"
    # The same prompt with nothing of it cached: the salt keeps it apart.
    anew = text_turn(client(fleet.url, keys["anew"]), fleet.model, messages[:-1], extra_body=ANEW)
    assert anew.text == turns[-1].text


def test_arrivals_abort_offline_work_without_changing_any_answer(
    fleet: RunningFleet, keys: dict[str, str]
) -> None:
    """Safepoints work in an engine that also uses another KV connector."""
    page, messages = decoder_page(fleet), opening(92, 100)
    offline, busy = client(fleet.url, keys["batches"]), client(fleet.url, keys["busy"])
    turns = [text_turn(busy, fleet.model, messages)]

    def aborts() -> float:
        return metric(page, "conserve_coserving_aborts_total")

    for attempt in range(TRIES):
        before = metric(page, "conserve_coserving_offline_tokens_total")
        submit(offline, fleet.model, attempt)
        fleet.until(
            lambda before=before: metric(page, "conserve_coserving_offline_tokens_total") > before,
            120,
            "offline work to begin",
        )
        for _ in range(TURNS_A_TRY):
            messages.append({"role": "user", "content": "Go on."})
            turns.append(text_turn(busy, fleet.model, messages, extra_body=IMPATIENT))
            if aborts() > 0:
                break
        if aborts() > 0:
            break
    assert aborts() > 0
    assert metric(page, "conserve_kv_faults_total") == 0
    anew = text_turn(client(fleet.url, keys["anew"]), fleet.model, messages[:-1], extra_body=ANEW)
    assert anew.text == turns[-1].text
