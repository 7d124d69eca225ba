"""Plans a fleet: inequalities bound its size, simulations of the elastic rule choose engines and caps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan

import numpy as np

from placement.engines import Role
from placement.prefetch_rules import PARK_AFTER_S
from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.interface import DEFAULT_TARGETS
from placement.scheduling.latency_model import LatencyModel
from placement.sizing.provisioning import Capacity, Means, Provision, prefillers_for, provision
from traces import TraceError, generators
from traces.describe import LARGE_APPEND_TOKENS
from traces.format import TraceConversation
from traces.simulator.metrics import SimulationResult, percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier, prefill_seconds


@dataclass(frozen=True, slots=True)
class Measured:
    pinned: Means  # resident from the first turn to the last: the paper's W
    parked: Means  # resident while a turn runs, and `park_after` after it
    large_turns: float  # share of later turns that append more than the threshold


def measure(
    found: Sequence[TraceConversation], decoder: EngineProfile, park_after_s: float, large: int
) -> Measured:
    """Return means over the conversations, with the service times of an unloaded engine of this profile."""
    if not found:
        raise TraceError("the trace has no conversations to plan for: none, or none that fits a decoder")
    first = decoder_tokens = lifetime = active = peak = 0.0
    later = large_turns = 0
    for conversation in found:
        for index, turn in enumerate(conversation.turns):
            served = _seconds(
                decoder, turn.prompt_tokens, turn.appended_tokens if index else 1, turn.output_tokens
            )
            lifetime += served + (turn.wait_s if index else 0.0)
            active += served + (min(turn.wait_s, park_after_s) if index else 0.0)
            decoder_tokens += turn.output_tokens + (turn.appended_tokens if index else 0)
            later += index > 0
            large_turns += index > 0 and turn.appended_tokens > large
        first += conversation.turns[0].prompt_tokens
        peak += conversation.peak_context_tokens
    count = len(found)
    pinned = Means(first / count, max(1.0, decoder_tokens / count), lifetime / count, peak / count)
    return Measured(pinned, replace(pinned, resident_s=active / count), large_turns / later if later else 0.0)


def _seconds(engine: EngineProfile, prompt: int, uncached: int, output: int) -> float:
    """Return how long a turn takes alone: its uncached prompt, then one iteration for each output token."""
    model = engine.latency
    decode = output * (
        model.constant + model.per_token + model.per_request + _per_read(model) * (prompt + output / 2)
    )
    return prefill_seconds(engine, prompt, cached=max(0, prompt - uncached)) + decode


def _per_read(model: LatencyModel) -> float:
    """Return the time that a decoding request needs to read one token of its context."""
    return model.per_attended + model.per_context + model.per_before


def capacity_of(prefiller: EngineProfile, decoder: EngineProfile, means: Means) -> Capacity:
    """Return a prefiller's tokens/s at the mean prompt, and the tokens/s and KV of a full decoder.

    A full decoder holds as many conversations as fit at their peak.
    """
    prompt = max(1, round(means.first_turn_tokens))
    model = decoder.latency
    slots = max(1.0, decoder.kv_tokens / means.peak_kv_tokens)
    iteration = model.constant + slots * (model.per_token + model.per_request)
    iteration += _per_read(model) * decoder.kv_tokens
    return Capacity(prompt / prefill_seconds(prefiller, prompt), slots / iteration, decoder.kv_tokens)


CAPS = (5 / 6, 2 / 3)  # default power caps, as shares of the power limit
AS_WELL = 1.05  # a fleet does as well as another if no figure is worse by more than this factor
REACHABLE = 1.25  # factor on the TTFT of a first turn alone: no fleet can meet a lower target


@dataclass(frozen=True, slots=True)
class PlanRequest:
    rate: float  # conversations a second
    park_after_s: float = PARK_AFTER_S
    large_append: int = LARGE_APPEND_TOKENS
    caps_w: tuple[float, ...] = ()
    ttft_s: float = DEFAULT_TARGETS.ttft_s
    tbt_s: float = DEFAULT_TARGETS.tbt_s  # TBT target of running turns


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet with its simulated figures. Without prefillers, all its engines are alike."""

    prefillers: int
    decoders: int
    cap_w: float  # power cap of the decoders
    first_ttft_p95_s: float
    later_ttft_p95_s: float
    tbt_p95_s: float
    e2e_p95_s: float
    gate_wait_mean_s: float
    joules_per_conversation: float
    tokens_per_joule: float
    holds: bool

    def does_as_well_as(self, other: "Candidate") -> bool:
        """Return whether each figure is at most `AS_WELL` times the other's; unknown figures are ignored."""
        mine, theirs = (
            (one.first_ttft_p95_s, one.later_ttft_p95_s, one.e2e_p95_s, one.joules_per_conversation)
            for one in (self, other)
        )
        within = all(isnan(its) or own <= AS_WELL * its for own, its in zip(mine, theirs, strict=True))
        return within and self.holds >= other.holds


