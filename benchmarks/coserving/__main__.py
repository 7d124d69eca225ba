"""Online latency and offline throughput under the in-engine policies, on one engine, in turns.

    python -m benchmarks.coserving [--model DIR] [--quick] [--json FILE] [--plot FILE]

The engine is profiled first, as the paper does, and its capacity measured: requests a second when it has
nothing but a batch. Online loads are shares of that, so that they mean the same on another machine. The
SLO targets are what online work gets when it is alone: the P99 of `online_only` under the same arrivals,
in turns before the others'. Figures are ratios within one run, means over the loads, between turns of the
same number and the same minutes.
"""

import argparse
import asyncio
import functools
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.coserving.load import Experienced, OnlineLoad, PartLengths
from benchmarks.coserving.turns import BLOCK, LAYERS, LoadOutcome, bench
from benchmarks.harness.output import command, quantile, write_json
from placement.scheduling.latency_model import LatencyModel
from workers.coserving.iterations import IterationRecord
from workers.coserving.safepoint import Armed, Flag, SafepointWorker
from workers.profiles import Profile

# Ours between the two that it is compared with: neighbours in time have the same machine.
POLICIES = ("online_only", "conserve", "non_preemptive", "sarathi", "bros")
SCALES = (1.0, 1.25, 1.5, 2.0)


def safepoint_seconds() -> float:
    """What one armed check of the flag costs, when nobody raised it."""
    from types import SimpleNamespace

    flag = Flag(f"conserve-cost-{os.getpid()}")
    try:
        worker = SafepointWorker(flag, 1, 0, 1, 0)
        worker.register({"layer": SimpleNamespace(device=SimpleNamespace(type="cpu"))})
        worker.before_step(Armed(1))
        count = 200_000
        started = time.perf_counter()
        for _ in range(count):
            worker.before_layer("layer")
        return (time.perf_counter() - started) / count
    finally:
        flag.remove()


def abort_layers(records: list[IterationRecord]) -> list[float]:
    """Signal to abort, in layers of the iteration that was aborted."""
    return [
        r.signal_to_abort_s / (r.predicted_s / LAYERS) for r in records if r.aborted and r.predicted_s > 0
    ]


def live_error(records: list[IterationRecord]) -> dict[str, float]:
    """Of the latency model, on the iterations it planned."""
    off = [abs(r.predicted_s - r.seconds) / r.seconds for r in records if not r.aborted]
    return {"model_error_p50": quantile(off, 0.5), "model_error_p90": quantile(off, 0.9)}


def slowness(outcome: LoadOutcome, name: str, model: LatencyModel) -> float:
    """How slow the machine was in this policy's turns: what its iterations took of what the profile says.

    Of iterations at least half full, which every policy has. A shared machine changes it between turns by as
    much as policies differ: ratios of a run mean what they say where this is alike.
    """
    half = outcome.load.lengths.iteration / 2
    long = [r for r in outcome.iterations[name] if not r.aborted and r.new_tokens >= half]
    return sum(r.seconds for r in long) / max(sum(model.seconds(r.work) for r in long), 1e-9)


def profiled(profile: Profile) -> dict[str, float]:
    overall = profile.errors[0]
    return {"profile_error_p50": overall.median, "profile_error_p90": overall.p90}


def attained(outcome: LoadOutcome, got: Experienced, scale: float) -> float:
    return got.attainment(outcome.slo.ttft_s * scale, outcome.slo.tbt_s * scale)


def row_of(outcome: LoadOutcome, name: str, model: LatencyModel) -> dict[str, Any]:
    got, records = outcome.by_policy[name], outcome.iterations[name]
    return {
        "policy": name, "share": outcome.load.share, "rate": outcome.load.rate, "cv": outcome.load.cv,
        "online_requests": len(got.ttft),
        "ttft_p50_s": quantile(got.ttft, 0.5), "ttft_p99_s": quantile(got.ttft, 0.99),
        "tbt_p50_s": quantile(got.tbt, 0.5), "tbt_p99_s": quantile(got.tbt, 0.99),
        "offline_tokens_per_s": got.throughput,
        "aborts": sum(r.aborted for r in records),
        "aborted_share": sum(r.seconds for r in records if r.aborted) / max(got.seconds, 1e-9),
        "preemptions": sum(r.preempted for r in records),
        "slo_ttft_s": outcome.slo.ttft_s, "slo_tbt_s": outcome.slo.tbt_s, "seconds": got.seconds,
        "slowness": slowness(outcome, name, model),
        **live_error(records),
        **{f"attainment_at_{scale:g}": attained(outcome, got, scale) for scale in SCALES},
    }  # fmt: skip


