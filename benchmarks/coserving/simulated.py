"""In-engine policies on a computed clock: no noise, and hardware that is not here.

    python -m benchmarks.coserving.simulated [--quick] [--json FILE]

1. The co-serving paper's synthetic load (4,096 in, 256 out, CV 0.5 and 1) on a model of Llama 8B on one H100,
   whose coefficients follow from the paper's own numbers (2,048 tokens: 51 ms new, 124 on 40,000 of context).
2. Its ablation: each part switched on in turn.
3. BROS at its own mix (Table 2) against first-come and round robin.
4. What its slots of blocks could gain at most over whole blocks that are on the host (its Figure 13).
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.coserving.engine import Served, SimulatedCoServing, SimulatedRequest, SimulatedShape
from benchmarks.coserving.load import gamma_gaps
from benchmarks.harness.output import command, quantile, write_json
from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import LatencyModel
from placement.scheduling.policy_registry import make_policy

H100 = LatencyModel(per_token=1.97e-5, per_attended=8.7e-10, per_context=4e-8, constant=7e-3)
LLAMA_8B = SimulatedShape(blocks=28_600)
A100_30B = LatencyModel(per_token=9e-5, per_attended=4e-9, per_context=2e-7, constant=2.2e-2)
OPT_30B = SimulatedShape(blocks=2_400, layers=48, max_tokens=2048)


def poisson_like(
    rate: float, cv: float, seconds: float, seed: int, make: Callable[[int, float], SimulatedRequest]
) -> list[SimulatedRequest]:
    jobs: list[SimulatedRequest] = []
    now = 0.0
    for index, gap in enumerate(gamma_gaps(rate, cv, seed)):
        now += gap
        if now >= seconds:
            return jobs
        jobs.append(make(index, now))
    return jobs


def endless(prompt: Callable[[random.Random], int], output: Callable[[random.Random], int], seed: int) -> Any:
    rng, count = random.Random(seed), iter(range(1 << 30))
    return lambda now: SimulatedRequest(f"off{next(count)}", now, prompt(rng), output(rng), offline=True)


def row_of(name: str, served: Served, slo: TurnTargets) -> dict[str, Any]:
    online = [job for job in served.online() if job.tokens_at]
    ttft = [job.tokens_at[0] - job.arrival for job in online]
    gaps = [b - a for job in online for a, b in zip(job.tokens_at, job.tokens_at[1:], strict=False)]
    tpot = [(job.tokens_at[-1] - job.tokens_at[0]) / max(len(job.tokens_at) - 1, 1) for job in online]
    normalised = [(job.tokens_at[-1] - job.arrival) / job.output for job in online]
    count = max(len(online), 1)
    return {
        "policy": name, "online_requests": len(online),
        "ttft_p99_s": quantile(ttft, 0.99), "tbt_p99_s": quantile(gaps, 0.99),
        "normalised_latency_s": sum(normalised) / count,
        "ttft_attained": sum(t <= slo.ttft_s for t in ttft) / count,
        "tpot_attained": sum(t <= slo.tbt_s for t in tpot) / count,
        "offline_tokens_per_s": served.offline_tokens / max(served.seconds, 1e-9),
        "offline_finished": sum(job.offline for job in served.finished),
        "aborts": served.aborts, "preemptions": served.preemptions,
    }  # fmt: skip


def paper_load(
    settings: ServingSettings, shape: SimulatedShape, rate: float, cv: float, seconds: float
) -> Served:
    def make(index: int, now: float) -> SimulatedRequest:
        return SimulatedRequest(f"on{index}", now, 4096, 256, slo=settings.slo)

    engine = SimulatedCoServing(make_policy(settings), shape, H100)
    arrivals = poisson_like(rate, cv, seconds, 1, make)
    if settings.policy == "online_only":
        return engine.run(arrivals, seconds, lambda now: None)
    return engine.run(arrivals, seconds, endless(lambda rng: 4096, lambda rng: 256, 2))


def paper(rates: tuple[float, ...], cvs: tuple[float, ...], seconds: float) -> list[dict[str, Any]]:
    rows = []
    for cv, rate in itertools.product(cvs, rates):
        slo = TurnTargets(5.0, 1.0)
        for name in ("online_only", "non_preemptive", "sarathi", "bros", "conserve"):
            settings = ServingSettings(name, slo)
            row = row_of(name, paper_load(settings, LLAMA_8B, rate, cv, seconds), slo)
            rows.append({"rate": rate, "cv": cv, **row})
            if name == "online_only":
                slo = TurnTargets(row["ttft_p99_s"], row["tbt_p99_s"])
    return rows


def ablation(rate: float, seconds: float) -> list[dict[str, Any]]:
    served = paper_load(ServingSettings("online_only"), LLAMA_8B, rate, 0.5, seconds)
    alone = row_of("", served, TurnTargets())
    slo = TurnTargets(alone["ttft_p99_s"], alone["tbt_p99_s"])
    without = replace(LLAMA_8B, checkpoint=False)
    steps = (
        ("sarathi", ServingSettings("sarathi", slo), without),
        ("+ SLO-aware scheduler", ServingSettings("conserve", slo, safepoints=False), without),
        ("+ safepoints", ServingSettings("conserve", slo), without),
        ("+ checkpoint", ServingSettings("conserve", slo), LLAMA_8B),
    )
    return [
        row_of(name, paper_load(settings, shape, rate, 0.5, seconds), slo) for name, settings, shape in steps
    ]


@dataclass(frozen=True)
class BrosMix:
    """Mean and deviation of lengths, BROS's Table 2."""

    prompt: tuple[float, float]
    output: tuple[float, float]

    def lengths(self, count: int) -> list[tuple[int, int]]:
        rng = random.Random(5)

        def length(mean: float, deviation: float) -> int:
            shape = (mean / deviation) ** 2
            return max(4, int(rng.gammavariate(shape, mean / shape)))

        return [(length(*self.prompt), length(*self.output)) for _ in range(count)]


