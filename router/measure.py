"""What a turn's course says: outcome, tokens, and the latencies users feel.

TTFET, end-to-end time and last-turn TBT belong to an *answer*: from a user's message, over any number of tool
turns, to the turn that speaks to the user.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router import metrics
from router.config import Slo
from router.directory.cache import Known
from router.http import Observation, RelayEnd, RelayOutcome
from router.turn import Turn

_SPEAKS = frozenset({"stop", "completed", "end_turn", "stop_sequence"})
_OUTCOMES = {
    RelayEnd.COMPLETE: "complete",
    RelayEnd.CLIENT_GONE: "client_gone",
    RelayEnd.BROKEN: "broken",
    RelayEnd.NOT_STARTED: "failed",
    RelayEnd.HELD: "failed",
}


@dataclass(frozen=True, slots=True)
class Done:
    spoke: bool  # the engine generated something
    prompt_tokens: int  # as the engine says; 0 when it does not
    completion_tokens: int
    met: tuple[str, ...] = ()  # objectives of the answer to a user
    missed: tuple[str, ...] = ()


class Measure:
    def __init__(self, slo: Slo, clock: Callable[[], float]) -> None:
        self._slo = slo
        targets = {"ttfet": slo.ttfet_s, "last_turn_tbt": slo.last_turn_tbt_s, "e2e": slo.e2e_s}
        for objective in (name for name, target in targets.items() if target is not None):
            metrics.from_zero(metrics.SLO, f"{objective}/yes", f"{objective}/no")
        self._clock = clock

    @contextmanager
    def turn(self) -> Iterator[None]:
        metrics.STREAMS.inc()
        try:
            yield
        finally:
            metrics.STREAMS.dec()

    def placed(self, policy: str, cause: str, transferred: bool) -> None:
        metrics.PLACEMENTS.labels(policy, cause).inc()
        if transferred:
            metrics.TRANSFERS.labels(cause).inc()
        if cause == "redisaggregated":
            metrics.REDISAGGREGATIONS.labels("transferred" if transferred else "local").inc()

    def ended(self, turn: Turn, known: Known, cause: str, outcome: RelayOutcome, seen: Observation) -> Done:
        whole = outcome.end is RelayEnd.COMPLETE and not seen.failed
        spoke = seen.status == 200 and (seen.first_token_at is not None or whole)
        metrics.labelled(metrics.TURNS, _outcome(outcome, seen)).inc()
        usage = seen.usage
        completion = usage.completion_tokens if usage else max(0, seen.events - 2)
        prompt = usage.prompt_tokens if usage else 0
        if not spoke:
            return Done(False, 0, 0)
        if known.waiting_since is None:
            known.waiting_since = turn.arrived_at
        metrics.OUTPUT_TOKENS.inc(completion)
        if prompt:
            metrics.PROMPT_TOKENS.observe(prompt)
        if cause == "bound" and usage and usage.cached_tokens is not None:
            had = known.context_tokens - known.completion_tokens
            metrics.RECOMPUTED_TOKENS.inc(max(0, had - usage.cached_tokens))
        if seen.streamed and seen.first_token_at is not None:
            which = "first" if cause in ("first_turn", "rebound", "moved") else "later"
            metrics.labelled(metrics.TTFT_SECONDS, which).observe(seen.first_token_at - turn.arrived_at)
        tbt = _mean_gap(seen)
        if tbt is not None:
            metrics.TBT_SECONDS.observe(tbt)
        met: list[str] = []
        missed: list[str] = []
        if whole and _speaks_to_the_user(seen):
            for objective, within in self._answered(known, seen, tbt):
                metrics.SLO.labels(objective, "yes" if within else "no").inc()
                (met if within else missed).append(objective)
        return Done(True, prompt, completion, tuple(met), tuple(missed))

    def _answered(self, known: Known, seen: Observation, tbt: float | None) -> Iterator[tuple[str, bool]]:
        """The objectives that the fleet has set, and whether the answer is within them."""
        since, known.waiting_since = known.waiting_since, None
        assert since is not None
        if seen.first_content_at is not None:
            ttfet = seen.first_content_at - since
            metrics.TTFET_SECONDS.observe(ttfet)
            yield from _judged("ttfet", self._slo.ttfet_s, ttfet)
        e2e = seen.last_at - since
        metrics.E2E_SECONDS.observe(e2e)
        yield from _judged("e2e", self._slo.e2e_s, e2e)
        if tbt is not None:
            metrics.LAST_TURN_TBT_SECONDS.observe(tbt)
            yield from _judged("last_turn_tbt", self._slo.last_turn_tbt_s, tbt)


def _judged(objective: str, target: float | None, seen: float) -> Iterator[tuple[str, bool]]:
    if target is not None:
        yield objective, seen <= target


def _outcome(outcome: RelayOutcome, seen: Observation) -> str:
    """The engine may pass on an error of its own: as a status, or inside a stream that ends as it should."""
    if outcome.end is RelayEnd.COMPLETE:
        if (outcome.status or 0) >= 400:
            return "failed"
        if seen.failed:
            return "broken"
    return _OUTCOMES[outcome.end]


def _speaks_to_the_user(seen: Observation) -> bool:
    """A forced tool call ends with `stop` too, and speaks to a tool."""
    return seen.finish_reason in _SPEAKS and not seen.called_tool


def _mean_gap(seen: Observation) -> float | None:
    if seen.first_token_at is None or not seen.gaps:
        return None
    return (seen.last_at - seen.first_token_at) / seen.gaps
