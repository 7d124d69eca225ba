"""Decoders of a real fleet compute the prompts that exceed the prefiller's rate, and no queue remains.

The tests use the fleet that all tests share; its directory places elastically meanwhile.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fleet.streams import ChatStream
from tests.fleet.talk import conversation, metric, opening
from tests.fleet.test_faults import refused, serving, vllm_process
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

CHANGE_S = 300
STREAM_S = 180
WORDS = 250
SURGE = 14
KILLED_UNDER = 24


def place_first_turns(fleet: RunningFleet, where: str, base: Path) -> None:
    content = yaml.safe_load(fleet.file.read_text())
    content["placement"] = {"first_turns": where}
    content["conversation"]["prefiller_wait"] = "10s" if where == "elastic" else "2m"
    file = base / f"{where}.yaml"
    file.write_text(yaml.safe_dump(content))
    answer = fleet.cli("up", str(file), timeout_s=CHANGE_S)
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"


@pytest.fixture
def fleet(laptop_fleet: RunningFleet, tmp_path: Path) -> Iterator[RunningFleet]:
    place_first_turns(laptop_fleet, "elastic", tmp_path)
    yield laptop_fleet
    place_first_turns(laptop_fleet, "prefiller", tmp_path)


def first_turn(fleet: RunningFleet, key: str, seed: int) -> ChatStream:
    return ChatStream(fleet.url, fleet.model, opening(seed, WORDS), key, 8)


def placement(fleet: RunningFleet, key: str) -> dict[str, Any]:
    (one,) = conversation(fleet, key, 1)["placements"]
    return dict(one)


def answered(stream: ChatStream) -> None:
    stream.end(STREAM_S)
    assert (stream.status, stream.finished, stream.error) == (200, True, None)


def took(fleet: RunningFleet, key: str, seed: int) -> float:
    """Send a first turn, wait for its answer, and return its time to first token in seconds."""
    answered(first_turn(fleet, key, seed))
    return float(placement(fleet, key)["took"]["first_token_s"])


def test_no_turn_of_a_surge_is_refused_and_no_queue_remains_after_it(fleet: RunningFleet) -> None:
    calm = [took(fleet, f"before-{number}", 7000 + number) for number in range(3)]  # below its rate
    surge = [first_turn(fleet, f"surge-{number}", 7100 + number) for number in range(SURGE)]
    for stream in surge:
        answered(stream)
    placements = [placement(fleet, f"surge-{number}") for number in range(SURGE)]
    for one in placements:
        assert one["receipt"]["estimates"] is not None
        assert one["took"]["first_token_s"] > 0
    computed = [one["prefiller"] is not None for one in placements]
    assert any(computed) and not all(computed), placements
    assert took(fleet, "after", 7200) < 2 * max(calm) + 1.0, "as before, at once"
    receipt = placement(fleet, "after")["receipt"]["prefiller"]
    options = [receipt["chosen"], *receipt["runners_up"]]
    assert [one["wait_s"] for one in options if one] == [0.0], "no queue is left, nor any that is not there"


def test_no_client_waits_for_a_timeout_when_a_prefiller_is_killed_in_a_surge(fleet: RunningFleet) -> None:
    """First turns on decoders, on the killed prefiller and in its queue all continue immediately."""
    took(fleet, "calm", 7300)
    waited = {reason: refused(fleet, reason) for reason in ("stalled", "expired", "unknown")}
    engine_core = vllm_process(fleet, "prefill-0", "EngineCore")
    asked = metric(fleet.url, "conserve_transfers_asked_total")
    surge = [first_turn(fleet, f"killed-{number}", 7400 + number) for number in range(KILLED_UNDER)]
    fleet.until(
        lambda: metric(fleet.url, "conserve_transfers_asked_total") >= asked + 3, 30, "some to wait for it"
    )
    fleet.kill(engine_core)
    began = time.monotonic()
    for stream in surge:
        answered(stream)
    print(f"{KILLED_UNDER} first turns were answered {time.monotonic() - began:.1f} s after the kill")
    turns = [conversation(fleet, f"killed-{number}", 1) for number in range(KILLED_UNDER)]
    assert any(one["placements"][0]["prefiller"] == "prefill-0" for one in turns)
    assert {reason: refused(fleet, reason) for reason in waited} == waited, "none waited for a timeout"
    serving(fleet)
    for number, stream in enumerate(surge[:3]):
        calm = first_turn(fleet, f"calm-{number}", 7400 + number)
        answered(calm)
        assert calm.text == stream.text
