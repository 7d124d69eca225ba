"""How claims move when a constant or an assumption does, and rules for when a conversation fits on a decoder.

Sensitivity: one row an assumption, one column a claim. The rules, where conversations are more than one
decoder holds at once: the paper's mix, one prefiller and one decoder, memory binds (inequality 2), and most
of the KV is of turns that run. All KV of live conversations counts; the same with half as much again
reserved; only what cannot give way counts, which is what the placer does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.paper import a40, workload
from benchmarks.paper.a40 import A40
from benchmarks.paper.experiment import PaperBench
from benchmarks.paper.workload import PaperMix
from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings
from traces.simulator.metrics import percentile
from traces.simulator.policies import System
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import SimulatedFleet

AS_CALIBRATED, AS_MIXED = A40(), PaperMix()
QUICK = 4  # variants
MEAN_CONTEXT = a40.INPUT_TOKENS + a40.OUTPUT_TOKENS / 2


@dataclass(frozen=True)
class Variant:
    name: str
    calibration: A40 = AS_CALIBRATED
    mix: PaperMix = AS_MIXED
    pull_blocks: bool = True


@dataclass(frozen=True)
class Moved:
    """Differences and shares: 0.1 is 10 %; the rest relative to the unloaded latency."""

    name: str
    p95_ttfet_vs_ampd10: float
    gmean_ttfet_vs_ampd10: float
    slo_violations: float
    own_slo_violations: float  # against 5 x each conversation's own unloaded latency
    ours_gmean_ttfet: float
    full_disagg_gmean_ttfet: float
    ours_gmean_tbt: float
    full_disagg_gmean_tbt: float
    collocated_p95_tbt: float
    collocated_violations: float
    collocated_late_tokens: float
    ours_late_tokens: float
    ampd5_violations: float
    ampd50_violations: float
    ampd10_drain: float
    ampd10_tokens_per_joule: float
    ampd50_tokens_per_joule: float  # not relative: tokens/J
    capped_tokens_per_joule: float
    capped_p95: float  # the worst of the three latencies
    collocated_capped_p95_ttfet: float


VARIANTS = (
    Variant("as calibrated"),
    Variant("300 conversations", mix=PaperMix(conversations=300)),
    Variant("1,000 conversations", mix=PaperMix(conversations=1_000)),
    Variant("6 to 10 turns", mix=PaperMix(turns=(6, 10))),
    Variant("1 to 5 turns, outputs with CV 1", mix=PaperMix(turns=(1, 5), output_cv=1.0)),
    Variant("iteration's fixed cost 5 ms", A40(constant_s=0.005)),
    Variant("iteration's fixed cost 17 ms", A40(constant_s=0.017)),
    Variant(
        "1k tokens/s is what ever larger batches approach",
        A40(per_context_s=1 / a40.DECODE_TOKENS_PER_S / MEAN_CONTEXT),
    ),
    Variant(
        "  the same, fixed cost 5 ms",
        A40(constant_s=0.005, per_context_s=1 / a40.DECODE_TOKENS_PER_S / MEAN_CONTEXT),
    ),
    Variant(
        "decode at the data sheet's 696 GB/s",
        A40(constant_s=0.005, per_context_s=a40.KV_BYTES_PER_TOKEN / a40.DATASHEET_BYTES_PER_S),
    ),
    Variant("PCIe at 12.5 GB/s", A40(pcie_bytes_per_s=12.5e9)),
    Variant("PCIe at 5 GB/s", A40(pcie_bytes_per_s=5e9)),
    Variant("  the same, 400 conversations", A40(pcie_bytes_per_s=5e9), PaperMix(conversations=400)),
    Variant("pulled history does not block the prefiller", pull_blocks=False),
    Variant("idle draw 30 W", A40(idle_w=30.0)),
    Variant("idle draw 100 W", A40(idle_w=100.0)),
    Variant("decoding draws 80 % of the limit", A40(decode_share_of_limit=0.8)),
    Variant("decoding draws 43 % of the limit (HBM)", A40(decode_share_of_limit=0.43)),
    Variant("compute speed follows power linearly", A40(speed_exponent=1.0)),
)


def table(quick: bool) -> Iterator[Moved]:
    for variant in VARIANTS[:QUICK] if quick else VARIANTS:
        yield measure(variant)


def measure(variant: Variant) -> Moved:
    bench = PaperBench(variant.calibration, variant.mix, variant.pull_blocks)
    ours = bench.at_saturation(System.PREFILLER)
    full = bench.at_saturation(System.FULL_DISAGGREGATION)
    mixed = bench.at_saturation(System.COLLOCATED)
    five, ten, half = (bench.at_saturation(System.AMPD, error) for error in (0.05, 0.1, 0.5))
    capped = bench.at_saturation(System.PREFILLER, cap_w=a40.CAP_W)
    mixed_capped = bench.at_saturation(System.COLLOCATED, cap_w=a40.CAP_W)
    slower = (
        capped.ttfet.p95_s / ours.ttfet.p95_s,
        capped.last_tbt.p95_s / ours.last_tbt.p95_s,
        capped.e2e.p95_s / ours.e2e.p95_s,
    )
    return Moved(
        variant.name,
        p95_ttfet_vs_ampd10=1 - ours.ttfet.p95_s / ten.ttfet.p95_s,
        gmean_ttfet_vs_ampd10=1 - ours.ttfet.gmean / ten.ttfet.gmean,
        slo_violations=ours.violations,
        own_slo_violations=max(
            ours.ttfet.own_violations, ours.last_tbt.own_violations, ours.e2e.own_violations
        ),
        ours_gmean_ttfet=ours.ttfet.gmean,
        full_disagg_gmean_ttfet=full.ttfet.gmean,
        ours_gmean_tbt=ours.last_tbt.gmean,
        full_disagg_gmean_tbt=full.last_tbt.gmean,
        collocated_p95_tbt=mixed.last_tbt.p95,
        collocated_violations=mixed.violations,
        collocated_late_tokens=mixed.late_tokens,
        ours_late_tokens=ours.late_tokens,
        ampd5_violations=five.ttfet.violations,
        ampd50_violations=half.ttfet.violations,
        ampd10_drain=ten.drain_s / ours.drain_s - 1,
        ampd10_tokens_per_joule=ten.tokens_per_joule / ours.tokens_per_joule - 1,
        ampd50_tokens_per_joule=half.tokens_per_joule,
        capped_tokens_per_joule=capped.tokens_per_joule / ours.tokens_per_joule - 1,
        capped_p95=max(slower) - 1,
        collocated_capped_p95_ttfet=mixed_capped.ttfet.p95_s / mixed.ttfet.p95_s - 1,
    )


FIT_CONVERSATIONS = 1_500
FIT_RATES = (0.5, 0.7, 0.9)
FIT_RULES = (
    ("all of it, 90 %", 0.9, False),
    ("all of it, 150 %", 1.5, False),
    ("what cannot give way, 90 %", 0.9, True),
)


@dataclass(frozen=True)
class FitRow:
    rule: str
    rate: float
    ttfet_p95_s: float
    later_ttft_p95_s: float
    tbt_p95_ms: float
    gate_wait_mean_s: float
    preemptions: int


def fit_rules(calibration: A40) -> Iterator[FitRow]:
    whole = a40.disaggregated(calibration)
    fleet = SimulatedFleet((*whole.of(Role.PREFILL), replace(whole.of(Role.DECODE)[0], replicas=1)))
    found = workload.conversations(PaperMix(conversations=FIT_CONVERSATIONS))
    for rate in FIT_RATES:
        trace = workload.poisson(found, rate)
        for name, fill, idle in FIT_RULES:
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
            yield FitRow(
                name,
                rate,
                percentile(result.ttfet, 95),
                percentile(np.asarray(recorder.turn_ttft)[later], 95),
                percentile(tbt[~np.isnan(tbt)], 95) * 1e3,
                totals.gate_wait_s / totals.conversations,
                totals.preemptions,
            )
