"""Workloads from a few numbers: what is asked (`swe_bench`, `requests`) and when it arrives (`arrivals`)."""

from collections.abc import Callable, Iterator

from traces.format import Conversation, Header, Trace, TraceError
from traces.generators import arrivals, draws, requests, swe_bench
from traces.generators.arrivals import Step
from traces.generators.requests import Lengths
from traces.generators.swe_bench import SweBench

PAPER_PREFILL_TOKENS_PER_S = 25_000.0


def paper(count: int, rate: float, seed: int = 0, mix: SweBench | None = None) -> Trace:
    """SWE-bench-like conversations, Poisson arrivals."""
    times = arrivals.poisson(rate, draws.stream(seed, "arrivals"))
    return _trace(f"swe-bench, Poisson {rate}/s", seed, swe_bench.conversations(count, seed, mix), times)


def saturating(
    count: int,
    prefill_seconds: Callable[[int], float] | None = None,
    seed: int = 0,
    mix: SweBench | None = None,
) -> Trace:
    """SWE-bench-like conversations spaced so that one prefiller is exactly full."""
    found = tuple(swe_bench.conversations(count, seed, mix))
    cost = prefill_seconds or (lambda tokens: tokens / PAPER_PREFILL_TOKENS_PER_S)
    return _trace("swe-bench, prefiller exactly full", seed, iter(found), arrivals.saturating(found, cost))


def bursts(count: int, rate: float, cv: float, seed: int = 0, lengths: Lengths | None = None) -> Trace:
    """BurstGPT-like: single turns with gamma gaps."""
    times = arrivals.gamma(rate, cv, draws.stream(seed, "arrivals"))
    return _trace(
        f"requests, gamma {rate}/s CV {cv}", seed, requests.conversations(count, seed, lengths), times
    )


def step_bursts(count: int, pattern: tuple[Step, ...], seed: int = 0, mix: SweBench | None = None) -> Trace:
    """SWE-bench-like conversations at a rate that jumps."""
    times = arrivals.steps(pattern, draws.stream(seed, "arrivals"))
    shape = ", ".join(f"{step.rate}/s for {step.seconds} s" for step in pattern)
    return _trace(f"swe-bench, steps {shape}", seed, swe_bench.conversations(count, seed, mix), times)


def _trace(what: str, seed: int, found: Iterator[Conversation], times: Iterator[float]) -> Trace:
    header = Header(source=f"generated: {what}", notes=f"seed {seed}")
    return Trace(header, tuple(arrivals.arriving(found, times)))


__all__ = [
    "Lengths",
    "Step",
    "SweBench",
    "TraceError",
    "bursts",
    "paper",
    "saturating",
    "step_bursts",
]
