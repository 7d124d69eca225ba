"""What a replay measured, turn by turn. Times are seconds by the client's clock, since the replay began."""

from dataclasses import dataclass, field
from enum import StrEnum

from traces.format import Ending


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"  # an error ended it; `error` says which
    UNFINISHED = "unfinished"  # the time limit came first
    NOT_STARTED = "not_started"  # it came even before the arrival, or no slot was free


@dataclass(frozen=True, slots=True)
class TurnResult:
    ending: Ending  # what the trace says of it
    wait_s: float  # tool or human time before it
    asked_s: float  # when it was first sent
    ttft_s: float  # from then to the first text, refused attempts included
    answered_s: float  # when the last text came
    prompt_tokens: int
    new_tokens: int  # of the prompt: what nobody can have cached
    output_tokens: int
    cached_tokens: int | None  # what the endpoint says it had, where it says so
    longest_gap_s: float  # between two pieces of text
    refusals: int

    @property
    def tbt_s(self) -> float | None:
        """Mean time between tokens; an answer of one token has none."""
        if self.output_tokens < 2:
            return None
        return (self.answered_s - self.asked_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class ConversationResult:
    id: str
    arrival_s: float  # by the trace
    started_s: float
    outcome: Outcome
    effective_turn: int
    turns: tuple[TurnResult, ...]
    refusals: int = 0
    error: str = ""

    @property
    def waits_s(self) -> float:
        return sum(turn.wait_s for turn in self.turns)

    @property
    def ttfet_s(self) -> float | None:
        """From arrival to the first token of the turn that speaks to the user, tools included."""
        if len(self.turns) <= self.effective_turn:
            return None
        turn = self.turns[self.effective_turn]
        return turn.asked_s + turn.ttft_s - self.started_s

    @property
    def served_ttfet_s(self) -> float | None:
        """The part of it that serving took: without tools and people."""
        whole = self.ttfet_s
        if whole is None:
            return None
        return whole - sum(turn.wait_s for turn in self.turns[: self.effective_turn + 1])

    @property
    def e2e_s(self) -> float | None:
        if self.outcome is not Outcome.DONE:
            return None
        return self.turns[-1].answered_s - self.started_s

    @property
    def served_e2e_s(self) -> float | None:
        whole = self.e2e_s
        return None if whole is None else whole - self.waits_s

    @property
    def last_turn_tbt_s(self) -> float | None:
        return self.turns[-1].tbt_s if self.outcome is Outcome.DONE else None


@dataclass(frozen=True, slots=True)
class Unloaded:
    """How long a turn takes when nothing else runs: fitted to probes played alone.

    ttft = fixed + per_token * new + per_product * new * (retained + new / 2)
    tbt = step + per_context * context
    """

    fixed_s: float
    per_token_s: float
    per_product_s: float
    step_s: float
    per_context_s: float
    probes: int
    ttft_error: float  # mean relative error on the probes
    tbt_error: float

    def ttft_s(self, turn: TurnResult) -> float:
        new, retained = turn.new_tokens, turn.prompt_tokens - turn.new_tokens
        return self.fixed_s + self.per_token_s * new + self.per_product_s * new * (retained + new / 2.0)

    def tbt_s(self, turn: TurnResult) -> float:
        return self.step_s + self.per_context_s * (turn.prompt_tokens + turn.output_tokens / 2.0)

    def turn_s(self, turn: TurnResult) -> float:
        return self.ttft_s(turn) + max(0, turn.output_tokens - 1) * self.tbt_s(turn)

    def ttfet_s(self, conversation: ConversationResult) -> float:
        before, last = (
            conversation.turns[: conversation.effective_turn],
            conversation.turns[conversation.effective_turn],
        )
        return sum(map(self.turn_s, before)) + self.ttft_s(last)

    def e2e_s(self, conversation: ConversationResult) -> float:
        return sum(map(self.turn_s, conversation.turns))


@dataclass(frozen=True, slots=True)
class MeterReading:
    """Counters of the fleet over the replay; a name is absent where nobody exports it."""

    counters: dict[str, float] = field(default_factory=dict)
    joules: float | None = None
    unread: tuple[str, ...] = ()  # addresses that did not answer, and why


@dataclass(frozen=True, slots=True)
class Replay:
    """A whole run, as written to JSON."""

    label: str
    trace: str
    url: str
    model: str
    options: dict[str, str | float | int | bool]
    duration_s: float
    chars_per_token: float
    calibrated_by: str
    slo_factor: float
    unloaded: Unloaded | None
    meters: MeterReading
    conversations: tuple[ConversationResult, ...]
