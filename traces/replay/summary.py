"""Figures of a replay (percentiles, violations of the objective, tokens, rates), and its file."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from traces import TraceError
from traces.describe import PERCENTILES, Spread, spread
from traces.replay.results import ConversationResult, PlayOutcome, Replay, TurnResult


@dataclass(frozen=True, slots=True)
class Objective:
    """A latency against the objective: `slo_factor` times the unloaded latency of the same conversation."""

    judged: int
    violations: int
    geometric_mean: float  # of measured / unloaded
    p95: float

    @property
    def violation_share(self) -> float:
        return self.violations / self.judged if self.judged else 0.0


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    outcomes: dict[str, int]
    errors: dict[str, int]  # message -> how often, the most frequent ones
    refusals: int
    late_starts: int  # no slot was free at their arrival
    turns: int
    prompt_tokens: int
    new_tokens: int
    output_tokens: int
    reported_cached_tokens: int | None
    recomputed_tokens: int | None  # retained by the trace, yet not cached by the endpoint's own account
    output_tokens_per_s: float
    conversations_per_s: float
    output_tokens_per_joule: float | None
    tokens_per_joule: float | None  # new prompt tokens and output
    spreads: dict[str, Spread]  # seconds, by name
    objectives: dict[str, Objective]


LATE_S = 0.25
ERRORS_SHOWN = 10


def summarise(run: Replay) -> ReplaySummary:
    results = run.conversations
    turns = [turn for result in results for turn in result.turns]
    done = sum(result.outcome is PlayOutcome.DONE for result in results)
    output, new = sum(t.output_tokens for t in turns), sum(t.new_tokens for t in turns)
    told = [turn for turn in turns if turn.cached_tokens is not None]
    joules = run.meters.joules
    # Without the turn's number, so that the same error counts as one.
    errors = Counter(r.error.partition(": ")[2] or r.error for r in results if r.error)
    retained = [(turn.prompt_tokens - turn.new_tokens, turn.cached_tokens or 0) for turn in told]
    return ReplaySummary(
        outcomes={outcome.value: sum(r.outcome is outcome for r in results) for outcome in PlayOutcome},
        errors=dict(errors.most_common(ERRORS_SHOWN)),
        refusals=sum(result.refusals for result in results),
        late_starts=sum(result.started_s - result.arrival_s > LATE_S for result in results),
        turns=len(turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        new_tokens=new,
        output_tokens=output,
        reported_cached_tokens=sum(cached for _, cached in retained) if told else None,
        recomputed_tokens=sum(max(0, kept - cached) for kept, cached in retained) if told else None,
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
    """Served times only: tools and people answer to no objective, and would dilute one."""
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


FORMAT = "conserve-replay/1"
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