@dataclass(frozen=True, slots=True)
class FleetPlan:
    measured: Measured
    pinned: Provision  # the paper's rule: KV on the decoder for life
    parked: Provision
    conversations: int  # number of simulated conversations
    too_large: int  # conversations left out because they outgrow a decoder
    ttft_s: float  # TTFT that was planned for
    elastic: Candidate
    without_prefillers: Candidate  # a fleet with as many engines
    by_cap: tuple[Candidate, ...]  # `elastic` with its decoders under each cap

    @property
    def prefillers_needed(self) -> bool:
        return not self.without_prefillers.does_as_well_as(self.elastic)

    @property
    def advised(self) -> Candidate:
        """Return the candidate with the least energy among those that meet the targets."""
        holding = [one for one in self.by_cap if one.holds] or [self.elastic]
        return min(holding, key=lambda one: one.joules_per_conversation)


def plan_fleet(
    found: Sequence[TraceConversation], prefiller: EngineProfile, decoder: EngineProfile, request: PlanRequest
) -> FleetPlan:
    largest = PlacerSettings().fill * decoder.kv_tokens
    fitting = [conversation for conversation in found if conversation.peak_context_tokens <= largest]
    measured = measure(fitting, decoder, request.park_after_s, request.large_append)
    capacity = capacity_of(prefiller, decoder, measured.pinned)
    prefillers = prefillers_for(measured.pinned, capacity, request.rate)
    pinned = provision(measured.pinned, capacity, prefillers, request.rate)
    parked = provision(measured.parked, capacity, prefillers, request.rate)
    times = generators.poisson(request.rate, generators.stream(0, "plan"))
    alone = [prefill_seconds(prefiller, conversation.turns[0].prompt_tokens) for conversation in fitting]
    reachable = replace(request, ttft_s=max(request.ttft_s, REACHABLE * percentile(alone, 95)))
    planner = FleetPlanner(list(generators.arriving(fitting, times)), prefiller, decoder, reachable)
    elastic, without = planner.smallest(parked)
    limit = decoder.power.limit_w
    caps = request.caps_w or tuple(round(limit * share) for share in CAPS)
    capped = (planner.play(elastic.prefillers, elastic.decoders, cap) for cap in caps if cap < limit)
    left = len(fitting), len(found) - len(fitting)
    return FleetPlan(measured, pinned, parked, *left, reachable.ttft_s, elastic, without, (elastic, *capped))


class FleetPlanner:
    """Plays a trace on fleets of these engines under the elastic rule."""

    def __init__(
        self,
        trace: Sequence[TraceConversation],
        prefiller: EngineProfile,
        decoder: EngineProfile,
        request: PlanRequest,
    ) -> None:
        self._trace = trace
        self._prefiller = prefiller
        self._decoder = decoder
        self._request = request
        rule = replace(PlacerSettings().redisaggregation, above_tokens=request.large_append)
        self._settings = SimulationSettings(
            SystemSettings(System.ELASTIC),
            PlacerSettings(max_prefill_wait_s=float("inf"), redisaggregation=rule),
            park_after_s=request.park_after_s,
            tbt_s=request.tbt_s,
        )

    def smallest(self, bound: Provision) -> tuple[Candidate, Candidate]:
        """Return the best split of the fewest engines that suffice, and that many without prefillers."""
        asked = bound.prefillers + bound.decoders
        least, most = max(1, int(bound.load.prefill * bound.prefillers), int(bound.by_memory)), asked * 3 // 2
        found = self._splits(most, bound)
        while least < most:
            engines = (least + most) // 2
            tried = self._splits(engines, bound)
            if any(split.holds for split in tried):
                most, found = engines, tried
            else:
                least = engines + 1
        holding = [split for split in found if split.holds] or found
        return min(holding, key=lambda split: split.first_ttft_p95_s), found[0]

    def _splits(self, engines: int, bound: Provision) -> list[Candidate]:
        """Play all splits of `engines` engines, starting with the one without prefillers.

        The other splits have about as many prefillers as can compute all first turns, or a half or a
        quarter of that number, because decoders help.
        """
        most = bound.prefillers
        counts = sorted({0, most // 4, most // 2, most - 1, most, most + 1})
        return [self.play(count, engines - count) for count in counts if count < engines]

    def play(self, prefillers: int, decoders: int, cap_w: float | None = None) -> Candidate:
        decoder = self._decoder if cap_w is None else self._decoder.capped(cap_w)
        role = Role.DECODE if prefillers else Role.MIXED
        tiers = [SimulatedTier("decode", role, decoders, decoder)]
        if prefillers:
            tiers.append(SimulatedTier("prefill", Role.PREFILL, prefillers, self._prefiller))
        result = Simulation(SimulatedFleet(tuple(tiers)), self._settings).run(self._trace)
        return self._candidate(prefillers, decoders, decoder.power.limit_w, result)

    def _candidate(self, prefillers: int, decoders: int, cap_w: float, result: SimulationResult) -> Candidate:
        recorder, totals, request = result.recorder, result.totals, self._request
        ttft, first = np.asarray(recorder.turn_ttft), np.asarray(recorder.turn_is_first, dtype=bool)
        tbt = np.asarray(recorder.turn_tbt)
        firsts, tbt_p95 = percentile(ttft[first], 95), percentile(tbt[~np.isnan(tbt)], 95)
        return Candidate(
            *(prefillers, decoders, cap_w, firsts, percentile(ttft[~first], 95), tbt_p95),
            *(percentile(result.e2e, 95), totals.gate_wait_s / max(1, totals.conversations)),
            *(totals.joules / max(1, totals.conversations), totals.tokens_per_joule),
            holds=firsts <= request.ttft_s and not tbt_p95 > request.tbt_s,
        )
