"""A decoder ends under its streams, killed or told to: each of them ends as an undisturbed one does."""

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

STREAMS = 30
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


def said(stream: ChatStream) -> tuple[Any, ...]:
    assert stream.broken is None and stream.error is None and stream.finished, (stream.error, stream.broken)
    return stream.text, stream.arguments, stream.said


def resumed(fleet: RunningFleet) -> float:
    return metric(fleet.url, "conserve_streams_cut_total", outcome="resumed")


@pytest.mark.parametrize(
    ("process", "how", "count"),
    [
        ("EngineCore", signal.SIGKILL, STREAMS),
        ("workers.serve", signal.SIGKILL, STREAMS),
        ("workers.serve", signal.SIGTERM, FEW),  # as a machine that shuts down does
    ],
)
def test_resumed_streams_equal_undisturbed_ones(
    fleet: RunningFleet, process: str, how: signal.Signals, count: int
) -> None:
    calm, hit = f"calm-{process}-{how.name}", f"hit-{process}-{how.name}"
    undisturbed = [start(fleet, number, calm) for number in range(count)]
    expected = [said(stream.end(STREAM_S)) for stream in undisturbed]
    before = resumed(fleet)
    pids = {name: vllm_process(fleet, name, process) for name in ("decode-0", "decode-1")}
    streams = [start(fleet, number, hit) for number in range(count)]
    fleet.until(lambda: all(s.text or s.arguments for s in streams), STREAM_S, "all to have begun")
    # Of the decoder of the one that has most to come: asking which it is must not take until all have ended.
    running = [number for number, stream in enumerate(streams) if not stream.finished]
    last = min(running, key=lambda number: len(streams[number].text + streams[number].arguments))
    os.kill(pids[conversation(fleet, f"{hit}-{last}")["decoder"]], how)
    for stream in streams:
        stream.end(STREAM_S)
    assert [said(stream) for stream in streams] == expected
    placements = [
        [one["cause"] for one in get(fleet.url, "/v1/conversations", f"{hit}-{n}")["data"][0]["placements"]]
        for n in range(count)
    ]
    went_on = [number for number, causes in enumerate(placements) if causes == ["first_turn", "rebound"]]
    assert len(went_on) == resumed(fleet) - before
    assert len(went_on) >= min(3, count // 6), "each kind, at every cut: tests/workers/test_token_lines.py"
    for arguments in (stream.arguments for stream in streams[1::3]):
        json.loads(arguments)
