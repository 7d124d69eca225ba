"""After `kill -9` of any part of a fleet, streams end properly, KV survives and every wait is bounded.

All tests use one fleet, so each waits until the part that it killed serves again.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fleet.streams import ChatStream
from tests.fleet.talk import client, conversation, get, metric, opening, text_turn
from tests.fleet.test_conversation import engine_urls
from tests.support.fleet import RunningFleet
from workers.processes import tree

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

RECOVERY_S = 400  # an engine's start on a busy machine
STREAM_S = 120
LEASE_S = 60.0  # default of `engine.lease`


@pytest.fixture
def fleet(laptop_fleet: RunningFleet) -> Iterator[RunningFleet]:
    serving(laptop_fleet)
    yield laptop_fleet
    serving(laptop_fleet)


def serving(fleet: RunningFleet) -> None:
    """Wait until all engines are up and have keepers, and the gateway accepts new conversations.
    An engine serves without its keeper, but only the keeper reports the engine's pid.
    """

    def whole() -> bool:
        try:
            ready = get(fleet.url, "/ready")["ready"]
            shown = get(fleet.url, "/dashboard/state")["engines"]
        except OSError:
            return False
        return ready and len(shown) == 3 and all(engine["status"] == "up" for engine in shown)

    fleet.until(whole, RECOVERY_S, "the fleet to be whole")
    fleet.until(
        lambda: all(one["pid"] for one in fleet.engines().values()), RECOVERY_S, "all keepers to report"
    )


def vllm_process(fleet: RunningFleet, engine: str, name: str) -> int:
    """Return the pid of the engine process that vLLM calls `name`."""
    root = psutil.Process(fleet.engines()[engine]["pid"])
    (found,) = [one.pid for one in tree(root) if one != root and name in " ".join(one.cmdline())]
    return found


def test_a_killed_decoder_cuts_a_stream_that_opted_out_of_resuming_and_no_other(fleet: RunningFleet) -> None:
    messages = opening(51, 60)
    text_turn(client(fleet.url, "victim"), fleet.model, messages)
    where = conversation(fleet, "victim", 1)["decoder"]
    bystander, on = 0, where
    while on == where:  # a conversation on the other decoder
        bystander += 1
        others = opening(5100 + bystander, 60)
        text_turn(client(fleet.url, f"bystander-{bystander}"), fleet.model, others)
        on = conversation(fleet, f"bystander-{bystander}", 1)["decoder"]
    messages.append({"role": "user", "content": "Go on at length."})
    others.append({"role": "user", "content": "Go on at length."})
    engine_core = vllm_process(fleet, where, "EngineCore")
    opted_out = {"actions": [{"action_type": "conversation.resume", "payload": {"value": False}}]}
    stream = ChatStream(fleet.url, fleet.model, messages, "victim", 3000, kv_hints=opted_out)
    other = ChatStream(fleet.url, fleet.model, others, f"bystander-{bystander}", 200)
    stream.until_text(20)
    fleet.kill(engine_core)
    stream.end(STREAM_S)
    assert stream.finished and stream.error is not None and stream.broken is None, stream.broken
    other.end(STREAM_S)
    assert other.finished and other.error is None and other.broken is None

    # The conversation goes on, placed anew, without its agent doing anything special.
    text_turn(client(fleet.url, "victim"), fleet.model, messages)
    again = conversation(fleet, "victim", 2)
    assert again["placements"][-1]["cause"] == "rebound"


QUEUED = 20


def refused(fleet: RunningFleet, reason: str) -> float:
    """Return how many transfers the decoders have given up for `reason`."""
    name = "conserve_kv_transfers_refused_total"
    return sum(metric(url, name, reason=reason) for url in engine_urls(fleet, "decode").values())


def test_all_prompts_of_a_killed_prefiller_are_answered_correctly(fleet: RunningFleet) -> None:
    messages = opening(52, 900)
    reference = text_turn(client(fleet.url, "undisturbed"), fleet.model, list(messages))
    conversation(fleet, "undisturbed", 1)
    engine_core = vllm_process(fleet, "prefill-0", "EngineCore")
    asked = metric(fleet.url, "conserve_transfers_asked_total")
    waited = {reason: refused(fleet, reason) for reason in ("stalled", "expired", "unknown")}
    lost = refused(fleet, "unreachable")
    stream = ChatStream(fleet.url, fleet.model, messages, "disturbed", 24)  # a second and more of its time
    behind = [
        ChatStream(fleet.url, fleet.model, opening(5200 + n, 40), f"behind-{n}", 8) for n in range(QUEUED)
    ]
    all_placed = asked + 1 + QUEUED
    fleet.until(
        lambda: metric(fleet.url, "conserve_transfers_asked_total") == all_placed, 30, "all to be placed"
    )
    fleet.kill(engine_core)
    for one in (stream, *behind):
        one.end(STREAM_S)
        assert one.finished and one.error is None and one.status == 200
    assert stream.text == reference.text
    for number in range(QUEUED):
        (placement,) = conversation(fleet, f"behind-{number}", 1)["placements"]
        assert placement["prefiller"] == "prefill-0"
    assert refused(fleet, "unreachable") > lost, "decoders have heard of it and computed"
    assert {reason: refused(fleet, reason) for reason in waited} == waited, "none waited for a timeout"


def test_a_killed_gateway_restarts_with_every_binding(fleet: RunningFleet) -> None:
    messages = opening(53, 60)
    text_turn(client(fleet.url, "gateway"), fleet.model, messages)
    before = conversation(fleet, "gateway", 1)
    messages.append({"role": "user", "content": "Go on."})
    gateways = set(fleet.processes("router.gateway.main")) - set(fleet.processes("workers.host"))
    stream = ChatStream(fleet.url, fleet.model, messages, "gateway", 3000)
    stream.until_text(10)
    fleet.kill(gateways.pop())
    stream.end(60)
    assert not stream.finished  # the stream ended when the gateway did
    serving(fleet)
    # The directory waits a moment for a gateway's stream to come back before it takes its turns for lost.
    fleet.until(lambda: conversation(fleet, "gateway")["state"] == "idle", 60, "the lost turn to be noticed")
    answer = text_turn(client(fleet.url, "gateway"), fleet.model, messages)
    after = conversation(fleet, "gateway", before["turns"] + 1)
    assert (after["decoder"], after["epoch"], after["transfers"]) == (before["decoder"], before["epoch"], 1)
    assert answer.cached_tokens > 0


def test_a_killed_directory_keeps_bindings_and_later_turns_continue(fleet: RunningFleet) -> None:
    messages = opening(54, 60)
    text_turn(client(fleet.url, "directory"), fleet.model, messages)
    before = conversation(fleet, "directory", 1)
    messages.append({"role": "user", "content": "Go on."})
    time.sleep(0.5)  # bindings are on disk before they are answered; counts of turns follow within 50 ms
    directories = set(fleet.processes("deploy.directory")) - set(fleet.processes("workers.host"))
    fleet.kill(directories.pop())
    began = time.monotonic()
    text_turn(client(fleet.url, "directory"), fleet.model, messages)
    bound_s, began = time.monotonic() - began, time.monotonic()
    text_turn(client(fleet.url, "new-at-once"), fleet.model, opening(542, 40))
    new_s = time.monotonic() - began
    print(f"directory killed: bound turn {bound_s:.1f} s, new conversation {new_s:.1f} s")
    assert bound_s < 5 and bound_s + new_s < 15
    serving(fleet)
    after = conversation(fleet, "directory", 2)
    assert (after["decoder"], after["epoch"], after["transfers"]) == (before["decoder"], before["epoch"], 1)
    text_turn(client(fleet.url, "new-after-directory"), fleet.model, opening(541, 40))


def test_no_kv_is_lost_when_a_keeper_is_killed(fleet: RunningFleet) -> None:
    messages = opening(55, 60)
    text_turn(client(fleet.url, "keeper"), fleet.model, messages)
    before = conversation(fleet, "keeper", 1)
    engine = fleet.engines()[before["decoder"]]
    for pid in fleet.processes("ray::KeeperActor"):
        fleet.kill(pid)
    messages.append({"role": "user", "content": "Go on."})
    answer = text_turn(client(fleet.url, "keeper"), fleet.model, messages)
    assert answer.cached_tokens > 0
    serving(fleet)
    now = fleet.engines()[before["decoder"]]
    assert (now["pid"], now["epoch"]) == (engine["pid"], engine["epoch"])
    assert conversation(fleet, "keeper", 2)["decoder"] == before["decoder"]


@pytest.mark.slow
def test_serving_continues_for_longer_than_the_lease_without_the_ray_head(fleet: RunningFleet) -> None:
    messages = opening(56, 60)
    text_turn(client(fleet.url, "head"), fleet.model, messages)
    before = conversation(fleet, "head", 1)
    engines = {name: (one["pid"], one["epoch"]) for name, one in fleet.engines().items()}
    (supervisor,) = fleet.processes("deploy.supervisor")
    (head,) = fleet.processes("ray.scripts.scripts", "--head")
    os.kill(supervisor, signal.SIGSTOP)  # otherwise it restarts the head within a second
    try:
        for process in [*psutil.Process(head).children(recursive=True), psutil.Process(head)]:
            process.kill()
        until = time.monotonic() + LEASE_S + 10
        turns = 1
        while time.monotonic() < until:
            messages.append({"role": "user", "content": f"Go on, {turns}."})
            text_turn(client(fleet.url, "head"), fleet.model, messages)
            text_turn(client(fleet.url, f"new-{turns}"), fleet.model, opening(5600 + turns, 30))
            turns += 1
            time.sleep(12)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    serving(fleet)
    after = conversation(fleet, "head", turns)
    assert (after["decoder"], after["epoch"], after["transfers"]) == (before["decoder"], before["epoch"], 1)
    assert {name: (one["pid"], one["epoch"]) for name, one in fleet.engines().items()} == engines


@pytest.mark.slow
def test_gateways_and_engines_outlive_a_killed_raylet(fleet: RunningFleet) -> None:
    """The test waits for longer than the leases that actors renew, because actors end with the raylet.
    New conversations continue too, because the directory process outlives its actor.
    """
    messages = opening(57, 60)
    text_turn(client(fleet.url, "raylet"), fleet.model, messages)
    kept = ("router.gateway", "deploy.directory")
    before = [set(fleet.processes(one)) for one in kept]
    engines = {one: (state["pid"], state["epoch"]) for one, state in fleet.engines().items()}
    for pid in fleet.processes("raylet/raylet"):
        fleet.kill(pid)
    longest, longest_new, new, until = 0.0, 0.0, 0, time.monotonic() + LEASE_S + 15
    while time.monotonic() < until:
        messages.append({"role": "user", "content": "Go on."})
        began = time.monotonic()
        text_turn(client(fleet.url, "raylet"), fleet.model, messages)
        longest, began, new = max(longest, time.monotonic() - began), time.monotonic(), new + 1
        text_turn(client(fleet.url, f"raylet-new-{new}"), fleet.model, opening(5700 + new, 30))
        longest_new = max(longest_new, time.monotonic() - began)
        time.sleep(2)
    print(
        f"raylet killed: longest bound turn {longest:.1f} s, of {new} new conversations {longest_new:.1f} s"
    )
    assert longest < 10 and longest_new < 10
    assert [set(fleet.processes(one)) for one in kept] == before
    serving(fleet)
    assert {one: (state["pid"], state["epoch"]) for one, state in fleet.engines().items()} == engines


def test_when_memory_runs_out_the_kernel_would_kill_engines_first_and_gateways_last(
    fleet: RunningFleet,
) -> None:
    """The scores are read from the kernel, because Ray's workers have 1000, which their children inherit."""

    def scores(*words: str) -> set[int]:
        found = set(fleet.processes(*words)) - set(fleet.processes("workers.host"))
        assert found, words
        return {int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in found}

    serves = scores("router.gateway") | scores("deploy.directory")
    batch, keepers = scores("router.batch"), scores("ray::KeeperActor")
    engines = scores("workers.serve") | scores("VLLM::EngineCore")
    assert max(serves) < min(batch) and max(batch) < min(keepers) and max(keepers) < min(engines)
