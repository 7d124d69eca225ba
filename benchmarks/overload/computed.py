"""Overload policies on the simulator's clock."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.overload.setups import SetUp
from placement.overload.drop_plan import DropLimits
from placement.routing.placer_settings import PlacerSettings
from traces.format import TraceConversation
from traces.simulator.dropping import DroppingSettings, OverloadTally
from traces.simulator.kv import Pressure
from traces.simulator.metrics import SimulationResult, percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import SimulatedFleet

TBT_S = 0.25  # target that a drop plan must keep: 5 x the TBT of the unloaded 14B model
PARK_AFTER_S = 30.0
LOOK_S = 1.0  # between two looks at the fleet, as the directory's
UNLIMITED = 20  # times the KV
NO_GATE = 1e6  # plain vLLM takes whatever comes into its queue

DROP = DroppingSettings(DropLimits(TBT_S), LOOK_S)
WATCH = replace(DROP, limits=DropLimits(TBT_S, most_engines=1))  # never drops: no group has two engines


@dataclass(frozen=True, slots=True)
class Policy:
    """A reaction to a shortage of KV."""

    name: str
    pressure: Pressure = Pressure.PARK
    dropping: DroppingSettings = WATCH
    kv: float = 1.0  # times the KV there is
    fill: float = PlacerSettings().fill


UNBOUNDED = Policy("KV without limit", kv=UNLIMITED)
PREEMPT = Policy("preempt", Pressure.DROP, fill=NO_GATE)
PIPELINE = Policy("pipeline always", dropping=replace(DROP, from_start=True))
PARK = Policy("park")
DROPS = Policy("drop", dropping=DROP)
POLICIES = (UNBOUNDED, PREEMPT, PIPELINE, PARK, DROPS)
SHORT_NAMES = {"pipeline always": "pipeline", "KV without limit": "unlimited"}


@dataclass(frozen=True)
class OverloadRow:
    """Figures of one policy in one set-up."""

    load: str
    policy: str
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    tokens_per_s: float
    recomputed_tokens: int
    preemptions: int
    gate_wait_mean_s: float
    asked_most: float  # share of the KV there is
    gained_most: float
    split_s: float
    exchange_most_s: float
    bubble: float


@dataclass(frozen=True)
class OverloadRun:
    """Result of a simulated run, with what its drops counted."""

    result: SimulationResult
    tally: OverloadTally


def play(fleet: SimulatedFleet, trace: Sequence[TraceConversation], policy: Policy) -> OverloadRun:
    tier = fleet.tiers[0]
    profile = replace(tier.profile, kv_tokens=int(tier.profile.kv_tokens * policy.kv))
    settings = SimulationSettings(
        SystemSettings(System.COLLOCATED),
        PlacerSettings(fill=policy.fill, max_prefill_wait_s=float("inf")),
        policy.pressure,
        park_after_s=PARK_AFTER_S,
        reserved_until_held=True,
        dropping=policy.dropping,
    )
    simulation = Simulation(SimulatedFleet((replace(tier, profile=profile),)), settings)
    result = simulation.run(trace)
    assert simulation.dropping is not None
    return OverloadRun(result, simulation.dropping.tally)


def row(set_up: SetUp, policy: Policy) -> OverloadRow:
    trace = set_up.arrivals.of(set_up.lengths)
    run = play(set_up.cluster.fleet(), trace, policy)
    recorder, totals, tally = run.result.recorder, run.result.totals, run.tally
    ttft, tbt = np.asarray(recorder.turn_ttft), np.asarray(recorder.turn_tbt)
    tbt = tbt[~np.isnan(tbt)] * 1e3
    last_arrival_s = trace[-1].arrival_s
    asked = [share * policy.kv * policy.fill for at, share, _ in tally.looks if at < last_arrival_s]
    new_tokens = totals.prefilled_tokens + totals.decoded_tokens - totals.recomputed_tokens
    return OverloadRow(
        set_up.name,
        policy.name,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p99_s=percentile(ttft, 99),
        tbt_p50_ms=percentile(tbt, 50),
        tbt_p99_ms=percentile(tbt, 99),
        tokens_per_s=new_tokens / totals.horizon_s,
        recomputed_tokens=totals.recomputed_tokens,
        preemptions=totals.preemptions,
        gate_wait_mean_s=totals.gate_wait_s / max(1, totals.conversations),
        asked_most=max(asked),
        gained_most=tally.most_gained,
        split_s=tally.split_s,
        exchange_most_s=max(tally.exchange_s, default=0.0),
        bubble=tally.bubble,
    )


def table(set_ups: Sequence[SetUp]) -> list[OverloadRow]:
    return [row(set_up, policy) for set_up in set_ups for policy in POLICIES]


def headlines(rows: Sequence[OverloadRow], paper_loads: set[str]) -> dict[str, float]:
    """Return how many times lower `drop`'s P99 TTFT is, and how much higher its P50 TBT, the worst of the
    loads."""
    by = {(row.load, row.policy): row for row in rows}
    found: dict[str, float] = {}
    for kind, loads in (("", {load for load, _ in by} - paper_loads), ("paper_lengths_", paper_loads)):
        for other in ("preempt", "park", "pipeline always", "KV without limit"):
            ratios = [by[load, other].ttft_p99_s / by[load, "drop"].ttft_p99_s for load in loads]
            name = SHORT_NAMES.get(other, other)
            found[f"{kind}ttft_p99_vs_{name}"] = round(min(ratios), 3)
            found[f"{kind}ttft_p99_vs_{name}_best"] = round(max(ratios), 3)
        for other in ("preempt", "park"):
            slower = [by[load, "drop"].tbt_p50_ms / by[load, other].tbt_p50_ms for load in loads]
            found[f"{kind}tbt_p50_vs_{other}"] = round(max(slower), 4)
    return found
