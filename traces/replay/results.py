"""Results of a replay: each turn, the unloaded latency for comparison, the figures, and the JSON file.

Times are seconds by the client's clock, since the replay began.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import TypeAdapter, ValidationError

from placement.objectives import tbt_s, ttfet_s
from traces import ReplayError, TraceError
from traces.describe import PERCENTILES, Spread, spread
from traces.format import TraceConversation, TurnEnding

FORMAT = "conserve-replay/1"
LATE_S = 0.25
ERRORS_SHOWN = 10


class PlayOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"  # an error ended it; `error` says which
    UNFINISHED = "unfinished"  # the time limit came first
    NOT_STARTED = "not_started"  # the time limit came before the arrival, or before a slot was free


@dataclass(frozen=True, slots=True)
class TurnResult:
    ending: TurnEnding  # how the turn ends in the trace
    wait_s: float  # tool or human time before the turn
    asked_s: float  # when the request was first sent
    ttft_s: float  # from `asked_s` to the first text, refused attempts included
    answered_s: float  # when the last text came
    prompt_tokens: int
    new_tokens: int  # tokens of the prompt that nobody can have cached
    output_tokens: int
    cached_tokens: int | None  # cached tokens by the endpoint's report; None if it has none
    longest_gap_s: float  # longest time between two pieces of text
    refusals: int

    @property
    def tbt_s(self) -> float | None:
        return tbt_s(self.asked_s + self.ttft_s, self.answered_s, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class ConversationResult:
    id: str
    arrival_s: float  # arrival in the trace
    started_s: float
    outcome: PlayOutcome
    effective_turn: int
    turns: tuple[TurnResult, ...]
    refusals: int = 0
    error: str = ""

    @property
    def waits_s(self) -> float:
        return sum(turn.wait_s for turn in self.turns)

    @property
    def ttfet_s(self) -> float | None:
        if len(self.turns) <= self.effective_turn:
            return None
        turn = self.turns[self.effective_turn]
        return ttfet_s(self.started_s, turn.asked_s + turn.ttft_s)

    @property
    def served_ttfet_s(self) -> float | None:
        """Return the time to the first effective token (TTFET), without the time of tools and people."""
        whole = self.ttfet_s
        if whole is None:
            return None
        return whole - sum(turn.wait_s for turn in self.turns[: self.effective_turn + 1])

    @property
    def e2e_s(self) -> float | None:
        if self.outcome is not PlayOutcome.DONE:
            return None
        return self.turns[-1].answered_s - self.started_s

    @property
    def served_e2e_s(self) -> float | None:
        whole = self.e2e_s
        return None if whole is None else whole - self.waits_s

    @property
    def last_turn_tbt_s(self) -> float | None:
        return self.turns[-1].tbt_s if self.outcome is PlayOutcome.DONE else None


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Latency of a turn when nothing else runs, fitted to probes that were played alone.

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
        return float(np.dot(_prefill_terms(turn), (self.fixed_s, self.per_token_s, self.per_product_s)))

    def tbt_s(self, turn: TurnResult) -> float:
        return float(np.dot(_gap_terms(turn), (self.step_s, self.per_context_s)))

    def turn_s(self, turn: TurnResult) -> float:
        return self.ttft_s(turn) + max(0, turn.output_tokens - 1) * self.tbt_s(turn)

    def ttfet_s(self, conversation: ConversationResult) -> float:
        *before, last = conversation.turns[: conversation.effective_turn + 1]
        return sum(map(self.turn_s, before)) + self.ttft_s(last)

    def e2e_s(self, conversation: ConversationResult) -> float:
        return sum(map(self.turn_s, conversation.turns))


@dataclass(frozen=True, slots=True)
class MeterReading:
    """Counters of the fleet over the replay. A counter that nobody exports is absent."""

    counters: dict[str, float] = field(default_factory=dict)
    joules: float | None = None
    unread: tuple[str, ...] = ()  # addresses that could not be read, each with the reason


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay, as it is written to JSON."""

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


PROBE_TURNS = 4


