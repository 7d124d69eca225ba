"""Metrics of turns and of answers to users, and whether an answer met its SLO targets.

TTFET, end-to-end time and last-turn TBT belong to an *answer*: it lasts from a user's message, over any
number of tool turns, to the turn that speaks to the user (`placement/objectives.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from placement.objectives import tbt_s, ttfet_s
from router import metrics
from router.directory.api.cache import Known
from router.gateway.config import DEFAULT_CLASS, SloClass
from router.gateway.turn.turn import Turn
from router.http import Observation, RelayEnd, RelayOutcome

_FINISHED_FOR_USER = frozenset({"stop", "completed", "end_turn", "stop_sequence"})
_PLACED_ANEW = ("first_turn", "rebound")
_OUTCOMES = {
    RelayEnd.COMPLETE: "complete",
    RelayEnd.CLIENT_GONE: "client_gone",
    RelayEnd.BROKEN: "broken",
    RelayEnd.RESUMABLE: "broken",
    RelayEnd.NOT_STARTED: "failed",
    RelayEnd.HELD: "failed",
}


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """The part of a turn's result that is reported to the directory."""

    generated: bool  # the engine generated something
    prompt_tokens: int = 0  # by the engine's count; 0: it reports none
    completion_tokens: int = 0
    met: tuple[str, ...] = ()  # SLO targets of the answer to a user
    missed: tuple[str, ...] = ()


class TurnMetrics:
    """Counts turns and answers, and whether the answers met their SLO targets."""

    def __init__(self, classes: Iterable[SloClass]) -> None:
        for one in classes:
            for objective in one.settings.targets:
                metrics.from_zero(metrics.SLO, *(f"{one.name}/{objective}/{met}" for met in ("yes", "no")))

    def placed(self, policy: str, cause: str, transferred: bool) -> None:
        """Count one placement by its policy and its cause, and whether KV is transferred for it."""
        metrics.PLACEMENTS.labels(policy, cause).inc()
        if transferred:
            metrics.TRANSFERS.labels(cause).inc()
        if cause == "redisaggregated":
            metrics.REDISAGGREGATIONS.labels("transferred" if transferred else "local").inc()

    def ended(
        self, turn: Turn, known: Known, cause: str, outcome: RelayOutcome, seen: Observation
    ) -> TurnOutcome:
        """Count a turn that ended, and return its result. `cause`: why its first route was chosen."""
        whole = outcome.end is RelayEnd.COMPLETE and not seen.failed
        end = _outcome_label(outcome, seen)
        metrics.labelled(metrics.TURNS, end).inc()
        error = "" if whole and seen.status == 200 else end
        labels = turn.api.operation, turn.model, error
        metrics.labelled(metrics.GENAI_DURATION, *labels).observe(seen.last_at - turn.arrived_at)
        if seen.status != 200 or (seen.first_token_at is None and not whole):
            return TurnOutcome(generated=False)
        usage = seen.usage
        completion = usage.completion_tokens if usage else max(0, seen.events - 2)
        prompt = usage.prompt_tokens if usage else 0
        if known.waiting_since is None:
            known.waiting_since = turn.arrived_at
        metrics.OUTPUT_TOKENS.inc(completion)
        if prompt:
            metrics.PROMPT_TOKENS.observe(prompt)
        if cause == "bound" and usage and usage.cached_tokens is not None:
            held = known.context_tokens - known.completion_tokens
            metrics.RECOMPUTED_TOKENS.inc(max(0, held - usage.cached_tokens))
        tbt = _observe_token_times(turn, cause, seen)
        met: list[str] = []
        missed: list[str] = []
        if whole and _answers_the_user(seen):
            targets = turn.slo_class.settings.targets
            for objective, seconds in self._answered(turn.slo_class.name, known, seen, tbt):
                if (target := targets.get(objective)) is not None:
                    within = seconds <= target
                    metrics.SLO.labels(turn.slo_class.name, objective, "yes" if within else "no").inc()
                    if turn.slo_class.name == DEFAULT_CLASS:  # the dashboard shows the default class only
                        (met if within else missed).append(objective)
        return TurnOutcome(True, prompt, completion, tuple(met), tuple(missed))

    def _answered(
        self, slo_class: str, known: Known, seen: Observation, tbt: float | None
    ) -> Iterator[tuple[str, float]]:
        """Yield the name of each SLO objective, with the seconds measured for the finished answer."""
        since, known.waiting_since = known.waiting_since, None
        assert since is not None
        if seen.first_content_at is not None:
            ttfet = ttfet_s(since, seen.first_content_at)
            metrics.TTFET_SECONDS.observe(ttfet)
            metrics.labelled(metrics.CLASS_TTFET_SECONDS, slo_class).observe(ttfet)
            yield "ttfet", ttfet
        e2e = seen.last_at - since
        metrics.E2E_SECONDS.observe(e2e)
        yield "e2e", e2e
        if tbt is not None:
            metrics.LAST_TURN_TBT_SECONDS.observe(tbt)
            yield "last_turn_tbt", tbt


def _observe_token_times(turn: Turn, cause: str, seen: Observation) -> float | None:
    """Record the turn's TTFT and TBT; return the TBT, or None when there is none."""
    if seen.first_token_at is None:
        return None
    labels = turn.api.operation, turn.model
    if seen.streamed:
        ttft_s = seen.first_token_at - turn.arrived_at
        which = "first" if cause in _PLACED_ANEW else "later"
        metrics.labelled(metrics.TTFT_SECONDS, which).observe(ttft_s)
        metrics.labelled(metrics.GENAI_TTFT, *labels).observe(ttft_s)
    tbt = tbt_s(seen.first_token_at, seen.last_at, seen.gaps)
    if tbt is not None:
        metrics.TBT_SECONDS.observe(tbt)
        metrics.labelled(metrics.GENAI_TPOT, *labels).observe(tbt)
    return tbt


def _outcome_label(outcome: RelayOutcome, seen: Observation) -> str:
    """Return the metric label of an outcome.

    A relay that completes may carry an engine's error: as a status, or as an event inside a stream.
    """
    if outcome.end is RelayEnd.COMPLETE:
        if (outcome.status or 0) >= 400:
            return "failed"
        if seen.failed:
            return "broken"
    return _OUTCOMES[outcome.end]


def _answers_the_user(seen: Observation) -> bool:
    """Return whether the turn answers the user. A forced tool call does not, although it ends with `stop`."""
    return seen.finish_reason in _FINISHED_FOR_USER and not seen.called_tool
