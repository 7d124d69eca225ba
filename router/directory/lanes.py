"""Conversations as lanes: what each did when, for a person to look at.

Bounded twice: the conversations kept are those with the latest events, and a lane keeps its latest spans.
Nothing here is needed to serve; it is fed by events in passing and read by the page once a second.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Span(StrEnum):
    PREFILL = "prefill"  # from the arrival of a transferred turn to its first token
    WAIT = "wait"  # from the arrival of a later turn to its first token
    DECODE = "decode"
    TOOL = "tool"  # between turns, the model has asked for a tool
    IDLE = "idle"  # between turns, the model has spoken to the user
    PARKED = "parked"


@dataclass(slots=True)
class Lane:
    key: str
    engine: str
    started: float
    turns: int = 0
    transfers: int = 0
    tokens: int = 0
    ended: str | None = None  # the cause
    spans: deque[tuple[Span, float]] = field(default_factory=deque)  # what began when; each ends the last


class Lanes:
    def __init__(self, conversations: int = 200, spans: int = 64) -> None:
        self._most_lanes = conversations
        self._most_spans = spans
        self._lanes: OrderedDict[str, Lane] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lanes)

    def turn_started(self, key: str, engine: str, transferred: bool, now: float) -> None:
        lane = self._lane(key, engine, now)
        lane.turns += 1
        lane.transfers += transferred
        lane.ended = None
        self._begin(lane, Span.PREFILL if transferred else Span.WAIT, now)

    def first_token(self, key: str, now: float) -> None:
        if lane := self._lanes.get(key):
            self._begin(lane, Span.DECODE, now)

    def turn_ended(self, key: str, tool_call: bool, tokens: int, now: float) -> None:
        if lane := self._lanes.get(key):
            lane.tokens = tokens or lane.tokens
            self._begin(lane, Span.TOOL if tool_call else Span.IDLE, now)

    def parked(self, key: str, now: float) -> None:
        """Unless its next turn has begun meanwhile."""
        if (lane := self._lanes.get(key)) and lane.spans and lane.spans[-1][0] in (Span.TOOL, Span.IDLE):
            self._begin(lane, Span.PARKED, now)

    def conversation_ended(self, key: str, cause: str, now: float) -> None:
        if lane := self._lanes.get(key):
            lane.ended = cause
            self._begin(lane, Span.IDLE, now)

    def newest_first(self, since: float) -> Iterator[dict[str, Any]]:
        """Lanes with an event or a running span after `since`; spans as [kind, begin]."""
        for lane in reversed(self._lanes.values()):
            if lane.ended is not None and lane.spans and lane.spans[-1][1] < since:
                continue
            yield {
                "key": lane.key,
                "engine": lane.engine,
                "started": lane.started,
                "turns": lane.turns,
                "transfers": lane.transfers,
                "tokens": lane.tokens,
                "ended": lane.ended,
                "spans": [[kind.value, at] for kind, at in lane.spans],
            }

    def _lane(self, key: str, engine: str, now: float) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, engine, now)
            while len(self._lanes) > self._most_lanes:
                self._lanes.popitem(last=False)
        lane.engine = engine
        return lane

    def _begin(self, lane: Lane, kind: Span, now: float) -> None:
        lane.spans.append((kind, now))
        while len(lane.spans) > self._most_spans:
            lane.spans.popleft()
        self._lanes.move_to_end(lane.key)