def probes(conversations: Sequence[TraceConversation], count: int) -> list[TraceConversation]:
    """Return `count` probes: beginnings of conversations with small to large first turns, without waits."""
    by_size = sorted(conversations, key=lambda c: (c.turns[0].prompt_tokens, c.id))
    if not by_size or count < 1:
        return []
    picks = np.linspace(0.05, 0.95, count) if count > 1 else np.array([0.5])
    chosen = [by_size[round(float(pick) * (len(by_size) - 1))] for pick in picks]
    return [
        replace(
            conversation,
            id=f"probe-{number}-{conversation.id}",
            parent=None,
            turns=(
                replace(first, appended_tokens=first.prompt_tokens, cached_tokens=0),
                *(replace(turn, wait_s=0.0) for turn in later),
            ),
        )
        for number, conversation in enumerate(chosen)
        for first, *later in [conversation.turns[:PROBE_TURNS]]
    ]


def fit(played: Sequence[ConversationResult]) -> Unloaded:
    """Fit the unloaded latency to probes.

    TTFT is fitted by relative errors, so that slow probes do not count more. TBT is fitted by the time of
    whole answers, because the gaps of a short answer say more about buffers than about the engine.
    """
    turns = [turn for conversation in played for turn in conversation.turns]
    spoken = [turn for turn in turns if turn.tbt_s]
    if not turns or not spoken:
        raise ReplayError(
            "no probe gave a timed answer of two tokens or more: no unloaded latency to compare with"
        )
    ttft = [turn.ttft_s for turn in turns]
    prefill, ttft_error = _nonnegative([_prefill_terms(turn) for turn in turns], ttft, ttft)
    per_gap = [1.0 / (turn.output_tokens - 1) for turn in spoken]
    decode, tbt_error = _nonnegative(
        [_gap_terms(turn) for turn in spoken], [turn.tbt_s or 0.0 for turn in spoken], per_gap
    )
    fixed, per_token, per_product = prefill
    step, per_context = decode
    return Unloaded(fixed, per_token, per_product, step, per_context, len(played), ttft_error, tbt_error)


def _prefill_terms(turn: TurnResult) -> tuple[float, ...]:
    new, retained = turn.new_tokens, turn.prompt_tokens - turn.new_tokens
    return 1.0, float(new), new * (retained + new / 2.0)


def _gap_terms(turn: TurnResult) -> tuple[float, float]:
    return 1.0, turn.prompt_tokens + turn.output_tokens / 2.0


def _nonnegative(
    terms: Sequence[tuple[float, ...]], seconds: Sequence[float], scales: Sequence[float]
) -> tuple[list[float], float]:
    """Solve non-negative least squares with errors in units of `scales`; return also the mean error."""
    from scipy.optimize import nnls  # half a second to import, which only a replay with probes should pay

    unit = np.asarray(scales, dtype=float)
    rows = np.asarray(terms, dtype=float) / unit[:, None]
    wanted = np.asarray(seconds, dtype=float) / unit
    size = np.maximum(rows.max(axis=0), 1e-12)
    found, _ = nnls(rows / size, wanted)
    error = float(np.abs(rows @ (found / size) - wanted).mean() / wanted.mean())
    return [float(value) for value in found / size], error


@dataclass(frozen=True, slots=True)
class Objective:
    """Latencies and their objective: `slo_factor` times the unloaded latency of the same conversation."""

    judged: int
    violations: int
    geometric_mean: float  # geometric mean of measured / unloaded
    p95: float

    @property
    def violation_share(self) -> float:
        return self.violations / self.judged if self.judged else 0.0


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    outcomes: dict[str, int]
    errors: dict[str, int]  # message -> how often, the most frequent ones
    refusals: int
    late_starts: int  # conversations that found no free slot at their arrival
    turns: int
    prompt_tokens: int
    new_tokens: int
    output_tokens: int
    reported_cached_tokens: int | None
    recomputed_tokens: int | None  # known from earlier turns, but not reported as cached by the endpoint
    output_tokens_per_s: float
    conversations_per_s: float
    output_tokens_per_joule: float | None
    tokens_per_joule: float | None  # new prompt tokens and output
    spreads: dict[str, Spread]  # seconds, by name
    objectives: dict[str, Objective]


