"""Real agent conversations on the 14B set-up: when does dropping help a fleet that parks, and when not.

Lengths are divided by 4, so that contexts of several hundred thousand tokens fit an engine's KV; waits are as
recorded. Nobody says that a conversation is over: it ends after half an hour of silence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.overload.computed import DROPS, PARK, PREEMPT, Policy
from benchmarks.overload.setups import A800
from placement.routing.placer_settings import PlacerSettings
from traces import NotATrace, generators, importers
from traces.format import TraceConversation
from traces.format import load as load_trace
from traces.simulator.metrics import percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

SHRINK = 4
LONGEST = 120_000  # tokens of a conversation
PARK_AFTER_S, LINGER_S = 60.0, 1_800.0  # the fleet file's defaults
LOOK_S = 5.0  # days are simulated
AN_ENGINE = 59  # conversations: 471 on eight
RATES = (0.025, 0.0625, 0.125)  # conversations a second and engine


@dataclass(frozen=True)
class AgentsRow:
    load: str
    policy: str
    first_ttft_p50_s: float
    first_ttft_p99_s: float
    later_ttft_p50_s: float
    later_ttft_p95_s: float
    later_ttft_p99_s: float
    tbt_p50_ms: float
    gate_wait_mean_s: float
    recomputed_tokens: int
    preemptions: int
    drops: int
    split_s: float
    asked_most: float


def conversations(path: Path) -> tuple[TraceConversation, ...]:
    try:
        found = load_trace(path).conversations
    except NotATrace:
        found = importers.import_files([path]).conversations
    alone = (replace(one, parent=None) for one in found if one.parent is None)
    shrunk = generators.scale(alone, generators.Scale(lengths=1 / SHRINK))
    return tuple(generators.fit(shrunk, LONGEST))


def table(path: Path, quick: bool) -> Iterator[AgentsRow]:
    found = conversations(path)
    engines = max(2, 2 * round(len(found) / AN_ENGINE / 2))
    for each in RATES[1:2] if quick else RATES:
        rate = each * engines
        times = generators.poisson(rate, generators.stream(0, "arrivals"))
        trace = list(generators.arriving(found, times))
        for policy in (PREEMPT, PARK, DROPS):
            yield _row(f"{len(trace)} on {engines}, {rate:g}/s", policy, trace, engines)


def _row(load: str, policy: Policy, trace: list[TraceConversation], engines: int) -> AgentsRow:
    settings = SimulationSettings(
        SystemSettings(System.COLLOCATED),
        PlacerSettings(fill=policy.fill, max_prefill_wait_s=float("inf")),
        policy.pressure,
        park_after_s=PARK_AFTER_S,
        linger_s=LINGER_S,
        reserved_until_held=True,
        dropping=replace(policy.dropping, look_s=LOOK_S),
    )
    simulation = Simulation(A800.fleet(engines), settings)
    result = simulation.run(trace)
    assert simulation.dropping is not None
    recorder, totals, looks = result.recorder, result.totals, simulation.dropping.tally.looks
    ttft, first = np.asarray(recorder.turn_ttft), np.asarray(recorder.turn_is_first, dtype=bool)
    tbt = np.asarray(recorder.turn_tbt)
    firsts, later = ttft[first], ttft[~first]
    return AgentsRow(
        load,
        policy.name,
        percentile(firsts, 50),
        percentile(firsts, 99),
        percentile(later, 50),
        percentile(later, 95),
        percentile(later, 99),
        percentile(tbt[~np.isnan(tbt)] * 1e3, 50),
        totals.gate_wait_s / max(1, totals.conversations),
        totals.recomputed_tokens,
        totals.preemptions,
        totals.drops,
        totals.split_s,
        max(asked for _, asked, _ in looks) * policy.fill,
    )
