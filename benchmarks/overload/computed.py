"""The policies on the computed clock: what gives way in each, and what comes of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

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

TBT_S = 0.25  # SLO target that a plan must keep: 5 x the TBT of the unloaded 14B model
PARK_AFTER_S = 30.0  # what the published figures were made with
LOOK_S = 1.0  # between two looks at the fleet: the directory's
UNLIMITED = 20  # times the KV: what to measure a policy about memory by
NO_GATE = 1e6  # plain vLLM takes whatever comes into its queue

DROP = DroppingSettings(DropLimits(TBT_S), LOOK_S)
DROPPED_IN = 5  # looks after which what a look asked for has been done
WATCH = replace(DROP, limits=DropLimits(TBT_S, most_engines=1))  # looks only: no group may have two engines


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    pressure: Pressure = Pressure.PARK
    dropping: DroppingSettings = WATCH
    kv: float = 1.0  # times the KV there is
    fill: float = PlacerSettings().fill


UNBOUNDED = Policy("KV without limit", kv=UNLIMITED)
PREEMPT = Policy("preempt", Pressure.DROP, fill=NO_GATE)
PIPELINE = Policy("pipeline always", dropping=replace(DROP, from_start=True, looks_ahead=False))
PARK = Policy("park")
DROPS = Policy("drop", dropping=DROP)
POLICIES = (UNBOUNDED, PREEMPT, PIPELINE, PARK, DROPS)
BARE = replace(DROP, coordinated=False, looks_ahead=False)
ABLATION = (
    PREEMPT,
    Policy("+ dynamic drop", dropping=BARE),
    Policy("+ coordinated exchange", dropping=replace(BARE, coordinated=True)),
    Policy("+ lookahead", dropping=DROP),
)
COUNTED = replace(DROP, looks_ahead=False)
RESTORATION = (
    DROPS,
    Policy("never restored", dropping=replace(DROP, restores=False)),
    Policy("by token counts", dropping=COUNTED),
    Policy("by token counts, never restored", dropping=replace(COUNTED, restores=False)),
    PIPELINE,
)


@dataclass(frozen=True)
class OverloadRow:
    load: str
    policy: str
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    late_share: float  # TTFT above 5 x its median with KV without limit
    tokens_per_s: float
    recomputed_tokens: int
    preemptions: int
    gate_wait_mean_s: float
    asked_mean: float  # share of the KV there is
    asked_most: float
    gained_most: float
    split_s: float
    exchange_most_s: float
    bubble: float


@dataclass(frozen=True)
class OverloadRun:
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


def outcome(
    load: str, policy: Policy, played: OverloadRun, late_s: float, last_arrival_s: float
) -> OverloadRow:
    recorder, totals, tally = played.result.recorder, played.result.totals, played.tally
    ttft, tbt = np.asarray(recorder.turn_ttft), np.asarray(recorder.turn_tbt)
    tbt = tbt[~np.isnan(tbt)] * 1e3
    asked = [share * policy.kv * policy.fill for at, share, _ in tally.looks if at < last_arrival_s]
    return OverloadRow(
        *(load, policy.name, percentile(ttft, 50), percentile(ttft, 99)),
        *(percentile(tbt, 50), percentile(tbt, 99), float(np.mean(ttft > late_s))),
        (totals.prefilled_tokens + totals.decoded_tokens - totals.recomputed_tokens) / totals.horizon_s,
        *(totals.recomputed_tokens, totals.preemptions, totals.gate_wait_s / max(1, totals.conversations)),
        *(float(np.mean(asked)), max(asked), tally.most_gained, tally.split_s),
        *(max(tally.exchange_s, default=0.0), tally.bubble),
    )


def compared(set_up: SetUp, policies: Sequence[Policy]) -> Iterator[OverloadRow]:
    trace = set_up.arrivals.of(set_up.lengths)
    fleet = set_up.cluster.fleet()
    floor = play(fleet, trace, UNBOUNDED)
    late_s = 5 * percentile(np.asarray(floor.result.recorder.turn_ttft), 50)
    for policy in policies:
        played = floor if policy is UNBOUNDED else play(fleet, trace, policy)
        yield outcome(set_up.name, policy, played, late_s, trace[-1].arrival_s)


@dataclass(frozen=True)
class Extreme:
    load: str
    policy: str
    late_after_s: float  # of the burst: when arrivals of ten seconds wait 5 x the median TTFT of before it
    full_after_s: float  # when more is asked for than there is, with all that gives way
    gained: float


def extreme(set_up: SetUp, begin_s: float = 60.0, seconds: float = 400.0) -> Iterator[Extreme]:
    """The burst does not end: how long each policy stands it."""
    endless = replace(set_up.arrivals, begins=(begin_s,), burst_s=seconds - begin_s, seconds=seconds)
    trace = endless.of(set_up.lengths)
    for policy in (PREEMPT, PARK, DROPS):
        played = play(set_up.cluster.fleet(), trace, policy)
        recorder = played.result.recorder
        arrived = np.asarray([trace[order].arrival_s for order in recorder.order])
        ttft = np.asarray(recorder.turn_ttft)
        late_s = 5 * percentile(ttft[arrived < begin_s], 50)
        windows = (at for at in range(int(begin_s), int(seconds), 2))
        late = (at for at in windows if percentile(ttft[(arrived >= at) & (arrived < at + 10)], 50) > late_s)
        scale = policy.fill if policy.fill == NO_GATE else 1.0
        looks = [(at, asked * scale > has) for at, asked, has in played.tally.looks if at > begin_s]
        full = (at for (at, now), (_, later) in zip(looks, looks[DROPPED_IN:], strict=False) if now and later)
        yield Extreme(
            *(set_up.name, policy.name, next(late, float("nan")) - begin_s),
            *(next(full, float("nan")) - begin_s, played.tally.most_gained),
        )


def headlines(rows: Sequence[OverloadRow], paper_loads: set[str]) -> dict[str, float]:
    """How many times lower `drop`'s P99 TTFT is, and how much higher its P50 TBT: the worst of the loads."""
    by = {(row.load, row.policy): row for row in rows}
    found: dict[str, float] = {}
    for kind, loads in (
        ("", {load for load, _ in by} - paper_loads),
        ("paper_lengths_", paper_loads),
    ):
        for other in ("preempt", "park", "pipeline always", "KV without limit"):
            ratios = [by[load, other].ttft_p99_s / by[load, "drop"].ttft_p99_s for load in loads]
            name = {"pipeline always": "pipeline", "KV without limit": "unlimited"}.get(other, other)
            found[f"{kind}ttft_p99_vs_{name}"] = round(min(ratios), 3)
            found[f"{kind}ttft_p99_vs_{name}_best"] = round(max(ratios), 3)
        for other in ("preempt", "park"):
            slower = [by[load, "drop"].tbt_p50_ms / by[load, other].tbt_p50_ms for load in loads]
            found[f"{kind}tbt_p50_vs_{other}"] = round(max(slower), 4)
    return found