def summarise(run: Replay) -> ReplaySummary:
    results = run.conversations
    turns = [turn for result in results for turn in result.turns]
    done = sum(result.outcome is PlayOutcome.DONE for result in results)
    output, new = sum(t.output_tokens for t in turns), sum(t.new_tokens for t in turns)
    reporting = [turn for turn in turns if turn.cached_tokens is not None]
    joules = run.meters.joules
    # Without the turn's number, so that the same error counts as one.
    errors = Counter(r.error.partition(": ")[2] or r.error for r in results if r.error)
    retained = [(turn.prompt_tokens - turn.new_tokens, turn.cached_tokens or 0) for turn in reporting]
    return ReplaySummary(
        outcomes={outcome.value: sum(r.outcome is outcome for r in results) for outcome in PlayOutcome},
        errors=dict(errors.most_common(ERRORS_SHOWN)),
        refusals=sum(result.refusals for result in results),
        late_starts=sum(result.started_s - result.arrival_s > LATE_S for result in results),
        turns=len(turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        new_tokens=new,
        output_tokens=output,
        reported_cached_tokens=sum(cached for _, cached in retained) if reporting else None,
        recomputed_tokens=sum(max(0, kept - cached) for kept, cached in retained) if reporting else None,
        output_tokens_per_s=output / run.duration_s if run.duration_s else 0.0,
        conversations_per_s=done / run.duration_s if run.duration_s else 0.0,
        output_tokens_per_joule=output / joules if joules else None,
        tokens_per_joule=(new + output) / joules if joules else None,
        spreads=_spreads(results, turns),
        objectives=_objectives(run),
    )


def _spreads(results: Sequence[ConversationResult], turns: Sequence[TurnResult]) -> dict[str, Spread]:
    quantities: dict[str, Iterable[float | None]] = {
        "ttfet": (result.ttfet_s for result in results),
        "ttfet_served": (result.served_ttfet_s for result in results),
        "last_turn_tbt": (result.last_turn_tbt_s for result in results),
        "e2e": (result.e2e_s for result in results),
        "e2e_served": (result.served_e2e_s for result in results),
        "ttft": (turn.ttft_s for turn in turns),
        "ttft_first_turn": (result.turns[0].ttft_s for result in results if result.turns),
        "ttft_later_turns": (turn.ttft_s for result in results for turn in result.turns[1:]),
        "tbt": (turn.tbt_s for turn in turns),
        "longest_gap": (turn.longest_gap_s for turn in turns),
    }
    found = {name: spread(v for v in values if v is not None) for name, values in quantities.items()}
    return {name: value for name, value in found.items() if value}


def _objectives(run: Replay) -> dict[str, Objective]:
    """Return each objective, judged on latencies without the time of tools and people."""
    alone = run.unloaded
    if alone is None:
        return {}
    ratios: dict[str, list[float]] = {"ttfet": [], "last_turn_tbt": [], "e2e": []}
    for result in run.conversations:
        if (ttfet := result.served_ttfet_s) is not None:
            ratios["ttfet"].append(ttfet / alone.ttfet_s(result))
        if (tbt := result.last_turn_tbt_s) is not None:
            ratios["last_turn_tbt"].append(tbt / alone.tbt_s(result.turns[-1]))
        if (e2e := result.served_e2e_s) is not None:
            ratios["e2e"].append(e2e / alone.e2e_s(result))
    return {name: _objective(values, run.slo_factor) for name, values in ratios.items() if values}


def _objective(ratios: Sequence[float], factor: float) -> Objective:
    over = sum(ratio > factor for ratio in ratios)
    logs = [math.log(ratio) for ratio in ratios if ratio > 0.0]
    mean = math.exp(sum(logs) / len(logs)) if logs else 0.0
    found = spread(ratios)
    return Objective(len(ratios), over, mean, found.at(95) if found else 0.0)


_REPLAY = TypeAdapter(Replay)


def to_json(run: Replay) -> dict[str, Any]:
    summary = summarise(run)
    figures = asdict(summary)
    figures["percentiles"] = list(PERCENTILES)
    for name, objective in summary.objectives.items():
        figures["objectives"][name]["violation_share"] = objective.violation_share
    return {"format": FORMAT, "summary": figures, "run": asdict(run)}


def write(path: Path, run: Replay) -> None:
    path.write_bytes(orjson.dumps(to_json(run)))


def read(path: Path) -> Replay:
    try:
        row = orjson.loads(path.read_bytes())
        if not isinstance(row, dict) or row.get("format") != FORMAT:
            raise TraceError(f"{path}: not a result of `conserve replay` ({FORMAT})")
        return _REPLAY.validate_python(row["run"])
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, ValidationError) as error:
        raise TraceError(f"{path}: not a result of `conserve replay`: {error}") from error
