"""Conversations of a killed decoder continue on the other one with their KV from LMCache.

The tests start a fleet with the shared tier, if LMCache is installed (requirements/lmcache.txt).
"""

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.fleet.talk import client, conversation, metric, opening, text_turn
from tests.support.fleet import RunningFleet, fleet_up

pytest.importorskip("lmcache", reason="no LMCache: pip install --no-deps -r requirements/lmcache.txt")

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SERVER = "lmcache.v1.multiprocess.http_server"


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    kv = {"host_kv_gib": 1, "kv_tiers": ["host", "lmcache"], "lmcache": {"gib": 1}}
    with fleet_up("random", lambda content: content.update(name="shared", kv=kv)) as fleet:
        yield fleet


def by_source(fleet: RunningFleet, engine: str) -> dict[str, float]:
    url = f"http://{fleet.engines()[engine]['http']}"
    return {s: metric(url, BY_SOURCE, source=s) for s in ("local_compute", "external_kv_transfer")}


def test_a_killed_decoders_conversation_continues_elsewhere_with_its_kv(fleet: RunningFleet) -> None:
    messages = opening(81, 500)
    sdk = client(fleet.url, "survivor")
    text_turn(sdk, fleet.model, messages)
    messages.append({"role": "user", "content": "Go on."})
    text_turn(sdk, fleet.model, messages)
    found = conversation(fleet, "survivor", 2)
    lost = found["decoder"]
    (other,) = [name for name, one in fleet.engines().items() if one["role"] == "decode" and name != lost]
    before = by_source(fleet, other)
    time.sleep(2)  # LMCache stores in the background

    root = psutil.Process(fleet.engines()[lost]["pid"])
    for process in [root, *root.children(recursive=True)]:
        fleet.kill(process.pid)
    messages.append({"role": "user", "content": "Are you still there?"})
    turn = text_turn(sdk, fleet.model, messages)

    found = conversation(fleet, "survivor", 3)
    assert found["decoder"] == other and found["transfers"] == 1
    assert found["placements"][-1]["receipt"]["prefiller"]["why"] == "restored"
    after = by_source(fleet, other)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] >= 0.9 * turn.prompt_tokens
    assert after["local_compute"] - before["local_compute"] <= 0.1 * turn.prompt_tokens
    # The same prompt, computed anew: the salt keeps it apart from all that is cached anywhere.
    anew = text_turn(client(fleet.url, "anew"), fleet.model, messages[:-1], extra_body={"cache_salt": "anew"})
    assert anew.text == turn.text


def test_decoders_serve_without_a_killed_lmcache_server_and_use_it_again_later(fleet: RunningFleet) -> None:
    def servers() -> list[int]:
        return fleet.processes("-m", SERVER, "--chunk-size")

    before = servers()
    messages = opening(82, 200)
    sdk = client(fleet.url, "without")
    text_turn(sdk, fleet.model, messages)
    here = conversation(fleet, "without", 1)["decoder"]
    epoch = fleet.engines()[here]["epoch"]
    for pid in before:
        fleet.kill(pid)
    for word in ("one", "two", "three"):
        messages.append({"role": "user", "content": f"Say {word}."})
        text_turn(sdk, fleet.model, messages)
    found = conversation(fleet, "without", 4)
    assert (found["decoder"], fleet.engines()[here]["epoch"]) == (here, epoch)
    fleet.until(lambda: set(servers()) - set(before), 120, "a new server")
