"""Elastic placement of first turns, beside the paper's rule and collocated engines, in simulation.

    python -m benchmarks.paper.elastic [--quick] [--json FILE] [--traces FILE]

Loads are the paper's mix at 0.5 to 2.5 conversations/s and at the prefiller's saturation, and real
conversations at 0.2 to 1.5/s. The TBT target, by which elastic engines cut prompts, is 5 x the unloaded time
between tokens. A latency's ratio is to the better of collocated engines and the paper's rule. If
conversations wait for KV even on collocated engines, memory is the bound; such loads have a figure of their
own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.output import command, print_rows, report
from benchmarks.paper import a40, workload
from benchmarks.paper.workload import PaperMix
from placement.routing.placer_settings import Redisaggregation
from traces.format import TraceConversation
from traces.simulator.metrics import SimulationResult, percentile
from traces.simulator.policies import System, SystemSettings

RATES, REAL_RATES = (0.5, 1.0, 1.5, 2.0, 2.5), (0.2, 0.5, 1.0, 1.5)
OTHERS = (System.PREFILLER, System.COLLOCATED)
SYSTEMS = (System.ELASTIC, *OTHERS, System.STICKY)
PARK_AFTER_S, LINGER_S = 60.0, 1800.0  # the fleet file's defaults
LARGE_APPEND = 8_192 // workload.SHRINK  # twice the fleet file's default, in shrunk tokens
KV_BOUND_GATE_S = 0.1  # with a longer mean wait for KV on collocated engines, memory counts as the bound
MIX = "paper's mix"
CAPPED = "elastic, decoders at 200 W"
RATIOS = {
    "ttfet": "ttfet_p95_s",
    "first_ttft": "first_ttft_p95_s",
    "later_ttft": "later_ttft_p95_s",
    "e2e": "e2e_p95_s",
}


@dataclass(frozen=True)
class ElasticRow:
    """Figures of one system under one load."""

    load: str
    system: str
    ttfet_p50_s: float
    ttfet_p95_s: float
    first_ttft_p50_s: float
    first_ttft_p95_s: float
    later_ttft_p95_s: float
    e2e_p95_s: float
    late_share: float
    tokens_per_joule: float
    gate_wait_mean_s: float
    transfers: int
    last_resorts: int
    prefiller_share: float
    least_kv_share: float


def play(
    system: System, trace: Sequence[TraceConversation], cap_w: float = a40.LIMIT_W, agents: bool = False
) -> SimulationResult:
    """Play a trace. `agents`: a recorded one, with broken prefixes and conversations that never end."""
    return a40.simulate(
        SystemSettings(system),
        trace,
        cap_w,
        Redisaggregation(above_tokens=LARGE_APPEND) if agents else None,
        park_after_s=PARK_AFTER_S,
        linger_s=LINGER_S if agents else 0.0,
        prefillers_cache=agents,
        tbt_s=a40.tbt_target_s(),
    )


def row(load: str, system: str, result: SimulationResult) -> ElasticRow:
    totals, recorder = result.totals, result.recorder
    ttft, first = np.asarray(recorder.turn_ttft), np.asarray(recorder.turn_is_first, dtype=bool)
    return ElasticRow(
        load,
        system,
        ttfet_p50_s=percentile(result.ttfet, 50),
        ttfet_p95_s=percentile(result.ttfet, 95),
        first_ttft_p50_s=percentile(ttft[first], 50),
        first_ttft_p95_s=percentile(ttft[first], 95),
        later_ttft_p95_s=percentile(ttft[~first], 95),
        e2e_p95_s=percentile(result.e2e, 95),
        late_share=recorder.gaps.share_above(a40.tbt_target_s() * 1.001),  # gaps have rounding errors
        tokens_per_joule=totals.tokens_per_joule,
        gate_wait_mean_s=totals.gate_wait_s / totals.conversations,
        transfers=totals.transfers,
        last_resorts=totals.last_resorts,
        prefiller_share=totals.prefiller_share,
        least_kv_share=totals.least_kv_share,
    )


def table(traces: Path, quick: bool) -> Iterator[ElasticRow]:
    found = workload.conversations(PaperMix())
    for rate in RATES[1::2] if quick else RATES:
        trace = workload.poisson(found, rate)
        for system in SYSTEMS:
            yield row(f"{MIX} {rate}/s", system.value, play(system, trace))
    full = workload.saturating(found)
    for system in SYSTEMS:
        yield row("saturation", system.value, play(system, full))
    yield row("saturation", CAPPED, play(System.ELASTIC, full, a40.CAP_W))
    for rate in REAL_RATES[1:2] if quick else REAL_RATES:
        agents = workload.real(traces, rate)
        for system in SYSTEMS:
            yield row(f"{len(agents)} real {rate}/s", system.value, play(system, agents, agents=True))


def headlines(rows: Iterable[ElasticRow]) -> dict[str, float]:
    """Return the named figures: elastic placement's worst ratio for each latency, its late share and energy.

    A latency's ratio is to the better of collocated engines and the paper's rule. Loads bound by memory
    count in one ratio of their own, and in the late share.
    """
    by_load: dict[str, dict[str, ElasticRow]] = {}
    for one in rows:
        by_load.setdefault(one.load, {})[one.system] = one
    worst = dict.fromkeys(RATIOS, 0.0)
    bound = late = 0.0
    joules = []
    for systems in by_load.values():
        ours, mixed = systems[System.ELASTIC.value], systems[System.COLLOCATED.value]
        late = max(late, ours.late_share)
        if mixed.gate_wait_mean_s > KV_BOUND_GATE_S:
            bound = max(bound, ours.ttfet_p95_s / mixed.ttfet_p95_s)
            continue
        joules.append(ours.tokens_per_joule / mixed.tokens_per_joule)
        for name, field in RATIOS.items():
            best = min(getattr(systems[system.value], field) for system in OTHERS)
            worst[name] = max(worst[name], getattr(ours, field) / best)
    saturated = by_load["saturation"]
    capped = saturated[CAPPED].tokens_per_joule / saturated[System.COLLOCATED.value].tokens_per_joule
    return {
        **{f"elastic_worst_{name}": round(ratio, 4) for name, ratio in worst.items()},
        "elastic_late_share": round(late, 6),
        "elastic_tokens_per_joule_vs_collocated": round(min(joules), 4),
        "elastic_capped_tokens_per_joule_vs_collocated": round(capped, 4),
        "elastic_kv_bound_ttfet_vs_collocated": round(bound, 4),
    }


def shares(rows: Iterable[ElasticRow]) -> dict[str, float]:
    """Return the elastic rule's shares, averaged over the loads of each kind."""
    ours = [one for one in rows if one.system == System.ELASTIC.value]
    by_kind = {
        "prefiller_share_mix": [one.prefiller_share for one in ours if one.load.startswith(MIX)],
        "prefiller_share_real": [one.prefiller_share for one in ours if " real " in one.load],
        "least_kv_share": [one.least_kv_share for one in ours],
    }
    return {name: round(float(np.mean(found)), 4) for name, found in by_kind.items()}


def main() -> None:
    parser = command(__doc__, quick="fewer rates")
    parser.add_argument("--traces", type=Path, default=workload.SAMPLE, help="real conversations, any format")
    options = parser.parse_args()
    rows = list(table(options.traces, options.quick))
    print_rows("Where a first turn is computed", rows)
    report(options.json, headlines(rows) | shares(rows), table={"elastic": rows})


if __name__ == "__main__":
    main()
