"""Three rules for when a decoder has room, where conversations are more than one decoder holds at once.

The paper's mix, one prefiller and one decoder: memory binds (inequality 2), and most of the KV is of turns
that run. Rules: all KV of live conversations counts; the same with half as much again promised; only what
cannot give way counts, which is what the placer does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.paper import workload
from benchmarks.paper.workload import Mix
from placement.engines import Role
from placement.placer import PlacerSettings
from traces.simulator import a40
from traces.simulator.a40 import Calibration
from traces.simulator.metrics import percentile
from traces.simulator.profile import Fleet
from traces.simulator.simulation import Simulation, SimulationSettings

CONVERSATIONS = 1_500
RATES = (0.5, 0.7, 0.9)
RULES = (
    ("all of it, 90 %", 0.9, False),
    ("all of it, 150 %", 1.5, False),
    ("what cannot give way, 90 %", 0.9, True),
)


@dataclass(frozen=True)
class Room:
    rule: str
    rate: float
    ttfet_p95_s: float
    later_ttft_p95_s: float
    tbt_p95_ms: float
    gate_wait_mean_s: float
    preemptions: int


def table(calibration: Calibration) -> Iterator[Room]:
    whole = a40.disaggregated(calibration)
    fleet = Fleet((*whole.of(Role.PREFILL), replace(whole.of(Role.DECODE)[0], replicas=1)))
    found = workload.conversations(Mix(conversations=CONVERSATIONS))
    for rate in RATES:
        trace = workload.poisson(found, rate)
        for name, fill, idle in RULES:
            settings = SimulationSettings(
                placer=PlacerSettings(max_prefill_wait_s=float("inf"), fill=fill),
                park_after_s=60.0,
                linger_s=30.0,
                idle_reported=idle,
            )
            result = Simulation(fleet, settings).run(trace)
            recorder, totals = result.recorder, result.totals
            later = ~np.asarray(recorder.turn_is_first, dtype=bool)
            tbt = np.asarray(recorder.turn_tbt)
            yield Room(
                name,
                rate,
                percentile(result.ttfet, 95),
                percentile(np.asarray(recorder.turn_ttft)[later], 95),
                percentile(tbt[~np.isnan(tbt)], 95) * 1e3,
                totals.gate_wait_s / totals.conversations,
                totals.preemptions,
            )
