"""Traces that every contender plays: conversations of real agents, the paper's mix, and a burst."""

from collections.abc import Iterable
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
    """A trace with a name, and a sentence about it."""

    name: str
    about: str
    conversations: tuple[TraceConversation, ...]


def plays(trace: Path | None, quick: bool) -> list[Play]:
    """Return all three traces, or the one that is given."""
    if trace is not None:
        given = load(trace).conversations
        found = tuple(given[:QUICK_COUNT] if quick else given)
        return [Play(trace.stem.removesuffix(".jsonl"), f"{trace.name} as it is", found)]
    count = QUICK_COUNT if quick else COUNT
    mixed = workload.conversations(PaperMix(conversations=count))
    real = list(generators.scale(load(SAMPLE).conversations, generators.Scale(lengths=1 / REAL_SHRINK)))
    mix = list(generators.scale(mixed, generators.Scale(lengths=1 / MIX_SHRINK)))
    described = (
        (
            "real",
            f"{count} conversations of real coding agents (the shipped sample, lengths / {16 * REAL_SHRINK}) "
            f"at {REAL_RATE}/s",
            *(real, f"poisson:{REAL_RATE}"),
        ),
        (
            "paper's mix",
            f"{count} conversations of the paper's mix, lengths / {MIX_SHRINK}, {MIX_RATE}/s",
            *(mix, f"poisson:{MIX_RATE}"),
        ),
        ("burst", "the same, at 0.15/s for 20 s and 1.5/s for 6 s, in turns", mix, BURST),
    )
    every = [
        Play(name, about, _arriving(found, arrivals, count)) for name, about, found, arrivals in described
    ]
    return every[:1] if quick else every


def _arriving(found: Iterable[TraceConversation], arrivals: str, count: int) -> tuple[TraceConversation, ...]:
    alone = (replace(conversation, parent=None) for conversation in found)
    times = generators.parse(arrivals, generators.stream(0, f"peers {arrivals}"))
    return tuple(generators.arriving(alone, times))[:count]
