"""Online latency and offline throughput of in-engine policies that alternate on one engine.

    python -m benchmarks.coserving [--model DIR] [--quick] [--json FILE]

The engine is profiled first. Then its capacity is measured: the requests a second that it serves if all work
is offline. Online loads are shares of the capacity, so that they mean the same on every machine. The SLO
targets are the P99 of `online_only` under the same arrivals, measured before the other policies. Figures are
ratios between policies in the same minutes, averaged over the loads.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

from benchmarks.coserving.policy_runs import LAYERS, LoadOutcome, OnlineLoad, PartLengths, bench
from benchmarks.harness.output import command, print_rows, quantile, report
from placement.scheduling.latency_model import LatencyModel
from workers.engine.coserving.iterations import IterationRecord
from workers.engine.coserving.safepoint import Armed, Flag, SafepointWorker
from workers.profiles import Profile

# Our policy runs between the two with which it is compared, because the machine drifts with time.
POLICIES = ("online_only", "conserve", "non_preemptive", "sarathi", "bros")
LOADS, MIDDLE = (0.2, 0.4, 0.6), 0.4  # online work, in shares of the capacity
SCALES = (1.0, 1.25, 1.5, 2.0)
CHECKS = 200_000
SHOWN = (
    *("policy", "share", "cv", "ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s"),
    *("offline_tokens_per_s", "attainment_at_1", "attainment_at_1.5", "aborts", "preemptions", "slowness"),
)


def check_seconds() -> float:
    """Return how long one check of the safepoint's flag takes in an armed step if the flag is not raised."""
    flag = Flag(f"conserve-cost-{os.getpid()}")
    try:
        worker = SafepointWorker(flag, 1, 0, 1, 0)
        worker.register({"layer": SimpleNamespace(device=SimpleNamespace(type="cpu"))})
        worker.before_step(Armed(1))
        began = time.perf_counter()
        for _ in range(CHECKS):
            worker.before_layer("layer")
        return (time.perf_counter() - began) / CHECKS
    finally:
        flag.remove()


def slowness(records: list[IterationRecord], least_tokens: float, model: LatencyModel) -> float:
    """Return the ratio of the measured time of iterations to the time that the profile predicts.

    Only iterations with at least `least_tokens` tokens count, because every policy has such iterations. On a
    shared machine the ratio drifts: compare policies only where their ratios are about equal.
    """
    long = [r for r in records if not r.aborted and r.new_tokens >= least_tokens]
    return sum(r.seconds for r in long) / max(sum(model.seconds(r.work) for r in long), 1e-9)


def row_of(outcome: LoadOutcome, name: str, model: LatencyModel) -> dict[str, Any]:
    got, records, slo = outcome.by_policy[name], outcome.iterations[name], outcome.slo
    off = [abs(r.predicted_s - r.seconds) / r.seconds for r in records if not r.aborted]
    aborted_s = sum(r.seconds for r in records if r.aborted)
    return {
        "policy": name,
        "share": outcome.load.share,
        "rate": outcome.load.rate,
        "cv": outcome.load.cv,
        "online_requests": len(got.ttft),
        **{f"ttft_p{q}_s": quantile(got.ttft, q / 100) for q in (50, 99)},
        **{f"tbt_p{q}_s": quantile(got.tbt, q / 100) for q in (50, 99)},
        "offline_tokens_per_s": got.throughput,
        "aborts": sum(r.aborted for r in records),
        "aborted_share": aborted_s / max(got.seconds, 1e-9),
        "preemptions": sum(r.preempted for r in records),
        "slo_ttft_s": slo.ttft_s,
        "slo_tbt_s": slo.tbt_s,
        "seconds": got.seconds,
        "slowness": slowness(records, outcome.load.lengths.iteration / 2, model),
        **{f"model_error_p{q}": quantile(off, q / 100) for q in (50, 90)},
        **{f"attainment_at_{by:g}": got.attainment(slo.ttft_s * by, slo.tbt_s * by) for by in SCALES},
    }


def figures(outcomes: list[LoadOutcome], profile: Profile) -> dict[str, float]:
    """Return the ratios between policies, averaged over all loads, and the profile's error."""
    ratios: dict[str, list[float]] = {"ttft": [], "tbt": [], "throughput": [], "attainment": []}
    layers: list[float] = []
    seconds: list[float] = []
    for outcome in outcomes:
        ours, alone, most = (outcome.by_policy[n] for n in ("conserve", "online_only", "non_preemptive"))
        ratios["ttft"].append(quantile(ours.ttft, 0.99) / quantile(alone.ttft, 0.99))
        ratios["tbt"].append(quantile(ours.tbt, 0.99) / quantile(alone.tbt, 0.99))
        ratios["throughput"].append(ours.throughput / max(most.throughput, 1e-9))
        ratios["attainment"].append(ours.attainment(outcome.slo.ttft_s, outcome.slo.tbt_s))
        for record in outcome.iterations["conserve"]:
            if not record.aborted:
                seconds.append(record.seconds)
            elif record.predicted_s > 0:
                layers.append(record.signal_to_abort_s / (record.predicted_s / LAYERS))
    return {
        "ttft_p99_vs_online_only": mean(ratios["ttft"]),
        "tbt_p99_vs_online_only": mean(ratios["tbt"]),
        "throughput_vs_nonpreemptive": mean(ratios["throughput"]),
        "attainment_at_1": mean(ratios["attainment"]),
        "safepoint_cost": check_seconds() * LAYERS / max(mean(seconds or [0.0]), 1e-9),
        "abort_p99_layers": quantile(layers, 0.99),
        "profile_error_p50": profile.errors[0].median,
        "profile_error_p90": profile.errors[0].p90,
    }


def loads(capacity: float, options: argparse.Namespace, lengths: PartLengths) -> list[OnlineLoad]:
    """Return a load for each share of the capacity with CV 1, and for the middle share with the other CVs.

    A load lasts until its number of requests has arrived. The P99 of few requests is just the worst of them.
    """
    if options.quick:
        mixed, requests = [(0.4, 1.0)], 4
    else:
        mixed, requests = [*((share, 1.0) for share in LOADS), (MIDDLE, 0.5), (MIDDLE, 2.0)], options.requests
    return [
        OnlineLoad(share * capacity, cv, requests / (share * capacity), lengths, share) for share, cv in mixed
    ]


async def run(options: argparse.Namespace) -> None:
    """Compare the policies under each load, and report after every load, in case the run is cut off."""
    quick, outcomes = options.quick, list[LoadOutcome]()
    lengths = PartLengths.part_of_paper(16 if quick else 4)
    async with bench(options.model, lengths, 1 if quick else 5) as engine:
        capacity, profile = await engine.capacity(2.5 if quick else 20.0), engine.profile
        print(f"capacity: {capacity:.2f} requests/s", flush=True)
        for load in loads(capacity, options, lengths):
            outcomes.append(await engine.compare(load, POLICIES, 1 if quick else options.turns))
            rows = [row_of(one, name, profile.model) for one in outcomes for name in one.by_policy]
            print_rows("co-serving", ({name: row[name] for name in SHOWN} for row in rows))
            measured = {"capacity": capacity, "latency": profile.model}
            report(options.json, figures(outcomes, profile), engine=measured, rows=rows)


def main() -> None:
    parser = command(__doc__, quick="one load, one run, a sixteenth of the lengths: about a minute")
    parser.add_argument("--model", type=Path, help=f"folder of a {LAYERS}-layer model (default: make one)")
    parser.add_argument("--turns", type=int, default=3, help="how often every policy serves every load")
    parser.add_argument("--requests", type=int, default=20, help="online requests of each run, on average")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
