"""Elastic placing on real engines: a load above a prefiller's rate is shared with the decoders, then is gone.

On the fleet of all tests, whose directory is told to place so, and afterwards as before.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fleet.streams import Stream
from tests.fleet.talk import conversation, opening
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

CHANGE_S = 300
STREAM_S = 180
WORDS = 250
SURGE = 14


def place_first_turns(fleet: RunningFleet, where: str, base: Path) -> None:
    content = yaml.safe_load(fleet.file.read_text())
    content["placement"] = {"first_turns": where}
    file = base / f"{where}.yaml"
    file.write_text(yaml.safe_dump(content))
    answer = fleet.cli("up", str(file), timeout_s=CHANGE_S)
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"


@pytest.fixture
def fleet(laptop_fleet: RunningFleet, tmp_path: Path) -> Iterator[RunningFleet]:
    place_first_turns(laptop_fleet, "elastic", tmp_path)
    yield laptop_fleet
    place_first_turns(laptop_fleet, "prefiller", tmp_path)


def first_turn(fleet: RunningFleet, key: str, seed: int) -> Stream:
    return Stream(fleet.url, fleet.model, opening(seed, WORDS), key, 8)


def placement(fleet: RunningFleet, key: str) -> dict[str, Any]:
    (one,) = conversation(fleet, key, 1)["placements"]
    return dict(one)


def answered(stream: Stream) -> None:
    stream.end(STREAM_S)
    assert (stream.status, stream.finished, stream.error) == (200, True, None)


def test_a_surge_is_refused_nothing_and_leaves_no_queue(fleet: RunningFleet) -> None:
    for number in range(3):  # below its rate, and what engines compute a second becomes known
        answered(first_turn(fleet, f"before-{number}", 7000 + number))
    surge = [first_turn(fleet, f"surge-{number}", 7100 + number) for number in range(SURGE)]
    for stream in surge:
        answered(stream)
    placements = [placement(fleet, f"surge-{number}") for number in range(SURGE)]
    for one in placements:
        assert one["receipt"]["estimates"] is not None
        assert one["took"]["first_token_s"] > 0
    computed = [one["prefiller"] is not None and "taken_back" not in one for one in placements]
    assert any(computed) and not all(computed), placements
    answered(first_turn(fleet, "after", 7200))
    receipt = placement(fleet, "after")["receipt"]["prefiller"]
    options = [receipt["chosen"], *receipt["runners_up"]]
    assert [one["wait_s"] for one in options if one] == [0.0], "no queue is left, nor any that is not there"
