"""The runs behind Figures 10 to 13."""

from dataclasses import dataclass, field

import numpy as np

from benchmarks.paper.experiment import Bench, Run
from benchmarks.paper.workload import RATES
from traces.simulator import a40
from traces.simulator.metrics import Values
from traces.simulator.policies import System

SYSTEMS = (System.CONSERVE, System.AMPD, System.COLLOCATED, System.FULL_DISAGGREGATION)
ALSO = (System.PULL_BACK, System.STICKY)
ERRORS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
QUICK_ERRORS = (0.0, 0.05, 0.1, 0.5)


@dataclass
class Figures:
    by_rate: list[Run] = field(default_factory=list)  # 10
    saturated: dict[str, Run] = field(default_factory=dict)  # 10, at 1.634
    turns: dict[str, tuple[Values, Values]] = field(default_factory=dict)  # 11: TTFT and TBT of every turn
    by_error: list[Run] = field(default_factory=list)  # 12
    capped: dict[str, Run] = field(default_factory=dict)  # 13

    def of(self, system: str) -> list[Run]:
        return [run for run in (*self.by_rate, *self.saturated.values()) if run.system == system]


def run_all(bench: Bench, quick: bool) -> Figures:
    """`quick` leaves out the baselines below saturation and some of the error rates."""
    figures = Figures()
    for system in (*SYSTEMS, *ALSO):
        figures.saturated[system.value] = bench.at_saturation(system)
        assert bench.last is not None
        recorder = bench.last.recorder
        figures.turns[system.value] = (np.asarray(recorder.turn_ttft), np.asarray(recorder.turn_tbt))
    for rate in RATES:
        for system in SYSTEMS[:1] if quick else SYSTEMS:
            figures.by_rate.append(bench.at_rate(system, rate))
    for error in QUICK_ERRORS if quick else ERRORS:
        figures.by_error.append(bench.at_saturation(System.AMPD, error))
    for system in SYSTEMS:
        figures.capped[system.value] = bench.at_saturation(system, cap_w=a40.CAP_W)
    return figures
