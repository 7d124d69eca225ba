"""Runs of one system, reduced to the figures the paper reports, and those behind Figures 10 to 13."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.paper import a40, workload
from benchmarks.paper.a40 import A40
from benchmarks.paper.workload import RATES, PaperMix
from placement.routing.placer_settings import PlacerSettings
from traces.format import TraceConversation
from traces.simulator.metrics import SimulationResult, Values, percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

MIXED = (System.COLLOCATED, System.STICKY)
PARK_AFTER_S = 30.0  # what the published figures were made with


@dataclass(frozen=True)
class Latency:
    """Of one metric: relative to the unloaded latency of the same conversation, and in seconds."""

    gmean: float
    p95: float
    p95_s: float
    violations: float  # share above 5 x the mean unloaded latency
    own_violations: float  # share above 5 x the conversation's own unloaded latency


@dataclass(frozen=True)
class Run:
    system: str
    rate: float
    error_rate: float
    cap_w: float
    ttfet: Latency
    last_tbt: Latency
    e2e: Latency
    late_tokens: float  # share that came later than 5 x the unloaded time between tokens
    gap_p99: float  # between single tokens, relative to the unloaded one
    drain_s: float
    tokens_per_joule: float
    transfers: int

    @property
    def violations(self) -> float:
        return max(self.ttfet.violations, self.last_tbt.violations, self.e2e.violations)

    def row(self) -> dict[str, Any]:
        return asdict(self)


class PaperBench:
    """A calibration and a mix, with the unloaded latencies that everything is compared with."""

    def __init__(self, calibration: A40, mix: PaperMix, pull_blocks: bool = True) -> None:
        self.calibration = calibration
        self.pull_blocks = pull_blocks
        self.found = workload.conversations(mix)
        self.full = workload.saturating(self.found, calibration.engine(a40.PREFILL_CHUNK))
        self.unloaded = self.play(System.PREFILLER, workload.far_apart(self.found))
        self.last: SimulationResult | None = None

    def at_saturation(self, system: System, error_rate: float = 0.1, cap_w: float = a40.LIMIT_W) -> Run:
        return self.run(system, a40.SATURATED_RATE, self.full, error_rate, cap_w)

    def at_rate(self, system: System, rate: float) -> Run:
        return self.run(system, rate, workload.poisson(self.found, rate))

    def run(
        self,
        system: System,
        rate: float,
        trace: Sequence[TraceConversation],
        error_rate: float = 0.1,
        cap_w: float = a40.LIMIT_W,
    ) -> Run:
        result = self.last = self.play(system, trace, error_rate, cap_w)
        gaps, alone = result.recorder.gaps, float(self.unloaded.last_tbt.mean())
        return Run(
            system=system.value,
            rate=rate,
            error_rate=error_rate if system is System.AMPD else 0.0,
            cap_w=cap_w,
            ttfet=self._latency(result.ttfet, self.unloaded.ttfet),
            last_tbt=self._latency(result.last_tbt, self.unloaded.last_tbt),
            e2e=self._latency(result.e2e, self.unloaded.e2e),
            late_tokens=gaps.share_above(a40.SLO_FACTOR * alone),
            gap_p99=gaps.percentile(99) / alone,
            drain_s=result.totals.horizon_s,
            tokens_per_joule=result.totals.tokens_per_joule,
            transfers=result.totals.transfers,
        )

    def play(
        self,
        system: System,
        trace: Iterable[TraceConversation],
        error_rate: float = 0.1,
        cap_w: float = a40.LIMIT_W,
    ) -> SimulationResult:
        build = a40.collocated if system in MIXED else a40.disaggregated
        settings = SimulationSettings(
            SystemSettings(system, error_rate=error_rate),
            PlacerSettings(max_prefill_wait_s=float("inf")),
            park_after_s=PARK_AFTER_S,
            pull_blocks=self.pull_blocks,
        )
        return Simulation(build(self.calibration, cap_w), settings).run(trace)

    @staticmethod
    def _latency(values: Values, unloaded: Values) -> Latency:
        ratio = values / unloaded
        return Latency(
            float(np.exp(np.log(np.maximum(ratio, 1e-9)).mean())),
            percentile(ratio, 95),
            percentile(values, 95),
            float(np.mean(values > a40.SLO_FACTOR * unloaded.mean())),
            float(np.mean(ratio > a40.SLO_FACTOR)),
        )


SYSTEMS = (System.PREFILLER, System.AMPD, System.COLLOCATED, System.FULL_DISAGGREGATION)
ALSO = (System.PULL_BACK, System.STICKY)
ERRORS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
QUICK_ERRORS = (0.0, 0.05, 0.1, 0.5)


@dataclass
class PaperFigures:
    by_rate: list[Run] = field(default_factory=list)  # 10
    saturated: dict[str, Run] = field(default_factory=dict)  # 10, at 1.634
    turns: dict[str, tuple[Values, Values]] = field(default_factory=dict)  # 11: TTFT and TBT of every turn
    by_error: list[Run] = field(default_factory=list)  # 12
    capped: dict[str, Run] = field(default_factory=dict)  # 13

    def of(self, system: str) -> list[Run]:
        return [run for run in (*self.by_rate, *self.saturated.values()) if run.system == system]


def run_all(bench: PaperBench, quick: bool) -> PaperFigures:
    """`quick` leaves out the baselines below saturation and some of the error rates."""
    figures = PaperFigures()
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
