"""Simulates the evaluation in the conversation paper: Figures 10 and 13, and where to compute first turns.

    python -m benchmarks.paper [--quick] [--json FILE] [--traces FILE]

`--traces` takes our format and any format that `conserve trace import` knows (default: the shipped sample).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.output import command, print_rows, report
from benchmarks.paper import a40, elastic, workload
from benchmarks.paper.workload import PaperMix
from traces.format import TraceConversation
from traces.simulator.metrics import SimulationResult, Values, percentile
from traces.simulator.policies import System, SystemSettings

RATES = (0.5, 0.75, 1.0, 1.25, 1.5)  # conversations a second, Poisson as in the paper
SYSTEMS = (System.PREFILLER, System.AMPD, System.COLLOCATED, System.FULL_DISAGGREGATION)
ALSO_SATURATED = (System.PULL_BACK, System.STICKY)
WRONG_PREDICTIONS = 0.1  # share of AMPD's decisions that are wrong
PARK_AFTER_S = 30.0


@dataclass(frozen=True)
class PaperRow:
    """Figures of one system at one rate, relative to the unloaded latency of the same conversation."""

    system: str
    rate: float
    cap_w: float
    ttfet_gmean: float
    ttfet_p95: float
    ttfet_p95_s: float
    last_tbt_gmean: float
    last_tbt_p95: float
    e2e_gmean: float
    e2e_p95: float
    violations: float  # share above 5 x the mean unloaded latency: the worst of TTFET, last TBT and E2E
    late_tokens: float  # share of tokens later than 5 x the unloaded time between tokens
    drain_s: float
    tokens_per_joule: float
    transfers: int


class PaperBench:
    """The paper's mix, and the unloaded latencies with which every run is compared."""

    def __init__(self) -> None:
        self.found = workload.conversations(PaperMix())
        self.full = workload.saturating(self.found)
        self.unloaded = self.play(System.PREFILLER, workload.far_apart(self.found))

    def play(
        self, system: System, trace: Iterable[TraceConversation], cap_w: float = a40.LIMIT_W
    ) -> SimulationResult:
        settings = SystemSettings(system, error_rate=WRONG_PREDICTIONS)
        return a40.simulate(settings, trace, cap_w, park_after_s=PARK_AFTER_S)

    def row(
        self, system: System, rate: float, trace: Sequence[TraceConversation], cap_w: float = a40.LIMIT_W
    ) -> PaperRow:
        result, alone = self.play(system, trace, cap_w), self.unloaded
        pairs = [
            (result.ttfet, alone.ttfet),
            (result.last_tbt, alone.last_tbt),
            (result.e2e, alone.e2e),
        ]
        ttfet, last_tbt, e2e = (values / unloaded for values, unloaded in pairs)
        target_s = a40.SLO_FACTOR * float(alone.last_tbt.mean())
        return PaperRow(
            system.value,
            rate,
            cap_w,
            ttfet_gmean=gmean(ttfet),
            ttfet_p95=percentile(ttfet, 95),
            ttfet_p95_s=percentile(result.ttfet, 95),
            last_tbt_gmean=gmean(last_tbt),
            last_tbt_p95=percentile(last_tbt, 95),
            e2e_gmean=gmean(e2e),
            e2e_p95=percentile(e2e, 95),
            violations=max(
                float(np.mean(values > a40.SLO_FACTOR * unloaded.mean())) for values, unloaded in pairs
            ),
            late_tokens=result.recorder.gaps.share_above(target_s),
            drain_s=result.totals.horizon_s,
            tokens_per_joule=result.totals.tokens_per_joule,
            transfers=result.totals.transfers,
        )

    def at_saturation(self, system: System, cap_w: float = a40.LIMIT_W) -> PaperRow:
        return self.row(system, a40.SATURATED_RATE, self.full, cap_w)


def gmean(ratios: Values) -> float:
    return float(np.exp(np.log(np.maximum(ratios, 1e-9)).mean()))


def headlines(
    by_rate: Sequence[PaperRow], saturated: Sequence[PaperRow], capped: PaperRow
) -> dict[str, float]:
    """Return the named figures. Reductions and gains are fractions: 0.51 means 51 %."""
    at = {row.system: row for row in saturated}
    ours = at[System.PREFILLER.value]
    every_rate = [row.violations for row in by_rate if row.system == ours.system]
    return {
        "p95_ttfet_vs_ampd10": round(1 - ours.ttfet_p95_s / at[System.AMPD.value].ttfet_p95_s, 4),
        "slo_violations": max([ours.violations, *every_rate]),
        "tokens_per_joule_gain_capped": round(capped.tokens_per_joule / ours.tokens_per_joule - 1, 4),
        "full_disagg_gmean_ttfet": round(at[System.FULL_DISAGGREGATION.value].ttfet_gmean, 3),
        "ours_gmean_ttfet": round(ours.ttfet_gmean, 3),
    }


def main() -> None:
    parser = command(__doc__, quick="fewer rates and systems")
    parser.add_argument("--traces", type=Path, default=workload.SAMPLE)
    options = parser.parse_args()
    bench = PaperBench()
    saturated = [bench.at_saturation(system) for system in (*SYSTEMS, *ALSO_SATURATED)]
    by_rate = [
        bench.row(system, rate, workload.poisson(bench.found, rate))
        for rate in RATES
        for system in (SYSTEMS[:1] if options.quick else SYSTEMS)
    ]
    capped = [bench.at_saturation(system, a40.CAP_W) for system in SYSTEMS]
    elastic_rows = list(elastic.table(options.traces, options.quick))
    tables = {"by_rate": by_rate, "saturated": saturated, "capped": capped}
    for name, rows in tables.items():
        print_rows(name.replace("_", " "), rows)
    print_rows("Where a first turn is computed", elastic_rows)
    named = headlines(by_rate, saturated, capped[0]) | elastic.headlines(elastic_rows)
    named |= elastic.shares(elastic_rows)
    report(options.json, named, table={**tables, "elastic": elastic_rows})


if __name__ == "__main__":
    main()
