"""Settings of `conserve` compared on a computed clock, under the loads of `benchmarks.coserving`.

    python -m benchmarks.coserving.settings [--like FILE] [--long] [--samples N] [--set NAME=VALUE]...

The engine has the profile and the capacity of the benchmark's run in FILE (its `--json`), or else those of
a run on two CPU cores; iterations take a little more, some much more, as they do there. A sample is what a
run of the benchmark sees: three turns of 20 online requests a load, each from an empty engine; with
`--long`, one turn of 400. A P99 of 54 requests is their worst, so one run says little of a setting: this
repeats it. Every `--set` (NAME=VALUE[,NAME=VALUE]) is a contender; the first has nothing set.
"""

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.coserving.engine import SimulatedCoServing, SimulatedRequest, SimulatedShape
from benchmarks.coserving.load import PartLengths, gamma_gaps
from benchmarks.output import command, quantile
from placement.scheduling.baselines.reference_policies import NonPreemptive, OnlineOnly
from placement.scheduling.conserve import Conserve
from placement.scheduling.interface import ServingPolicy, ServingSettings, TurnTargets
from placement.scheduling.latency_model import BatchWork, LatencyModel

Make = Callable[[TurnTargets], ServingPolicy]


@dataclass(frozen=True)
class MeasuredEngine:
    capacity: float  # requests a second, as the benchmark measures it
    latency: LatencyModel


# 24 layers, hidden 256, float32, one core of an Intel Xeon: `benchmarks.coserving` of November 2026.
TWO_CORES = MeasuredEngine(
    1.45,
    LatencyModel(
        per_token=3.34e-4,
        per_attended=1.63e-7,
        per_context=2.74e-6,
        constant=2.04e-2,
        per_before=8.1e-8,
        per_request=2.7e-4,
    ),
)
LENGTHS = PartLengths.part_of_paper(4)
SHAPE = SimulatedShape(
    blocks=112 * LENGTHS.iteration // 32, block_tokens=32, max_tokens=LENGTHS.iteration, max_running=64,
    checkpoint=False,
)  # fmt: skip
LOADS = ((0.2, 1.0), (0.4, 1.0), (0.6, 1.0), (0.4, 0.5), (0.4, 2.0))
BARS = (1.10, 1.10, 0.90)


class SharedMachine:
    """Iterations take up to a tenth longer than the profile says, and one in seventy a quarter."""

    def __init__(self, latency: LatencyModel, seed: int) -> None:
        self._latency = latency
        self._rng = random.Random(seed)

    def seconds(self, work: BatchWork) -> float:
        spike = self._rng.random() < 0.015
        return self._latency.seconds(work) * (1.25 if spike else 1 + abs(self._rng.gauss(0, 0.04))) + 0.001


@dataclass(frozen=True)
class LoadSample:
    share: float
    cv: float
    seeds: tuple[int, ...]  # of its turns
    requests: int  # of each


@dataclass(frozen=True)
class SettingFigures:
    ttft_p99_s: float
    tbt_p99_s: float
    offline_tokens_per_s: float


def turn(
    engine: MeasuredEngine, policy: ServingPolicy, slo: TurnTargets, sample: LoadSample, seed: int
) -> tuple[list[SimulatedRequest], int, float]:
    """Online requests that had a token, offline tokens, seconds."""
    rate = sample.share * engine.capacity
    until = sample.requests / rate
    machine = SharedMachine(engine.latency, seed)
    serving = SimulatedCoServing(policy, SHAPE, machine, engine.latency)  # type: ignore[arg-type]
    given = itertools.count()
    times = itertools.accumulate(gamma_gaps(rate, sample.cv, seed))
    online = [
        SimulatedRequest(f"on{number}", at, LENGTHS.prompt, LENGTHS.output, slo=slo)
        for number, at in enumerate(itertools.takewhile(lambda at: at < until, times))
    ]
    waiting: list[SimulatedRequest] = []

    def offline(now: float) -> SimulatedRequest | None:
        waiting[:] = [job for job in waiting if not job.done]
        if isinstance(policy, OnlineOnly) or len(waiting) >= LENGTHS.at_once:
            return None
        job = SimulatedRequest(f"off{next(given)}", now, LENGTHS.prompt, LENGTHS.output, offline=True)
        waiting.append(job)
        return job

    served = serving.run(online, until, offline)
    return [job for job in online if job.tokens_at], served.offline_tokens, served.seconds


def see(engine: MeasuredEngine, make: Make, slo: TurnTargets, sample: LoadSample) -> SettingFigures:
    turns = [turn(engine, make(slo), slo, sample, seed) for seed in sample.seeds]
    jobs = [job for online, _, _ in turns for job in online]
    gaps = [b - a for job in jobs for a, b in itertools.pairwise(job.tokens_at)]
    return SettingFigures(
        quantile([job.tokens_at[0] - job.arrival for job in jobs], 0.99),
        quantile(gaps, 0.99),
        sum(tokens for _, tokens, _ in turns) / sum(seconds for _, _, seconds in turns),
    )


