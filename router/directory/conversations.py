"""Records live conversations (without their bindings), and a timeline of their recent events."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from itertools import islice, takewhile
from math import inf
from typing import Any

from placement.routing.bindings import Binding

MAX_NOTES = 8
LOOK_AGAIN_S = 1.0  # until an expired conversation with a running turn is checked again
MAX_OVER = 10_000  # ended turns that are remembered
ENDED_REMEMBERED = 4096


@dataclass(slots=True)
class PlacedTurn:
    """Placement of a running turn, and how many of its prompt tokens the decoder lacked."""

    note: dict[str, Any]  # the placement's entry in `ConversationRecord.notes`
    tokens: int


@dataclass(slots=True)
class ConversationRecord:
    key: str
    parent: str | None
    created_at: float
    used_at: float
    turns: int = 0  # finished turns
    prompt_tokens: int = 0  # prompt of the newest finished turn
    completion_tokens: int = 0
    output_tokens: int = 0  # output of all turns
    transfers: int = 0  # placements that asked a prefiller
    notes: list[dict[str, Any]] = field(default_factory=list)  # one a placement: cause, engines, receipt
    gateway: str = ""  # gateway that served the newest turn
    running: dict[str, set[int]] = field(default_factory=dict)  # gateway -> turns in flight there
    placed: dict[tuple[str, int], PlacedTurn] = field(default_factory=dict)  # by gateway and turn
    ttl_s: float = 0.0  # seconds without a turn after which it ends; 0: the default
    parked: bool = False  # as engines reported since the directory started
    parks_on: str = ""  # engine that reported the KV parked while a turn still counted as running
    moved_at: float | None = None  # when it moved to its present decoder
    moves_from: str = ""  # the former decoder, until it has sent the KV
    prefix: tuple[str, int, int] = ("", 0, 0)  # prefiller, its epoch, and what it has computed of the prompt

    @property
    def context_tokens(self) -> int:
        """Return the tokens that the decoder holds after the newest finished turn."""
        return self.prompt_tokens + self.completion_tokens

    def described(self, binding: Binding | None) -> dict[str, Any]:
        """Return the conversation as the HTTP API shows it."""
        return {
            "key": self.key,
            "state": self._state(binding),
            "parent": self.parent,
            "created_at": self.created_at,
            "used_at": self.used_at,
            "decoder": binding.engine if binding else None,
            "epoch": binding.epoch if binding else None,
            "turns": self.turns,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "output_tokens": self.output_tokens,
            "transfers": self.transfers,
            "placements": self.notes,
        }

    def _state(self, binding: Binding | None) -> str:
        if self.running:
            return "running"
        return "unbound" if binding is None else "parked" if self.parked else "idle"

    def note(self, note: dict[str, Any]) -> None:
        self.notes.append(note)
        if len(self.notes) > MAX_NOTES:
            del self.notes[1]  # the first note says how the conversation began, and stays


class ConversationRecords:
    """Live conversations, least recently used first, and a limited number of ended ones."""

    def __init__(self) -> None:
        self._live: OrderedDict[str, ConversationRecord] = OrderedDict()
        self._running: dict[str, set[str]] = {}  # gateway -> conversations with a turn there
        self._ended: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._over: OrderedDict[tuple[str, int], None] = OrderedDict()  # turns that their gateway has ended
        self._parked: dict[str, str] = {}  # conversation -> engine
        # When to check the conversations next whose clients chose a time to live.
        self._due: dict[str, float] = {}
        self._dues: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[ConversationRecord]:
        return iter(tuple(self._live.values()))

    def get(self, key: str) -> ConversationRecord | None:
        return self._live.get(key)

    def add(self, conversation: ConversationRecord) -> None:
        self._live[conversation.key] = conversation
        self._ended.pop(conversation.key, None)
        if conversation.ttl_s:  # read from the journal
            self.let_live(conversation, conversation.ttl_s)

    def touch(self, conversation: ConversationRecord, now: float) -> None:
        conversation.used_at = now
        self._live.move_to_end(conversation.key)

    def pop(self, key: str) -> ConversationRecord | None:
        conversation = self._live.pop(key, None)
        if conversation is not None:
            for gateway in conversation.running:
                self._running[gateway].discard(key)
            self._parked.pop(key, None)
            self._due.pop(key, None)
        return conversation

    def park(self, key: str, engine: str) -> bool:
        """Mark a conversation as parked; return False if it is unknown or has a running turn.

        An engine that parks immediately may report it before the gateway reports the turn's end. In that
        case, the turn's end marks the conversation as parked.
        """
        conversation = self._live.get(key)
        if conversation is None:
            return False
        conversation.parks_on = engine if conversation.running else ""
        if conversation.running:
            return False
        self._parked[key] = engine
        conversation.parked = True
        return True

    def unpark(self, key: str, engine: str) -> bool:
        """Record that a conversation's parked KV was dropped because the host memory was full."""
        if (conversation := self._live.get(key)) is not None and conversation.parks_on == engine:
            conversation.parks_on = ""
        if self._parked.get(key) != engine:
            return False
        del self._parked[key]
        self._live[key].parked = False
        return True

    def engine_gone(self, engine: str) -> None:
        for key in [key for key, where in self._parked.items() if where == engine]:
            del self._parked[key]
            self._live[key].parked = False
        for conversation in self._live.values():
            if conversation.parks_on == engine:
                conversation.parks_on = ""

    @property
    def parked(self) -> int:
        return len(self._parked)

    def turn_began(self, conversation: ConversationRecord, gateway: str, turn: int) -> None:
        conversation.gateway = gateway
        self._parked.pop(conversation.key, None)
        conversation.parked, conversation.parks_on = False, ""
        if not self.is_over(gateway, turn):
            conversation.running.setdefault(gateway, set()).add(turn)
            self._running.setdefault(gateway, set()).add(conversation.key)

    def turn_ended(self, conversation: ConversationRecord | None, gateway: str, turn: int) -> None:
        """Record that a turn no longer runs: it has ended, or it waits for another placement."""
        if conversation is None:
            return
        conversation.placed.pop((gateway, turn), None)
        here = conversation.running.get(gateway)
        if here is None or turn not in here:
            return
        here.discard(turn)
        if not here:
            del conversation.running[gateway]
            self._running[gateway].discard(conversation.key)
            if conversation.parks_on and not conversation.running:
                self.park(conversation.key, conversation.parks_on)

    def turn_over(self, gateway: str, turn: int) -> None:
        """Remember that a gateway's turn has ended for good.

        A request for the turn's placement, or a report of its beginning, may still arrive late. Neither may
        begin the turn again.
        """
        if turn:
            self._over[gateway, turn] = None
            if len(self._over) > MAX_OVER:
                self._over.popitem(last=False)

    def is_over(self, gateway: str, turn: int) -> bool:
        return (gateway, turn) in self._over

    def gateway_gone(self, gateway: str) -> list[ConversationRecord]:
        """End all turns of a gateway; return the conversations that had a turn there."""
        had = [self._live[key] for key in self._running.pop(gateway, ())]
        for conversation in had:
            conversation.running.pop(gateway, None)
            for turn in [turn for turn in conversation.placed if turn[0] == gateway]:
                del conversation.placed[turn]
        return had

    def let_live(self, conversation: ConversationRecord, ttl_s: float) -> None:
        """Set a conversation's time to live to `ttl_s`, instead of the fleet's default."""
        conversation.ttl_s = ttl_s
        self._look_at(conversation.key, conversation.used_at + ttl_s)

    def _look_at(self, key: str, due: float) -> None:
        if due < self._due.get(key, inf):
            self._due[key] = due
            heappush(self._dues, (due, key))

    def silent(self, now: float, ttl_s: float) -> list[ConversationRecord]:
        """Return conversations without a running turn whose time to live has passed."""
        unused = list(takewhile(lambda one: one.used_at <= now - ttl_s, self._live.values()))
        for conversation in unused:
            if conversation.running or conversation.ttl_s:
                self._live.move_to_end(conversation.key)  # so that the next calls skip it
        over = [one for one in unused if not one.ttl_s]
        again: list[tuple[str, float]] = []
        while self._dues and self._dues[0][0] <= now:
            due, key = heappop(self._dues)
            if self._due.get(key) != due:
                continue  # the conversation has ended, or was checked sooner
            del self._due[key]
            conversation = self._live[key]
            end = conversation.used_at + conversation.ttl_s
            again.append((key, end if end > now else now + LOOK_AGAIN_S))
            if end <= now:
                over.append(conversation)
        for key, end in again:
            self._look_at(key, end)
        return [conversation for conversation in over if not conversation.running]

    def remember_ended(self, key: str, description: dict[str, Any]) -> None:
        self._ended[key] = description
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def ended(self, key: str) -> dict[str, Any] | None:
        return self._ended.get(key)

    def running_tokens(self) -> int:
        """Return the context tokens of all conversations with a running turn."""
        return sum(one.context_tokens for one in self._live.values() if one.running)

    def page(self, prefix: str, after: str | None, limit: int) -> list[ConversationRecord]:
        """Return up to `limit` conversations whose keys begin with `prefix`, least recently used first.

        The page begins after the conversation `after`.
        """
        keys = iter([key for key in self._live if key.startswith(prefix)])
        if after is not None:
            next((key for key in keys if key == after), None)
        return [self._live[key] for key in islice(keys, limit)]


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
    spans: deque[tuple[SpanKind, float]] = field(default_factory=deque)  # kind and begin, until the next


class Timeline:
    """Recent events of conversations with their times, which the dashboard shows.

    It keeps the conversations with the latest events, and the latest spans of each. It has no influence on
    placement.
    """

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
        """Record that a conversation is parked, unless its next turn has already begun."""
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
        """Yield all timelines, except of conversations that ended before `since`; a span is [kind, begin]."""
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