def all_set_ups(set_ups: Sequence[SetUp]) -> list[OverloadRow]:
    return list(chain.from_iterable(compared(set_up, POLICIES) for set_up in set_ups))


def beside_the_paper(
    rows: Sequence[OverloadRow],
    ablation: Sequence[OverloadRow],
    restoration: Sequence[OverloadRow],
    extremes: Sequence[Extreme],
) -> dict[str, tuple[str, str]]:
    """Ours, with the paper's lengths and with long answers; the keys are those of the paper's table."""
    by = {(row.load, row.policy): row for row in rows}
    loads = list(dict.fromkeys(row.load for row in rows))
    long = [load for load in loads if "long" in load]
    short = [load for load in loads if load not in long]

    def ratio(chosen: Sequence[str], field: str, over: str, under: str) -> str:
        found = [getattr(by[one, over], field) / getattr(by[one, under], field) for one in chosen]
        return f"{min(found):.2f} to {max(found):.2f}" if found else "-"

    def both(field: str, over: str, under: str) -> tuple[str, str]:
        return ratio(short, field, over, under), ratio(long, field, over, under)

    steps = [ablation[:4], ablation[4:]]
    kept = {row.policy: row for row in restoration}
    never = kept["by token counts, never restored"].tbt_p50_ms / kept["by token counts"].tbt_p50_ms
    full = {(row.load, row.policy): row for row in extremes}
    burst = list(dict.fromkeys(row.load for row in extremes))

    def stands(load: str) -> str:
        return f"{full[load, 'drop'].full_after_s / full[load, 'park'].full_after_s:.2f}"

    return {
        "P99 TTFT of the baselines / drop's": both("ttft_p99_s", "preempt", "drop"),
        "the same, LongBench, 72B": (
            ratio([one for one in short if "H800" in one], "ttft_p99_s", "preempt", "drop"),
            "-",
        ),
        "P50 TBT of drop / baselines'": both("tbt_p50_ms", "drop", "preempt"),
        "dynamic drop alone: P99 TTFT of preempt / it": _pair(
            f"{one[0].ttft_p99_s / one[1].ttft_p99_s:.2f}" for one in steps
        ),
        "coordinated exchange: P99 TTFT before / after": _pair(
            f"{one[1].ttft_p99_s / one[2].ttft_p99_s:.2f}" for one in steps
        ),
        "lookahead: P99 TBT before / after": _pair(
            f"{one[2].tbt_p99_ms / one[3].tbt_p99_ms:.2f}" for one in steps
        ),
        "bubbles without and with lookahead": _pair(
            f"{one[2].bubble:.1%}, {one[3].bubble:.1%}" for one in steps
        ),
        "longest exchange": _pair(f"{one[3].exchange_most_s:.1f} s" for one in steps),
        "never restored: P50 TBT / restored": ("-", f"{never:.2f}"),
        "extreme burst: KV gained": _pair(f"{full[load, 'drop'].gained:.0%}" for load in burst),
        "extreme burst: time until the KV is full, drop / without": _pair(map(stands, burst)),
    }


def _pair(texts: Iterable[str]) -> tuple[str, str]:
    first, second = texts
    return first, second
