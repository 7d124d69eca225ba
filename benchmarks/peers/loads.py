"""Traces that every contender plays: conversations of recorded agents, the paper's mix, and a burst."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.paper import workload
from benchmarks.paper.workload import PaperMix
from traces import generators
from traces.format import TraceConversation, load

SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "laptop.jsonl.gz"
COUNT, QUICK_COUNT = 24, 10
REAL_SHRINK, REAL_RATE = 2, 0.42  # of the laptop sample, which is the agents' lengths / 16
MIX_SHRINK, MIX_RATE = 8, 0.29
BURST = "steps:0.15*20,1.5*6"  # conversations/s for so many s: half of the mix's rate, then ten times that


@dataclass(frozen=True)
class Play:
    """A trace with a name."""

    name: str
    conversations: tuple[TraceConversation, ...]


def plays(trace: Path | None, quick: bool) -> list[Play]:
    """Return the given trace, or recorded coding agents, the paper's mix and a burst of it."""
    if trace is not None:
        given = load(trace).conversations
        return [Play(trace.stem.removesuffix(".jsonl"), given[:QUICK_COUNT] if quick else given)]
    count = QUICK_COUNT if quick else COUNT
    real = _shrunk(load(SAMPLE).conversations, REAL_SHRINK)
    mix = _shrunk(workload.conversations(PaperMix(conversations=count)), MIX_SHRINK)
    every = [
        Play("real", _arriving(real, f"poisson:{REAL_RATE}", count)),
        Play("paper's mix", _arriving(mix, f"poisson:{MIX_RATE}", count)),
        Play("burst", _arriving(mix, BURST, count)),
    ]
    return every[:1] if quick else every


def _shrunk(found: Sequence[TraceConversation], divisor: int) -> list[TraceConversation]:
    return list(generators.scale(found, generators.Scale(lengths=1 / divisor)))


def _arriving(found: Sequence[TraceConversation], arrivals: str, count: int) -> tuple[TraceConversation, ...]:
    alone = (replace(conversation, parent=None) for conversation in found)
    times = generators.parse(arrivals, generators.stream(0, f"peers {arrivals}"))
    return tuple(generators.arriving(alone, times))[:count]