def figures(outcomes: list[LoadOutcome]) -> dict[str, float]:
    """Means over the loads, of ratios within each."""
    ttft, tbt, throughput, at_one = [], [], [], []
    layers: list[float] = []
    seconds: list[float] = []
    for outcome in outcomes:
        ours, alone, most = (outcome.by_policy[n] for n in ("conserve", "online_only", "non_preemptive"))
        ttft.append(quantile(ours.ttft, 0.99) / quantile(alone.ttft, 0.99))
        tbt.append(quantile(ours.tbt, 0.99) / quantile(alone.tbt, 0.99))
        throughput.append(ours.throughput / max(most.throughput, 1e-9))
        at_one.append(attained(outcome, ours, 1.0))
        layers += abort_layers(outcome.iterations["conserve"])
        seconds += [r.seconds for r in outcome.iterations["conserve"] if not r.aborted]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    return {
        "ttft_p99_vs_online_only": mean(ttft),
        "tbt_p99_vs_online_only": mean(tbt),
        "throughput_vs_nonpreemptive": mean(throughput),
        "attainment_at_1": mean(at_one),
        "safepoint_cost": safepoint_seconds() * LAYERS / max(mean(seconds), 1e-9),
        "abort_p99_layers": quantile(layers, 0.99),
    }


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="co-serving")
    for column in (
        "policy", "load", "req/s", "cv", "TTFT p50/p99 s", "TBT p50/p99 ms", "offline tok/s",
        "attained ×1/×1.5", "aborts", "preempted", "slowness",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            r["policy"], f"{r['share']:g}", f"{r['rate']:.2f}", f"{r['cv']:g}",
            f"{r['ttft_p50_s']:.2f} / {r['ttft_p99_s']:.2f}",
            f"{r['tbt_p50_s'] * 1e3:.0f} / {r['tbt_p99_s'] * 1e3:.0f}", f"{r['offline_tokens_per_s']:.0f}",
            f"{r['attainment_at_1']:.2f} / {r['attainment_at_1.5']:.2f}", str(r["aborts"]),
            str(r["preemptions"]), f"{r['slowness']:.2f}",
        )  # fmt: skip
    Console(width=160).print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from traces import charts

    figure, axes = charts.panels(3, columns=3)
    panels = (
        ("ttft_p99_s", "TTFT P99, s"),
        ("tbt_p99_s", "TBT P99, s"),
        ("offline_tokens_per_s", "offline tokens/s"),
    )
    for axis, (key, label) in zip(axes, panels, strict=True):
        series: dict[str, tuple[list[float], list[float]]] = {}
        for name in dict.fromkeys(row["policy"] for row in rows):
            mine = sorted((r["share"], r[key]) for r in rows if r["policy"] == name and r["cv"] == 1.0)
            series[name] = ([share for share, _ in mine], [value for _, value in mine])
        charts.lines(axis, series, label, "online load, share of capacity (CV 1)", "")
    charts.save(figure, path)


def loads(
    capacity: float, shares: list[float], cvs: list[float], requests: int, lengths: PartLengths
) -> list[OnlineLoad]:
    """All shares of the capacity at CV 1, and the middle one at the other CVs.

    A turn is as long as its number of requests takes to arrive: a P99 of few is their worst.
    """
    middle = shares[len(shares) // 2]
    at_one = [(share, 1.0) for share in shares if 1.0 in cvs]
    mixed = at_one + [(middle, cv) for cv in cvs if cv != 1.0]
    return [
        OnlineLoad(share * capacity, cv, requests / (share * capacity), lengths, share) for share, cv in mixed
    ]


async def run(
    arguments: argparse.Namespace, after_load: Callable[[list[LoadOutcome], Profile, float], None]
) -> None:
    quick = arguments.quick
    lengths = PartLengths.part_of_paper(16 if quick else arguments.part)
    blocks = arguments.blocks or 112 * lengths.iteration // BLOCK
    async with bench(arguments.model, lengths, 1 if quick else 5, blocks, arguments.host_kv_gib) as engine:
        outcomes: list[LoadOutcome] = []
        capacity = await engine.capacity(2.5 if quick else 20.0)
        print(f"capacity: {capacity:.2f} requests/s", flush=True)
        if quick:
            many, turns = loads(capacity, [0.4], [1.0], 4, lengths), 1
        else:
            many = loads(capacity, arguments.loads, arguments.cvs, arguments.requests, lengths)
            turns = arguments.turns
        for load in many:
            outcomes.append(await engine.compare(load, tuple(arguments.policies), turns))
            after_load(outcomes, engine.profile, capacity)


def report(
    arguments: argparse.Namespace, outcomes: list[LoadOutcome], profile: Profile, capacity: float
) -> None:
    """After every load anew: a run that is cut off has said what it saw."""
    rows = [row_of(outcome, name, profile.model) for outcome in outcomes for name in outcome.by_policy]
    show(rows)
    named = {**figures(outcomes), **profiled(profile)}
    for name, value in named.items():
        print(f"{name}: {value:.4g}", flush=True)
    engine = {"capacity": capacity, "latency": asdict(profile.model)}
    write_json(arguments.json, {**named, "engine": engine, "rows": rows})
    if arguments.plot:
        plot(rows, arguments.plot)


def main() -> None:
    parser = command(__doc__, quick="one load, one turn, a sixteenth of the lengths: about a minute")
    parser.add_argument("--model", type=Path, help=f"of {LAYERS} layers; without it one is made")
    parser.add_argument("--turns", type=int, default=3, help="of every policy under every load")
    parser.add_argument("--requests", type=int, default=20, help="online requests of a turn, about")
    parser.add_argument(
        "--part",
        type=int,
        default=4,
        choices=(4, 8, 16),
        help="of the paper's lengths (4,096 in, 256 out): 4 is a quarter",
    )
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.2, 0.4, 0.6], help="online work, in shares of capacity"
    )
    parser.add_argument("--cvs", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--blocks", type=int, help="of KV, 32 tokens each; without it 112 iterations fit")
    parser.add_argument("--host-kv-gib", type=float, default=0.0, help="checkpoint offline KV on the host")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    asyncio.run(run(arguments, functools.partial(report, arguments)))


if __name__ == "__main__":
    main()
