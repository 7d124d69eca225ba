"""A plan: engines by the inequalities, energy by power cap, and a simulation to check it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.engines import Role
from placement.placer import PlacerSettings
from placement.provisioning import Provision, prefillers_for, provision
from traces.format import Conversation
from traces.generators import arrivals, draws
from traces.planner.means import Measured, capacity_of, measure
from traces.simulator.entities.kv import Pressure
from traces.simulator.metrics import Result, Values, percentile
from traces.simulator.profile import EngineProfile, Fleet, Tier
from traces.simulator.simulation import Simulation, SimulationSettings


@dataclass(frozen=True, slots=True)
class PlanRequest:
    rate: float  # conversations a second
    park_after_s: float = 60.0
    large_append: int = 8192
    caps_w: tuple[float, ...] = ()
    ttft_s: float = 2.0
    tbt_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Energy:
    cap_w: float
    joules_per_conversation: float
    tokens_per_joule: float
    ttft_p95_s: float
    tbt_p95_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """What the simulation of the plan says."""

    conversations: int
    first_ttft_p95_s: float
    later_ttft_p95_s: float
    tbt_p95_s: float
    gate_wait_mean_s: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Plan:
    measured: Measured
    pinned: Provision  # the paper's rule: KV on the decoder for life
    parked: Provision  # ours
    check: Check
    energy: tuple[Energy, ...]


def plan(
    found: Sequence[Conversation], prefiller: EngineProfile, decoder: EngineProfile, request: PlanRequest
) -> Plan:
    measured = measure(found, decoder, request.park_after_s, request.large_append)
    capacity = capacity_of(prefiller, decoder, measured.pinned)
    prefillers = prefillers_for(measured.pinned, capacity, request.rate)
    pinned = provision(measured.pinned, capacity, prefillers, request.rate)
    parked = provision(measured.parked, capacity, prefillers, request.rate)
    times = arrivals.poisson(request.rate, draws.stream(0, "plan"))
    trace = list(arrivals.arriving(found, times))
    result = _play(trace, prefiller, decoder, parked, request)
    energy = tuple(
        _energy(cap, _play(trace, prefiller, decoder.capped(cap), parked, request)) for cap in request.caps_w
    )
    return Plan(measured, pinned, parked, _check(result, request), energy)


def _play(
    trace: Sequence[Conversation],
    prefiller: EngineProfile,
    decoder: EngineProfile,
    provision: Provision,
    request: PlanRequest,
) -> Result:
    fleet = Fleet(
        (
            Tier("prefill", Role.PREFILL, provision.prefillers, prefiller),
            Tier("decode", Role.DECODE, provision.decoders, decoder),
        )
    )
    placer = PlacerSettings(max_prefill_wait_s=float("inf"))
    rule = replace(placer.redisaggregation, above_tokens=request.large_append)
    settings = SimulationSettings(
        placer=replace(placer, redisaggregation=rule),
        pressure=Pressure.PARK,
        park_after_s=request.park_after_s,
    )
    return Simulation(fleet, settings).run(trace)


def _check(result: Result, request: PlanRequest) -> Check:
    ttft, first, tbt = _turns(result)
    gate = result.totals.gate_wait_s / max(1, result.totals.conversations)
    firsts, later, tbt_p95 = percentile(ttft[first], 95), percentile(ttft[~first], 95), percentile(tbt, 95)
    holds = firsts <= request.ttft_s and tbt_p95 <= request.tbt_s
    return Check(result.totals.conversations, firsts, later, tbt_p95, gate, holds)


def _energy(cap: float, result: Result) -> Energy:
    ttft, first, tbt = _turns(result)
    totals = result.totals
    return Energy(
        cap,
        totals.joules / max(1, totals.conversations),
        totals.tokens_per_joule,
        percentile(ttft[first], 95),
        percentile(tbt, 95),
    )


def _turns(result: Result) -> tuple[Values, NDArray[np.bool_], Values]:
    """TTFT of every turn, which of them are first turns, and every TBT."""
    recorder = result.recorder
    tbt = np.asarray(recorder.turn_tbt, dtype=float)
    first = np.asarray(recorder.turn_is_first, dtype=bool)
    return np.asarray(recorder.turn_ttft, dtype=float), first, tbt[~np.isnan(tbt)]
