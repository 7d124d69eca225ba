"""Records a simulation's times, computes its figures, and checks that no work was lost or invented."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import isclose
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.objectives import tbt_s, ttfet_s
from traces import TraceError
from traces.simulator.batch import Gaps
from traces.simulator.engine import SimulatedEngine
from traces.simulator.kv import LiveConversation


class Leak(TraceError, AssertionError):
    """Tokens were lost or invented, so the results of this run are invalid."""


@dataclass
class IdleWhileWaiting:
    """Idle share of the engines of each role while turns queue.

    At most as many idle engines count as turns queue, because one turn needs only one engine.
    """

    samples: int = 0
    idle: list[float] = field(default_factory=lambda: [0.0, 0.0])  # prefillers, others

    def sample(self, at_the_gate: int, *roles: Sequence[SimulatedEngine]) -> None:
        queued = at_the_gate + sum(engine.turns_that_queue() for role in roles for engine in role)
        if not queued:
            return
        self.samples += 1
        for number, role in enumerate(roles):
            if role:
                self.idle[number] += min(queued, sum(engine.idle for engine in role)) / len(role)

    @property
    def of_the_least_busy_role(self) -> float:
        return max(self.idle) / self.samples if self.samples else 0.0


@dataclass
class SimulationTally:
    """Work that the router requested, for comparison with the work that engines did."""

    to_prefill: int = 0
    to_decode: int = 0
    needed_prefill: int = 0  # tokens that a fleet that forgets nothing would prefill
    sent: int = 0  # prompt tokens as clients send them, cached ones included
    refused: int = 0
    abandoned: int = 0
    transfers: int = 0
    through_prefiller_again: int = 0
    last_resorts: int = 0
    idle: IdleWhileWaiting = field(default_factory=IdleWhileWaiting)
    first_turns: int = 0
    first_turns_prefilled: int = 0  # first turns that a prefiller computed
    least_kv: int = 0  # first turns whose decoder had the least KV in use
    gate_wait_s: float = 0.0


def check(tally: SimulationTally, engines: Iterable[SimulatedEngine], horizon: float, waiting: int) -> None:
    if waiting:
        raise Leak(f"{waiting} conversations still wait at the gate although nothing is left to happen")
    prefilled = decoded = again = 0
    for engine in engines:
        prefilled += engine.prefilled
        decoded += engine.decoded
        again += engine.recomputed
        kv = engine.kv
        if kv.resident or kv.parked or engine.running or engine.waiting:
            raise Leak(
                f"{engine.name} ends with {kv.resident} tokens resident, {kv.parked} parked, "
                f"{engine.running} turns running and {len(engine.waiting)} waiting"
            )
        spent = sum(engine.seconds_until(horizon))
        if not isclose(spent, horizon, rel_tol=1e-6, abs_tol=1e-6):
            raise Leak(f"{engine.name} accounts for {spent} of {horizon} s, so its joules are wrong")
    if prefilled != tally.to_prefill + again:
        raise Leak(f"{prefilled} tokens were prefilled, {tally.to_prefill} + {again} again were asked for")
    if decoded != tally.to_decode:
        raise Leak(f"{decoded} tokens were decoded, {tally.to_decode} were asked for")


Values = NDArray[np.float64]


def percentile(values: Sequence[float] | Values, p: float) -> float:
    return float(np.percentile(np.asarray(values), p)) if len(values) else float("nan")


@dataclass
class Recorder:
    """Times recorded during the simulation. `order` has the positions of the conversations in the trace."""

    order: array[int] = field(default_factory=lambda: array("l"))
    ttfet: array[float] = field(default_factory=lambda: array("d"))
    last_tbt: array[float] = field(default_factory=lambda: array("d"))
    e2e: array[float] = field(default_factory=lambda: array("d"))
    turn_ttft: array[float] = field(default_factory=lambda: array("f"))
    turn_tbt: array[float] = field(default_factory=lambda: array("f"))
    turn_is_first: array[int] = field(default_factory=lambda: array("b"))
    gaps: Gaps = field(default_factory=Gaps)
    _effective: dict[str, float] = field(default_factory=dict)

    def turn_ended(self, live: LiveConversation, now: float) -> None:
        self.turn_ttft.append(live.first_token_at - live.turn_at)
        mean_gap = tbt_s(live.first_token_at, now, live.output_tokens - 1)
        tbt = float("nan") if mean_gap is None else mean_gap
        self.turn_tbt.append(tbt)
        self.turn_is_first.append(live.turn_index == 0)
        if live.turn_index == live.conversation.effective_turn:
            self._effective[live.key] = ttfet_s(live.arrived, live.first_token_at)
        if live.is_last_turn:
            self.order.append(live.order)
            self.ttfet.append(self._effective.pop(live.key))
            self.last_tbt.append(tbt)
            self.e2e.append(now - live.arrived)

    def in_trace_order(self, values: array[float]) -> Values:
        return np.asarray(values)[np.argsort(np.asarray(self.order), kind="stable")]


@dataclass(frozen=True)
class Totals:
    """Totals of a simulated fleet."""

    conversations: int
    refused: int
    abandoned: int  # conversations that grew beyond what their engine can hold
    horizon_s: float
    prefilled_tokens: int
    decoded_tokens: int
    recomputed_tokens: int  # computed tokens beyond those that turns append and decode
    transfers: int
    parked_tokens: int
    preemptions: int
    through_prefiller_again: int  # later turns that a prefiller computed
    last_resorts: int  # conversations that a prefiller holds
    idle_while_waiting: float  # idle share of the least busy role while turns queue and conversations arrive
    prefiller_share: float  # share of first turns that a prefiller computes
    least_kv_share: float  # share of conversations bound to the decoder with the least KV in use
    gate_wait_s: float
    joules: float
    tokens_per_joule: float  # prompt tokens as clients send them, and output tokens
    events: int
    drops: int  # groups of engines that were formed to share layers
    split_s: float  # time during which engines shared layers


@dataclass(frozen=True)
class SimulationResult:
    recorder: Recorder
    totals: Totals

    @property
    def ttfet(self) -> Values:
        return self.recorder.in_trace_order(self.recorder.ttfet)

    @property
    def last_tbt(self) -> Values:
        return self.recorder.in_trace_order(self.recorder.last_tbt)

    @property
    def e2e(self) -> Values:
        return self.recorder.in_trace_order(self.recorder.e2e)


@dataclass(frozen=True)
class SimulationSummary(Totals):
    system: str
    ttfet_p50_s: float
    ttfet_p95_s: float
    first_turn_ttft_p50_s: float
    first_turn_ttft_p95_s: float
    later_turn_ttft_p50_s: float
    later_turn_ttft_p95_s: float
    last_turn_tbt_p50_s: float
    last_turn_tbt_p95_s: float
    e2e_p50_s: float
    e2e_p95_s: float
    token_gap_p99_s: float
    gate_wait_mean_s: float
    joules_per_conversation: float


def summarise(system: str, result: SimulationResult) -> SimulationSummary:
    totals, recorder = result.totals, result.recorder
    ttft = np.asarray(recorder.turn_ttft)
    first = np.asarray(recorder.turn_is_first, dtype=bool)
    times = {
        "ttfet": result.ttfet,
        "first_turn_ttft": ttft[first],
        "later_turn_ttft": ttft[~first],
        "last_turn_tbt": result.last_tbt[~np.isnan(result.last_tbt)],
        "e2e": result.e2e,
    }
    percentiles: dict[str, Any] = {
        f"{name}_p{p}_s": percentile(values, p) for name, values in times.items() for p in (50, 95)
    }
    return SimulationSummary(
        **asdict(totals),
        **percentiles,
        system=system,
        token_gap_p99_s=recorder.gaps.percentile(99),
        gate_wait_mean_s=totals.gate_wait_s / max(1, totals.conversations),
        joules_per_conversation=totals.joules / max(1, totals.conversations),
    )