MIXES = {
    "ShareGPT": BrosMix((222.76, 256.36), (234.51, 268.50)),
    "LMSYS": BrosMix((90.50, 148.52), (237.04, 228.21)),
}
CONTENDERS = {
    "first come": "non_preemptive",
    "round robin": "round_robin",
    "bros": "bros",
    "conserve": "conserve",
}


class Batches:
    """64 offline requests, and the next 64 when these are done. Best effort: 512-1,024 in, 32-128 out."""

    def __init__(self, told_apart: bool) -> None:
        self._more = endless(lambda r: r.randint(512, 1024), lambda r: r.randint(32, 128), 6)
        self._told_apart = told_apart
        self._given: list[SimulatedRequest] = []
        self._left = 0

    def __call__(self, now: float) -> SimulatedRequest | None:
        if not self._left:
            if not all(job.done for job in self._given):
                return None
            self._given, self._left = [], 64
        self._left -= 1
        job: SimulatedRequest = self._more(now)
        job.offline = self._told_apart  # first come: requests without priorities, like any other
        self._given.append(job)
        return job


def bros(mix: str, rate: float, seconds: float) -> list[dict[str, Any]]:
    slo = TurnTargets(0.4, 0.2)
    lengths = MIXES[mix].lengths(int(rate * seconds * 2) + 10)

    def make(index: int, now: float) -> SimulatedRequest:
        return SimulatedRequest(f"on{index}", now, *lengths[index], slo=slo)

    rows = []
    for label, name in CONTENDERS.items():
        told_apart = label != "first come"
        engine = SimulatedCoServing(make_policy(ServingSettings(name, slo)), OPT_30B, A100_30B)
        arrivals = poisson_like(rate, 1.0, seconds, 4, make)
        served = engine.run(arrivals, seconds, Batches(told_apart))
        for job in served.finished if not told_apart else ():
            if job.key.startswith("off"):
                job.offline = True
                served.offline_tokens += job.furthest
        rows.append({"mix": mix, "rate": rate, **row_of(label, served, slo)})
    return rows


