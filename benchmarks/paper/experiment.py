"""One run of one system, reduced to the figures the paper reports."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.paper import workload
from benchmarks.paper.workload import Mix
from placement.placer import PlacerSettings
from traces.format import Conversation
from traces.simulator import a40
from traces.simulator.a40 import Calibration
from traces.simulator.metrics import Result, Values, gmean, percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

MIXED = (System.COLLOCATED, System.STICKY)


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


class Bench:
    """A calibration and a mix, with the unloaded latencies that everything is compared with."""

    def __init__(self, calibration: Calibration, mix: Mix, pull_blocks: bool = True) -> None:
        self.calibration = calibration
        self.pull_blocks = pull_blocks
        self.found = workload.conversations(mix)
        self.full = workload.saturating(self.found, calibration.engine(a40.PREFILL_CHUNK))
        self.unloaded = self.play(System.CONSERVE, workload.far_apart(self.found))
        self.last: Result | None = None

    def at_saturation(self, system: System, error_rate: float = 0.1, cap_w: float = a40.LIMIT_W) -> Run:
        return self.run(system, a40.SATURATED_RATE, self.full, error_rate, cap_w)

    def at_rate(self, system: System, rate: float) -> Run:
        return self.run(system, rate, workload.poisson(self.found, rate))

    def run(
        self,
        system: System,
        rate: float,
        trace: Sequence[Conversation],
        error_rate: float = 0.1,
        cap_w: float = a40.LIMIT_W,
    ) -> Run:
        result = self.last = self.play(system, trace, error_rate, cap_w)
        gaps, alone = result.gaps, float(self.unloaded.last_tbt.mean())
        assert gaps is not None
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
        trace: Iterable[Conversation],
        error_rate: float = 0.1,
        cap_w: float = a40.LIMIT_W,
    ) -> Result:
        build = a40.collocated if system in MIXED else a40.disaggregated
        settings = SimulationSettings(
            SystemSettings(system, error_rate=error_rate),
            PlacerSettings(max_prefill_wait_s=float("inf")),
            pull_blocks=self.pull_blocks,
            token_gaps=True,
        )
        return Simulation(build(self.calibration, cap_w), settings).run(trace)

    @staticmethod
    def _latency(values: Values, unloaded: Values) -> Latency:
        ratio = values / unloaded
        return Latency(
            gmean(ratio),
            percentile(ratio, 95),
            percentile(values, 95),
            float(np.mean(values > a40.SLO_FACTOR * unloaded.mean())),
            float(np.mean(ratio > a40.SLO_FACTOR)),
        )
