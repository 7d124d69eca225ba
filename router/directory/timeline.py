"""Timeline of conversations: what each did when, for a person to look at.

Bounded twice: the conversations kept are those with the latest events, each with its latest spans.
Nothing here is needed to serve; it is fed by events in passing and read by the page once a second.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SpanKind(StrEnum):
    PREFILL = "prefill"  # from the arrival of a transferred turn to its first token
    WAIT = "wait"  # from the arrival of a later turn to its first token
    DECODE = "decode"
    TOOL = "tool"  # between turns, the model has asked for a tool
    IDLE = "idle"  # between turns, the model has spoken to the user
    PARKED = "parked"


@dataclass(slots=True)
class ConversationTimeline:
    key: str
    engine: str
    started: float
    turns: int = 0
    transfers: int = 0
    tokens: int = 0
    ended: str | None = None  # the cause
    spans: deque[tuple[SpanKind, float]] = field(default_factory=deque)  # what began when; each ends the last


class Timeline:
    def __init__(self, conversations: int = 200, spans: int = 64) -> None:
        self._most_conversations = conversations
        self._most_spans = spans
        self._conversations: OrderedDict[str, ConversationTimeline] = OrderedDict()

    def __len__(self) -> int:
        return len(self._conversations)

    def turn_started(self, key: str, engine: str, transferred: bool, now: float) -> None:
        one = self._of(key, engine, now)
        one.turns += 1
        one.transfers += transferred
        one.ended = None
        self._begin(one, SpanKind.PREFILL if transferred else SpanKind.WAIT, now)

    def first_token(self, key: str, now: float) -> None:
        if one := self._conversations.get(key):
            self._begin(one, SpanKind.DECODE, now)

    def turn_ended(self, key: str, tool_call: bool, tokens: int, now: float) -> None:
        if one := self._conversations.get(key):
            one.tokens = tokens or one.tokens
            self._begin(one, SpanKind.TOOL if tool_call else SpanKind.IDLE, now)

    def parked(self, key: str, now: float) -> None:
        """Unless its next turn has begun meanwhile."""
        one = self._conversations.get(key)
        if one is not None and one.spans and one.spans[-1][0] in (SpanKind.TOOL, SpanKind.IDLE):
            self._begin(one, SpanKind.PARKED, now)

    def unparked(self, key: str, now: float) -> None:
        one = self._conversations.get(key)
        if one is not None and one.spans and one.spans[-1][0] is SpanKind.PARKED:
            self._begin(one, SpanKind.IDLE, now)

    def conversation_ended(self, key: str, cause: str, now: float) -> None:
        if one := self._conversations.get(key):
            one.ended = cause
            self._begin(one, SpanKind.IDLE, now)

    def newest_first(self, since: float) -> Iterator[dict[str, Any]]:
        """Conversations with an event or a running span after `since`; spans as [kind, begin]."""
        for one in reversed(self._conversations.values()):
            if one.ended is not None and one.spans and one.spans[-1][1] < since:
                continue
            yield {
                "key": one.key,
                "engine": one.engine,
                "started": one.started,
                "turns": one.turns,
                "transfers": one.transfers,
                "tokens": one.tokens,
                "ended": one.ended,
                "spans": [[kind.value, at] for kind, at in one.spans],
            }

    def _of(self, key: str, engine: str, now: float) -> ConversationTimeline:
        one = self._conversations.get(key)
        if one is None:
            one = self._conversations[key] = ConversationTimeline(key, engine, now)
            while len(self._conversations) > self._most_conversations:
                self._conversations.popitem(last=False)
        one.engine = engine
        return one

    def _begin(self, one: ConversationTimeline, kind: SpanKind, now: float) -> None:
        one.spans.append((kind, now))
        while len(one.spans) > self._most_spans:
            one.spans.popleft()
        self._conversations.move_to_end(one.key)