class SettingsComparison:
    def __init__(self, engine: MeasuredEngine, samples: int, long: bool) -> None:
        self._engine = engine
        self._alone: dict[LoadSample, SettingFigures] = {}
        self._most: dict[LoadSample, SettingFigures] = {}
        self._runs: list[list[LoadSample]] = []
        for number in range(samples):
            seeds, requests = ((number,), 400) if long else (tuple(range(3 * number, 3 * number + 3)), 20)
            self._runs.append([LoadSample(share, cv, seeds, requests) for share, cv in LOADS])
        for sample in itertools.chain.from_iterable(self._runs):
            alone = self._alone[sample] = see(
                engine, lambda slo: OnlineOnly(ServingSettings()), TurnTargets(), sample
            )
            slo = TurnTargets(alone.ttft_p99_s, alone.tbt_p99_s)
            self._most[sample] = see(engine, lambda slo: NonPreemptive(ServingSettings()), slo, sample)

    def ratios(self, make: Make, sample: LoadSample) -> tuple[float, float, float]:
        alone, most = self._alone[sample], self._most[sample]
        got = see(self._engine, make, TurnTargets(alone.ttft_p99_s, alone.tbt_p99_s), sample)
        return (
            got.ttft_p99_s / alone.ttft_p99_s,
            got.tbt_p99_s / alone.tbt_p99_s,
            got.offline_tokens_per_s / most.offline_tokens_per_s,
        )

    def row(self, name: str, make: Make) -> str:
        runs = [[self.ratios(make, sample) for sample in run] for run in self._runs]
        means = [tuple(statistics.mean(column) for column in zip(*run, strict=True)) for run in runs]
        within = sum(
            ttft <= BARS[0] and tbt <= BARS[1] and tokens >= BARS[2] for ttft, tbt, tokens in means
        ) / len(means)  # fmt: skip
        figures = "  ".join(
            f"{statistics.mean(column):.3f} ±{statistics.pstdev(column):.3f}"
            for column in zip(*means, strict=True)
        )
        cells = "  ".join(
            "/".join(f"{statistics.mean(column):.2f}" for column in zip(*cell, strict=True))
            for cell in zip(*runs, strict=True)
        )
        return f"{name:<40} {figures}   {within:.2f}   {cells}"


def parsed(text: str) -> Make:
    """`conserve` with other settings, or other constants than its own."""
    known = [name for name, value in vars(Conserve).items() if isinstance(value, float)]
    may = {"margin", "offline_share", "ageing_s"}
    try:
        values = {
            name: float(value) for name, value in (pair.split("=", 1) for pair in text.split(",") if pair)
        }
        if unknown := values.keys() - may - {*known}:
            raise ValueError(f"unknown {', '.join(unknown)}")
    except ValueError as wrong:
        names = ", ".join([*sorted(may), *known])
        raise argparse.ArgumentTypeError(f"{text!r}: {wrong}; NAME is one of {names}") from None
    contender = type("Contender", (Conserve,), {name: values[name] for name in values.keys() - may})
    return lambda slo: contender(
        ServingSettings(slo=slo, **{name: values[name] for name in values.keys() & may})  # type: ignore[arg-type]
    )


def recorded(path: str) -> MeasuredEngine:
    try:
        engine = json.loads(Path(path).read_text())["engine"]
        return MeasuredEngine(float(engine["capacity"]), LatencyModel(**engine["latency"]))
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise argparse.ArgumentTypeError(
            f"{path} is not what `python -m benchmarks.coserving --json {path}` writes: {wrong!r}"
        ) from None


def main() -> None:
    parser = command(__doc__, json_file=False)
    parser.add_argument(
        "--like", type=recorded, default=TWO_CORES, metavar="FILE", help="a run of benchmarks.coserving"
    )
    parser.add_argument("--long", action="store_true", help="turns of 400 requests: the load's steady state")
    parser.add_argument("--samples", type=int, default=12, help="runs of the benchmark to compute")
    parser.add_argument(
        "--set", type=lambda text: (text, parsed(text)), action="append", default=[],
        metavar="NAME=VALUE[,NAME=VALUE]",
    )  # fmt: skip
    arguments = parser.parse_args()
    comparison = SettingsComparison(arguments.like, arguments.samples, arguments.long)
    print("TTFT P99 and TBT P99 against online_only, offline tokens against non_preemptive: means over the")
    print("loads ± deviation of a run; share of runs within 1.10, 1.10 and 0.90; the loads one by one")
    for name, make in [("as it is", parsed("")), *arguments.set]:
        print(comparison.row(name, make), flush=True)


if __name__ == "__main__":
    main()