def slots(mix: str, rate: float, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Whole blocks with a checkpoint beside memory that is given token by token.

    Bidirectional blocks let an online request take free slots of an offline one's blocks, and then overwrite
    as many as it needs. Memory without any blocks allows that and more, so it is their upper bound; what is
    overwritten comes back from the host at no cost in both.
    """
    slo = TurnTargets(0.4, 0.2)
    lengths = MIXES[mix].lengths(int(rate * seconds * 2) + 10)

    def make(index: int, now: float) -> SimulatedRequest:
        return SimulatedRequest(f"on{index}", now, *lengths[index], slo=slo)

    bound = replace(OPT_30B, blocks=OPT_30B.blocks * OPT_30B.block_tokens, block_tokens=1)
    rows = []
    for label, shape in (("whole blocks", OPT_30B), ("slots, bound", bound)):
        engine = SimulatedCoServing(make_policy(ServingSettings("bros", slo)), shape, A100_30B)
        served = engine.run(poisson_like(rate, 1.0, seconds, seed, make), seconds, Batches(told_apart=True))
        rows.append({"mix": mix, "rate": rate, **row_of(label, served, slo)})
    return rows


def slot_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The bound, as a ratio to whole blocks: of means over mixes and seeds."""

    def ratio(figure: str) -> float:
        blocks, bound = (sum(row[figure] for row in rows[which::2]) for which in (0, 1))
        return float(bound / blocks)

    names = ("normalised_latency_s", "offline_tokens_per_s", "ttft_attained", "tpot_attained")
    return {f"bros_slots_vs_blocks_{name}": ratio(name) for name in names}


def bros_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over mixes and rates, of ratios within each."""
    by = {(r["mix"], r["rate"], r["policy"]): r for r in rows}
    loads = {(mix, rate) for mix, rate, _ in by}
    named = {}
    for base in ("first come", "round robin"):
        for key, name in (
            ("normalised_latency_s", "bros_latency_vs"), ("offline_tokens_per_s", "bros_throughput_vs")
        ):  # fmt: skip
            ratios = [by[*load, "bros"][key] / max(by[*load, base][key], 1e-9) for load in loads]
            named[f"{name}_{base.replace(' ', '_')}"] = sum(ratios) / len(ratios)
    return named


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for r in rows:
        print(
            f"  {r.get('mix', r.get('cv', '')):<8} {r.get('rate', ''):>4} {r['policy']:<22}"
            f" TTFT p99 {r['ttft_p99_s']:7.3f} s"
            f"  TBT p99 {r['tbt_p99_s'] * 1e3:6.1f} ms  norm. {r['normalised_latency_s'] * 1e3:6.1f} ms"
            f"  attained {r['ttft_attained']:.2f}/{r['tpot_attained']:.2f}"
            f"  offline {r['offline_tokens_per_s']:7.0f} tok/s  aborts {r['aborts']}"
            f"  preempted {r['preemptions']}"
        )


def main() -> None:
    parser = command(__doc__, quick="one rate, half a minute of it")
    arguments = parser.parse_args()
    seconds = 30.0 if arguments.quick else 120.0
    rates = (2.0,) if arguments.quick else (1.0, 2.0, 3.0)
    cvs = (0.5,) if arguments.quick else (0.5, 1.0)
    bros_rates = (5.0,) if arguments.quick else (3.0, 5.0, 7.0)
    tables = {
        "paper": paper(rates, cvs, seconds),
        "ablation": ablation(2.0, seconds),
        "bros": [row for mix in MIXES for rate in bros_rates for row in bros(mix, rate, seconds)],
    }
    loads = itertools.product(MIXES, (4,) if arguments.quick else (4, 5, 6))
    tables["slots"] = [row for mix, seed in loads for row in slots(mix, 5.0, seconds / 2, seed)]
    for title, rows in tables.items():
        show(title, rows)
    named = bros_figures(tables["bros"]) | slot_figures(tables["slots"])
    by = {(r["cv"], r["rate"], r["policy"]): r for r in tables["paper"]}
    for key, name, base in (
        ("ttft_p99_s", "simulated_ttft_p99_vs_online_only", "online_only"),
        ("tbt_p99_s", "simulated_tbt_p99_vs_online_only", "online_only"),
        ("offline_tokens_per_s", "simulated_throughput_vs_nonpreemptive", "non_preemptive"),
    ):
        ratios = {
            (cv, rate): by[cv, rate, "conserve"][key] / max(by[cv, rate, base][key], 1e-9)
            for cv, rate in itertools.product(cvs, rates)
        }
        named[name] = sum(ratios.values()) / len(ratios)
        named |= {f"{name}, {rate:g} req/s, CV {cv:g}": ratio for (cv, rate), ratio in ratios.items()}
    for name, value in named.items():
        print(f"{name}: {value:.3f}")
    write_json(arguments.json, {**named, **tables})


if __name__ == "__main__":
    main()
