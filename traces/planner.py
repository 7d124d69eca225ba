"""Plan of a fleet: engines by the inequalities, energy by power cap, and a simulation to check it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.engines import Role
from placement.fleet.placer import PlacerSettings
from placement.fleet.provisioning import Capacity, Means, Provision, prefillers_for, provision
from placement.iteration.latency import LatencyModel
from traces import generators
from traces.describe import LARGE_APPEND_TOKENS
from traces.format import TraceConversation, TraceError
from traces.simulator.kv import Pressure
from traces.simulator.metrics import SimulationResult, Values, percentile
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier, prefill_seconds


@dataclass(frozen=True, slots=True)
class Measured:
    pinned: Means  # resident from the first turn to the last: the paper's W
    parked: Means  # resident while a turn runs, and `park_after` after it
    large_turns: float  # share of later turns that append more than the threshold
    broken_tokens: float  # of a conversation: prompt tokens that were there before and are not any more


def measure(
    found: Sequence[TraceConversation], decoder: EngineProfile, park_after_s: float, large: int
) -> Measured:
    """Means over conversations, with service times of an unloaded engine of this profile."""
    if not found:
        raise TraceError("the trace has no conversations to plan for")
    first = decoder_tokens = lifetime = active = peak = broken = 0.0
    later = large_turns = 0
    for conversation in found:
        context = 0
        for index, turn in enumerate(conversation.turns):
            served = _seconds(
                decoder, turn.prompt_tokens, turn.appended_tokens if index else 1, turn.output_tokens
            )
            lifetime += served + (turn.wait_s if index else 0.0)
            active += served + (min(turn.wait_s, park_after_s) if index else 0.0)
            decoder_tokens += turn.output_tokens + (turn.appended_tokens if index else 0)
            broken += max(0, context - turn.cached_tokens) if index else 0
            later += index > 0
            large_turns += index > 0 and turn.appended_tokens > large
            context = turn.context_tokens
        first += conversation.turns[0].prompt_tokens
        peak += conversation.peak_context_tokens
    count = len(found)
    pinned = Means(first / count, max(1.0, decoder_tokens / count), lifetime / count, peak / count)
    parked = Means(pinned.first_turn_tokens, pinned.decoder_tokens, active / count, pinned.peak_kv_tokens)
    return Measured(pinned, parked, large_turns / later if later else 0.0, broken / count)


def _seconds(engine: EngineProfile, prompt: int, uncached: int, output: int) -> float:
    """A turn alone: what it appends, then a token an iteration."""
    model = engine.latency
    decode = output * (
        model.constant + model.per_token + model.per_request + _per_read(model) * (prompt + output / 2)
    )
    return prefill_seconds(engine, prompt, cached=max(0, prompt - uncached)) + decode


def _per_read(model: LatencyModel) -> float:
    """Of a token of context, by a decoding row."""
    return model.per_attended + model.per_context + model.per_before


def capacity_of(prefiller: EngineProfile, decoder: EngineProfile, means: Means) -> Capacity:
    """T_p at the mean prompt; T_d with the decoder's KV full of conversations at their peak."""
    prompt = max(1, round(means.first_turn_tokens))
    model = decoder.latency
    slots = max(1.0, decoder.kv_tokens / means.peak_kv_tokens)
    iteration = model.constant + slots * (model.per_token + model.per_request)
    iteration += _per_read(model) * decoder.kv_tokens
    return Capacity(prompt / prefill_seconds(prefiller, prompt), slots / iteration, decoder.kv_tokens)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    rate: float  # conversations a second
    park_after_s: float = 60.0
    large_append: int = LARGE_APPEND_TOKENS
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
class FleetPlan:
    measured: Measured
    pinned: Provision  # the paper's rule: KV on the decoder for life
    parked: Provision  # ours
    check: Check
    energy: tuple[Energy, ...]


def plan_fleet(
    found: Sequence[TraceConversation], prefiller: EngineProfile, decoder: EngineProfile, request: PlanRequest
) -> FleetPlan:
    measured = measure(found, decoder, request.park_after_s, request.large_append)
    capacity = capacity_of(prefiller, decoder, measured.pinned)
    prefillers = prefillers_for(measured.pinned, capacity, request.rate)
    pinned = provision(measured.pinned, capacity, prefillers, request.rate)
    parked = provision(measured.parked, capacity, prefillers, request.rate)
    times = generators.poisson(request.rate, generators.stream(0, "plan"))
    trace = list(generators.arriving(found, times))
    result = _play(trace, prefiller, decoder, parked, request)
    energy = tuple(
        _energy(cap, _play(trace, prefiller, decoder.capped(cap), parked, request)) for cap in request.caps_w
    )
    return FleetPlan(measured, pinned, parked, _check(result, request), energy)


def _play(
    trace: Sequence[TraceConversation],
    prefiller: EngineProfile,
    decoder: EngineProfile,
    provision: Provision,
    request: PlanRequest,
) -> SimulationResult:
    fleet = SimulatedFleet(
        (
            SimulatedTier("prefill", Role.PREFILL, provision.prefillers, prefiller),
            SimulatedTier("decode", Role.DECODE, provision.decoders, decoder),
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


def _check(result: SimulationResult, request: PlanRequest) -> Check:
    ttft, first, tbt = _turns(result)
    gate = result.totals.gate_wait_s / max(1, result.totals.conversations)
    firsts, later, tbt_p95 = percentile(ttft[first], 95), percentile(ttft[~first], 95), percentile(tbt, 95)
    holds = firsts <= request.ttft_s and tbt_p95 <= request.tbt_s
    return Check(result.totals.conversations, firsts, later, tbt_p95, gate, holds)


def _energy(cap: float, result: SimulationResult) -> Energy:
    ttft, first, tbt = _turns(result)
    totals = result.totals
    return Energy(
        cap,
        totals.joules / max(1, totals.conversations),
        totals.tokens_per_joule,
        percentile(ttft[first], 95),
        percentile(tbt, 95),
    )


def _turns(result: SimulationResult) -> tuple[Values, NDArray[np.bool_], Values]:
    """TTFT of every turn, which of them are first turns, and every TBT."""
    recorder = result.recorder
    tbt = np.asarray(recorder.turn_tbt, dtype=float)
    first = np.asarray(recorder.turn_is_first, dtype=bool)
    return np.asarray(recorder.turn_ttft, dtype=float), first, tbt[~np.isnan(tbt)]
