"""How each claim moves when a constant or an assumption does: one row an assumption, one column a claim."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.paper.experiment import Bench
from benchmarks.paper.workload import Mix
from traces.simulator import a40
from traces.simulator.a40 import Calibration
from traces.simulator.policies import System

AS_CALIBRATED, AS_MIXED = Calibration(), Mix()
QUICK = 4  # variants
MEAN_CONTEXT = a40.INPUT_TOKENS + a40.OUTPUT_TOKENS / 2


@dataclass(frozen=True)
class Variant:
    name: str
    calibration: Calibration = AS_CALIBRATED
    mix: Mix = AS_MIXED
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
    Variant("300 conversations", mix=Mix(conversations=300)),
    Variant("1,000 conversations", mix=Mix(conversations=1_000)),
    Variant("6 to 10 turns", mix=Mix(turns=(6, 10))),
    Variant("1 to 5 turns, outputs with CV 1", mix=Mix(turns=(1, 5), output_cv=1.0)),
    Variant("iteration's fixed cost 5 ms", Calibration(constant_s=0.005)),
    Variant("iteration's fixed cost 17 ms", Calibration(constant_s=0.017)),
    Variant(
        "1k tokens/s is what ever larger batches approach",
        Calibration(per_context_s=1 / a40.DECODE_TOKENS_PER_S / MEAN_CONTEXT),
    ),
    Variant(
        "  the same, fixed cost 5 ms",
        Calibration(constant_s=0.005, per_context_s=1 / a40.DECODE_TOKENS_PER_S / MEAN_CONTEXT),
    ),
    Variant(
        "decode at the data sheet's 696 GB/s",
        Calibration(constant_s=0.005, per_context_s=a40.KV_BYTES_PER_TOKEN / a40.DATASHEET_BYTES_PER_S),
    ),
    Variant("PCIe at 12.5 GB/s", Calibration(pcie_bytes_per_s=12.5e9)),
    Variant("PCIe at 5 GB/s", Calibration(pcie_bytes_per_s=5e9)),
    Variant("  the same, 400 conversations", Calibration(pcie_bytes_per_s=5e9), Mix(conversations=400)),
    Variant("pulled history does not block the prefiller", pull_blocks=False),
    Variant("idle draw 30 W", Calibration(idle_w=30.0)),
    Variant("idle draw 100 W", Calibration(idle_w=100.0)),
    Variant("decoding draws 80 % of the limit", Calibration(decode_share_of_limit=0.8)),
    Variant("decoding draws 43 % of the limit (HBM)", Calibration(decode_share_of_limit=0.43)),
    Variant("compute speed follows power linearly", Calibration(speed_exponent=1.0)),
)


def table(quick: bool) -> Iterator[Moved]:
    for variant in VARIANTS[:QUICK] if quick else VARIANTS:
        yield measure(variant)


def measure(variant: Variant) -> Moved:
    bench = Bench(variant.calibration, variant.mix, variant.pull_blocks)
    ours = bench.at_saturation(System.CONSERVE)
    full = bench.at_saturation(System.FULL_DISAGGREGATION)
    mixed = bench.at_saturation(System.COLLOCATED)
    five, ten, half = (bench.at_saturation(System.AMPD, error) for error in (0.05, 0.1, 0.5))
    capped = bench.at_saturation(System.CONSERVE, cap_w=a40.CAP_W)
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
