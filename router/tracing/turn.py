"""What a sampled turn notes while it runs: moments by the gateway's clock, and a few words."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from random import getrandbits
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from router.http import RawHeaders

if TYPE_CHECKING:
    from router.turn import Turn

PROPAGATED = frozenset({b"traceparent", b"tracestate"})

Value: TypeAlias = str | int


class Role(Enum):
    """OpenTelemetry's kinds of spans."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(slots=True)
class SpanNotes:
    name: str
    role: Role
    began_at: float
    ended_at: float | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    id: int = field(default_factory=lambda: getrandbits(64))
    wrong: str | None = None
    first_token_at: float | None = None


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a turn's trace continues: what the client's headers say, or a new trace."""

    trace: int
    span: int | None = None
    state: str = ""


class TurnTrace:
    """The spans of one turn. The stages follow one another; the legs may overlap."""

    __slots__ = (
        *("_clock", "_decode", "_finished", "_prefill", "_prefilled_at", "_since"),
        *("clock_to_time_of_day_ns", "parent", "spans", "turn"),
    )

    def __init__(
        self,
        parent: Parent,
        clock: Callable[[], float],
        clock_to_time_of_day_ns: int,
        arrived_at: float,
        finished: "Callable[[TurnTrace], None]",
    ) -> None:
        self.parent = parent
        self.clock_to_time_of_day_ns = clock_to_time_of_day_ns  # set once a turn, so that its spans fit
        self.turn = SpanNotes("turn", Role.SERVER, arrived_at)
        self.spans = [self.turn]
        self._clock, self._finished = clock, finished
        self._since = arrived_at  # where the next stage begins
        self._prefill: SpanNotes | None = None
        self._decode: SpanNotes | None = None
        self._prefilled_at: float | None = None

    def identified(self, conversation: str, how: str) -> None:
        self.turn.attributes["conserve.conversation"] = conversation
        self._stage("identify", {"conserve.how": how})

    def bound(self, cause: str, decoder: str, prefiller: str | None) -> None:
        chosen: dict[str, Value] = {"conserve.cause": cause, "conserve.decoder": decoder}
        if prefiller:
            chosen["conserve.prefiller"] = prefiller
        self._stage("bind", chosen)

    def prefilling(self, turn: "Turn", engine: str) -> "Turn":
        self._prefill, sent = self._leg("prefill leg", turn, engine)
        return sent

    def decoding(self, turn: "Turn", engine: str) -> "Turn":
        self._decode, sent = self._leg("decode leg", turn, engine)
        return sent

    def prefilled(self, prompt_tokens: int) -> None:
        """`prompt_tokens` is 0 when the leg failed, and the decoder computes the prompt."""
        self._prefilled_at = self._clock()
        if (span := self._prefill) is not None:
            span.attributes["conserve.prompt_tokens"] = prompt_tokens
            if not prompt_tokens:
                span.wrong = "the decoder computes the prompt"
            span.ended_at = self._prefilled_at

    def decoded(self, outcome: str, complete: bool, first_token_at: float | None) -> None:
        """`transfer` is what the KV's way adds as its reader sees it: from the prefill's answer to the first
        token. Of an answer that is not a stream nobody sees the first token, so it has no such span."""
        now = self._clock()
        if first_token_at is not None and (prefilled := self._prefilled_at) is not None:
            moved = SpanNotes("transfer", Role.INTERNAL, prefilled, max(first_token_at, prefilled))
            self.spans.append(moved)
        if (span := self._decode) is not None:
            span.first_token_at = first_token_at
            span.attributes["conserve.outcome"] = outcome
            if not complete:
                span.wrong = outcome
            span.ended_at = now
        self._prefilled_at = self._prefill = self._decode = None
        self._since = now  # a turn whose decoder was lost is bound again

    def answered(self, prompt_tokens: int, output_tokens: int) -> None:
        self.turn.attributes["conserve.prompt_tokens"] = prompt_tokens
        self.turn.attributes["conserve.output_tokens"] = output_tokens

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, wrong: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Also of a turn that was refused or broke off: nothing stays open."""
        now = self._clock()
        for span in self.spans:
            if span.ended_at is None:
                span.ended_at = now
                if kind is not None:
                    span.wrong = kind.__name__
        self._finished(self)

    def _leg(self, name: str, turn: "Turn", engine: str) -> "tuple[SpanNotes, Turn]":
        """Its span, and the turn as the engine gets it: with a `traceparent` that names this leg."""
        span = SpanNotes(name, Role.CLIENT, self._clock(), None, {"conserve.engine": engine})
        self.spans.append(span)
        headers: RawHeaders = [pair for pair in turn.headers if pair[0].lower() not in PROPAGATED]
        headers.append((b"traceparent", b"00-%032x-%016x-01" % (self.parent.trace, span.id)))
        if self.parent.state:
            headers.append((b"tracestate", self.parent.state.encode("latin-1")))
        return span, replace(turn, headers=headers)

    def _stage(self, name: str, attributes: dict[str, Value]) -> None:
        now = self._clock()
        self.spans.append(SpanNotes(name, Role.INTERNAL, self._since, now, attributes))
        self._since = now
