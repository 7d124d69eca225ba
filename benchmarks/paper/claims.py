"""The paper's claims beside what the simulation gives, with the reason where they differ."""

from dataclasses import dataclass

import numpy as np

from benchmarks.paper.experiment import PaperFigures


@dataclass(frozen=True)
class Claim:
    figure: str
    what: str
    paper: str
    ours: str
    holds: bool
    why: str = ""


HORIZON = "grows with the trace's length, which the paper does not give (see the sensitivity table)"


def claims(figures: PaperFigures) -> list[Claim]:
    ours, full = figures.saturated["prefiller"], figures.saturated["full_disaggregation"]
    ampd, mixed = figures.saturated["ampd"], figures.saturated["collocated"]
    p95_gain = 1 - ours.ttfet.p95_s / ampd.ttfet.p95_s
    gmean_gain = 1 - ours.ttfet.gmean / ampd.ttfet.gmean
    worst = max(run.violations for run in figures.of("prefiller"))
    errors = {run.error_rate: run for run in figures.by_error}
    five, half = errors[0.05], errors[0.5]
    capped, mixed_capped = figures.capped["prefiller"], figures.capped["collocated"]
    gain = capped.tokens_per_joule / ours.tokens_per_joule - 1
    slower = max(
        capped.ttfet.p95_s / ours.ttfet.p95_s,
        capped.last_tbt.p95_s / ours.last_tbt.p95_s,
        capped.e2e.p95_s / ours.e2e.p95_s,
    )
    mixed_slower = mixed_capped.ttfet.p95_s / mixed.ttfet.p95_s - 1
    return [
        Claim("10", "p95 TTFET against AMPD, 10 % wrong", "-51.08 %", f"{-p95_gain:+.1%}", p95_gain >= 0.51),
        Claim(
            "10",
            "gmean TTFET against AMPD, 10 % wrong",
            "-19.17 %",
            f"{-gmean_gain:+.1%}",
            gmean_gain >= 0.19,
            "AMPD's queue " + HORIZON,
        ),
        Claim("10", "SLO violations of ours, worst of all rates", "0", f"{worst:.2%}", worst == 0),
        Claim(
            "10",
            "gmean TTFET of ours at saturation",
            "2.53 x",
            f"{ours.ttfet.gmean:.2f} x",
            ours.ttfet.gmean <= 2.53,
            "our decoders slow down less, see TBT",
        ),
        Claim(
            "10",
            "gmean TTFET of full disaggregation",
            "18.78 x",
            f"{full.ttfet.gmean:.1f} x",
            full.ttfet.gmean >= 18.78,
            "its prefiller is 3.5 times overloaded; the queue " + HORIZON,
        ),
        Claim(
            "10",
            "gmean last-turn TBT of ours",
            "2.49 x",
            f"{ours.last_tbt.gmean:.2f} x",
            ours.last_tbt.gmean <= 2.49,
            "1k tokens/s with 300k tokens of KV leaves TBT little slope to grow along; read as the limit of "
            "ever larger batches, 1k tokens/s gives 2.1 x here and 3.2 x in TTFET (sensitivity table)",
        ),
        Claim(
            "10",
            "gmean last-turn TBT of full disaggregation, below ours",
            "1.35 x",
            f"{full.last_tbt.gmean:.2f} x",
            full.last_tbt.gmean < ours.last_tbt.gmean,
            "as above",
        ),
        Claim(
            "10",
            "p95 last-turn TBT of collocated, above ours",
            "7.52 x (1.72 x ours)",
            f"{mixed.last_tbt.p95:.2f} x ({mixed.last_tbt.p95 / ours.last_tbt.p95:.2f} x ours)",
            mixed.last_tbt.p95 > ours.last_tbt.p95,
            "a turn's mean TBT dilutes a stalled iteration; see the slope of decoding above",
        ),
        Claim(
            "10",
            "collocated violates TTFET and TBT SLOs at saturation",
            "yes",
            f"{mixed.ttfet.violations:.1%} / {mixed.last_tbt.violations:.1%}",
            mixed.violations > 0,
            "its four cards carry this load; a turn's mean TBT dilutes iterations that stall; token by "
            "token (below) it violates",
        ),
        Claim(
            "10",
            "the same, token by token: share later than 5 x (ours, collocated)",
            "0, above 0",
            f"{ours.late_tokens:.2%}, {mixed.late_tokens:.1%}",
            mixed.late_tokens > 20 * ours.late_tokens,
            "where the contention shows: a prompt's chunk takes 10 x the unloaded time between tokens",
        ),
        Claim(
            "11",
            "TTFT of turns at p50: ours, AMPD and collocated overlap, s",
            "overlap",
            _turn_ttfts(figures, 50),
            _turn_ttft(figures, "ampd", 50) < 2 * _turn_ttft(figures, "prefiller", 50),
            "the paper's curves part at p70, ours and AMPD's at p40 here: its queue is longer here",
        ),
        Claim(
            "11",
            "TTFT of turns at p90: collocated best, AMPD worst, s",
            "yes",
            _turn_ttfts(figures, 90),
            _turn_ttft(figures, "collocated", 90)
            < _turn_ttft(figures, "prefiller", 90)
            < _turn_ttft(figures, "ampd", 90),
        ),
        Claim(
            "12",
            "TTFET / E2E violations of AMPD at 5 % wrong",
            "7.8 % / 6.3 %",
            f"{five.ttfet.violations:.1%} / {five.e2e.violations:.1%}",
            five.ttfet.violations > 0,
            "its queue " + HORIZON,
        ),
        Claim(
            "12",
            "violations of AMPD at 50 % wrong",
            "> 50 %",
            f"{half.ttfet.violations:.1%}",
            half.ttfet.violations > 0.5,
        ),
        Claim(
            "12",
            "AMPD's gmean TTFET grows linearly with its errors (R²)",
            "linear",
            f"{_r_squared(figures):.3f}",
            _r_squared(figures) > 0.98,
        ),
        Claim(
            "12",
            "AMPD drains later, 10 % wrong",
            "+15 %",
            f"{ampd.drain_s / ours.drain_s - 1:+.1%}",
            ampd.drain_s > ours.drain_s,
            "a wrong decision costs the prefiller 95 ms here, 70 of them waiting for KV at 25 GB/s; "
            "with history that comes at 5 GB/s it is +16 % (sensitivity table)",
        ),
        Claim(
            "12",
            "tokens/J of AMPD, 10 % wrong, against ours",
            "-7.5 %",
            f"{ampd.tokens_per_joule / ours.tokens_per_joule - 1:+.1%}",
            ampd.tokens_per_joule < ours.tokens_per_joule,
            "follows from the drain above",
        ),
        Claim(
            "12",
            "tokens/J of AMPD at 50 % wrong",
            "58",
            f"{half.tokens_per_joule:.0f}",
            half.tokens_per_joule < ours.tokens_per_joule,
            "counting prompts as sent; accelerators only",
        ),
        Claim(
            "13",
            "tokens/J of ours with decoders at 200 W",
            "+22.75 %",
            f"{gain:+.1%}",
            gain >= 0.22,
            "the paper's decoders drew 268 W on average (its gain says so), ours 288 W",
        ),
        Claim(
            "13", "p95 latencies of ours with them", "unchanged", f"{slower - 1:+.1%} at most", slower < 1.05
        ),
        Claim(
            "13",
            "p95 TTFET of collocated with three cards at 200 W",
            "+11.15 %",
            f"{mixed_slower:+.1%}",
            mixed_slower > slower - 1,
            "computing slows by 18 % at 2/3 of the power; decoding, most of TTFET, does not; +11.4 % "
            "with 1k tokens/s read as a limit (sensitivity table)",
        ),
    ]


def _turn_ttft(figures: PaperFigures, system: str, percentile: float) -> float:
    return float(np.percentile(figures.turns[system][0], percentile))


def _turn_ttfts(figures: PaperFigures, percentile: float) -> str:
    return " / ".join(
        f"{_turn_ttft(figures, name, percentile):.3g}" for name in ("prefiller", "ampd", "collocated")
    )


def _r_squared(figures: PaperFigures) -> float:
    errors = np.array([run.error_rate for run in figures.by_error])
    ttfet = np.array([run.ttfet.gmean for run in figures.by_error])
    return float(np.corrcoef(errors, ttfet)[0, 1] ** 2)
