"""A stream whose decoder is killed or terminated has the same output as an undisturbed one."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.streams import ChatStream
from tests.fleet.talk import CITY_TOOL, FORCED, conversation, get, metric, opening
from tests.fleet.test_faults import serving, vllm_process
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

STREAMS = 12
FEW = 6
STREAM_S = 300
LONG_SCHEMA = {
    "type": "object",
    "properties": {"notes": {"type": "string", "minLength": 400, "maxLength": 450}},
    "required": ["notes"],
    "additionalProperties": False,
}
LONG_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": LONG_SCHEMA},
}
KINDS: list[dict[str, Any]] = [
    {},
    {"tools": [LONG_TOOL], "tool_choice": FORCED, "ignore_eos": False},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": LONG_SCHEMA}}},
]


@pytest.fixture
def fleet(laptop_fleet: RunningFleet) -> Iterator[RunningFleet]:
    serving(laptop_fleet)
    yield laptop_fleet
    serving(laptop_fleet)


def start(fleet: RunningFleet, number: int, key: str) -> ChatStream:
    more = {"tools": [CITY_TOOL], **KINDS[number % 3], "stream_options": {"include_usage": True}}
    return ChatStream(fleet.url, fleet.model, opening(7000 + number, 30), f"{key}-{number}", 500, **more)


def output_of(stream: ChatStream) -> tuple[Any, ...]:
    assert stream.broken is None and stream.error is None and stream.finished, (stream.error, stream.broken)
    return stream.text, stream.arguments, stream.said


def resumed(fleet: RunningFleet) -> float:
    return metric(fleet.url, "conserve_streams_cut_total", outcome="resumed")


@pytest.fixture(scope="module")
def undisturbed(laptop_fleet: RunningFleet) -> list[tuple[Any, ...]]:
    """Return the text of each stream on an undisturbed fleet."""
    serving(laptop_fleet)
    streams = [start(laptop_fleet, number, "undisturbed") for number in range(STREAMS)]
    return [output_of(stream.end(STREAM_S)) for stream in streams]


@pytest.mark.parametrize(
    ("process", "how", "count"),
    [
        ("EngineCore", signal.SIGKILL, STREAMS),
        ("workers.serve", signal.SIGKILL, STREAMS),
        ("workers.serve", signal.SIGTERM, FEW),  # a machine that shuts down sends this
    ],
)
def test_streams_resumed_on_another_decoder_equal_undisturbed_streams(
    fleet: RunningFleet,
    undisturbed: list[tuple[Any, ...]],
    process: str,
    how: signal.Signals,
    count: int,
) -> None:
    hit = f"hit-{process}-{how.name}"
    before = resumed(fleet)
    pids = {name: vllm_process(fleet, name, process) for name in ("decode-0", "decode-1")}
    streams = [start(fleet, number, hit) for number in range(count)]
    fleet.until(lambda: all(s.text or s.arguments for s in streams), STREAM_S, "all to have begun")
    # Hit the decoder of the stream with most output left, so that it still runs when its decoder is known.
    running = [number for number, stream in enumerate(streams) if not stream.finished]
    last = min(running, key=lambda number: len(streams[number].text + streams[number].arguments))
    os.kill(pids[conversation(fleet, f"{hit}-{last}")["decoder"]], how)
    for stream in streams:
        stream.end(STREAM_S)
    assert [output_of(stream) for stream in streams] == undisturbed[:count]
    placements = [
        [one["cause"] for one in get(fleet.url, "/v1/conversations", f"{hit}-{n}")["data"][0]["placements"]]
        for n in range(count)
    ]
    resumed_streams = [
        number for number, causes in enumerate(placements) if causes == ["first_turn", "rebound"]
    ]
    assert len(resumed_streams) == resumed(fleet) - before
    assert len(resumed_streams) >= min(3, count // 6), "too few streams were hit"
    for arguments in (stream.arguments for stream in streams[1::3]):
        json.loads(arguments)
