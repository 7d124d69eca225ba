"""Elastic placing beside the paper's rule and collocated engines: where a first turn is computed.

python -m benchmarks.paper.elastic [--quick] [--json FILE] [--traces FILE]

The paper's mix at 0.5 to 2.5 conversations/s and at the prefiller's saturation, and real conversations at 0.2
to 1.5/s. The TBT target, to which elastic engines cut prompts and above which a token is late, is 5 x the
unloaded time between tokens. Ratios are to the better of the others, figure by figure. Where conversations
wait for KV on collocated engines as well, memory is the bound and the ratio is named apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.output import command, write_json
from benchmarks.paper import a40, real, workload
from benchmarks.paper.a40 import A40
from benchmarks.paper.workload import PaperMix
from placement.routing.placer_settings import PlacerSettings, Redisaggregation
from placement.scheduling.latency_model import BatchWork
from traces.format import TraceConversation
from traces.simulator.metrics import SimulationResult, percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

RATES = (0.5, 1.0, 1.5, 2.0, 2.5)  # of the paper's mix, Poisson
REAL_RATES = (0.2, 0.5, 1.0, 1.5)
OTHERS = (System.PREFILLER, System.COLLOCATED)
SYSTEMS = (System.ELASTIC, *OTHERS, System.STICKY)
KV_BOUND_GATE_S = 0.1  # mean wait for KV on collocated engines from which on memory is the bound
RATIOS = {
    "ttfet": "ttfet_p95_s",
    "first_ttft": "first_ttft_p95_s",
    "later_ttft": "later_ttft_p95_s",
    "e2e": "e2e_p95_s",
}


@dataclass(frozen=True)
class ElasticRow:
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
    taken_back: int
    last_resorts: int


def tbt_target_s(calibration: A40) -> float:
    context = int(a40.INPUT_TOKENS + a40.OUTPUT_TOKENS / 2)
    return a40.SLO_FACTOR * calibration.latency().seconds(BatchWork.of([(1, context)]))


def play(
    system: System,
    trace: Sequence[TraceConversation],
    calibration: A40,
    cap_w: float = a40.LIMIT_W,
    agents: bool = False,
) -> SimulationResult:
    """`agents`: real ones, who break prefixes and do not say that they are done."""
    rule = Redisaggregation(above_tokens=real.LARGE_APPEND) if agents else Redisaggregation()
    settings = SimulationSettings(
        SystemSettings(system),
        PlacerSettings(max_prefill_wait_s=float("inf"), redisaggregation=rule),
        park_after_s=real.PARK_AFTER_S,
        linger_s=real.LINGER_S if agents else 0.0,
        prefillers_cache=agents,
        tbt_s=tbt_target_s(calibration),
    )
    build = a40.collocated if system in (System.COLLOCATED, System.STICKY) else a40.disaggregated
    return Simulation(build(calibration, cap_w), settings).run(trace)


def row(load: str, system: str, result: SimulationResult, target_s: float) -> ElasticRow:
    totals, recorder, gaps = result.totals, result.recorder, result.recorder.gaps
    ttft, first = np.asarray(recorder.turn_ttft), np.asarray(recorder.turn_is_first, dtype=bool)
    return ElasticRow(
        load,
        system,
        percentile(result.ttfet, 50),
        percentile(result.ttfet, 95),
        percentile(ttft[first], 50),
        percentile(ttft[first], 95),
        percentile(ttft[~first], 95),
        percentile(result.e2e, 95),
        gaps.share_above(target_s * 1.001),  # sums are rounded
        totals.tokens_per_joule,
        totals.gate_wait_s / totals.conversations,
        totals.transfers,
        totals.taken_back,
        totals.last_resorts,
    )


def table(traces: Path, calibration: A40, quick: bool) -> Iterator[ElasticRow]:
    found, target_s = workload.conversations(PaperMix()), tbt_target_s(calibration)
    for rate in RATES[1::2] if quick else RATES:
        trace = workload.poisson(found, rate)
        for system in SYSTEMS:
            yield row(f"paper's mix {rate}/s", system.value, play(system, trace, calibration), target_s)
    full = workload.saturating(found, calibration.engine(a40.PREFILL_CHUNK))
    for system in SYSTEMS:
        yield row("saturation", system.value, play(system, full, calibration), target_s)
    capped = play(System.ELASTIC, full, calibration, a40.CAP_W)
    yield row("saturation", "elastic, decoders at 200 W", capped, target_s)
    for rate in REAL_RATES[1:2] if quick else REAL_RATES:
        agents = real.load(traces, rate)
        for system in SYSTEMS:
            result = play(system, agents, calibration, agents=True)
            yield row(f"{len(agents)} real {rate}/s", system.value, result, target_s)


def headlines(rows: Iterable[ElasticRow]) -> dict[str, float]:
    """Ratios to the better of collocated and the paper's rule, the worst of all loads."""
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
    capped = saturated["elastic, decoders at 200 W"].tokens_per_joule
    return {
        **{f"elastic_worst_{name}": round(ratio, 4) for name, ratio in worst.items()},
        "elastic_late_share": round(late, 6),
        "elastic_tokens_per_joule_vs_collocated": round(min(joules), 4),
        "elastic_capped_tokens_per_joule_vs_collocated": round(
            capped / saturated[System.COLLOCATED.value].tokens_per_joule, 4
        ),
        "elastic_kv_bound_ttfet_vs_collocated": round(bound, 4),
    }


def show(rows: Sequence[ElasticRow], console: Console) -> None:
    shown = Table(title="Where a first turn is computed: elastic beside the others", title_justify="left")
    for number, name in enumerate(asdict(rows[0])):
        shown.add_column(name.replace("_", " "), justify="left" if number < 2 else "right")
    for one in rows:
        shown.add_row(
            *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in asdict(one).values())
        )
    console.print(shown)


def main() -> None:
    parser = command(__doc__, quick="fewer rates")
    parser.add_argument("--traces", type=Path, default=real.SAMPLE)
    options = parser.parse_args()
    rows, console = list(table(options.traces, A40(), options.quick)), Console(width=180)
    show(rows, console)
    found = headlines(rows)
    for name, value in found.items():
        console.print(f"{name} = {value}")
    write_json(options.json, found | {"table": {"elastic": [asdict(one) for one in rows]}})


if __name__ == "__main__":
    main()
