"""Traces that every contender plays at given rates: recorded agents, the paper's mix, and bursts of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.paper import workload
from benchmarks.paper.workload import PaperMix
from traces import generators
from traces.format import TraceConversation, load

SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "laptop.jsonl.gz"
COUNT, QUICK_COUNT = 24, 10
REAL_SHRINK = 2  # divisor of the laptop sample's lengths, which are the agents' lengths / 16
MIX_SHRINK = 8
# Seconds at a low rate and at ten times that rate, which alternate.
LOW_S, HIGH_S, HIGH = 20.0, 6.0, 10.0
REAL, MIX, BURST = NAMES = ("real", "mix", "burst")


@dataclass(frozen=True)
class Play:
    """One trace whose conversations arrive at a share of the measured capacity."""

    trace: str
    load: float
    conversations: tuple[TraceConversation, ...]

    @property
    def name(self) -> str:
        return f"{self.trace} at {self.load:g}"


@dataclass(frozen=True)
class PeerTrace:
    """Named conversations, which contenders play at several rates of arrival."""

    name: str
    conversations: tuple[TraceConversation, ...]

    def at(self, load: float, capacity: float) -> Play:
        """Return the trace with arrivals at the share `load` of `capacity` conversations per second."""
        rate = load * capacity
        arrivals = f"poisson:{rate}"
        if self.name == BURST:
            low = rate * (LOW_S + HIGH_S) / (LOW_S + HIGH * HIGH_S)
            arrivals = f"steps:{low}*{LOW_S},{HIGH * low}*{HIGH_S}"
        times = generators.parse(arrivals, generators.stream(0, f"peers {self.name}"))
        return Play(self.name, load, tuple(generators.arriving(self.conversations, times)))

    def at_once(self) -> tuple[TraceConversation, ...]:
        """Return the conversations with all arrivals at 0 and no waits, so that they use all capacity."""
        return tuple(
            replace(one, arrival_s=0.0, turns=tuple(replace(turn, wait_s=0.0) for turn in one.turns))
            for one in self.conversations
        )


def traces(names: Sequence[str], quick: bool) -> list[PeerTrace]:
    """Return the traces with these names; a name that is not in `NAMES` is the path of a trace file."""
    count = QUICK_COUNT if quick else COUNT
    return [PeerTrace(Path(name).name.partition(".")[0], _conversations(name, count)) for name in names]


def _conversations(name: str, count: int) -> tuple[TraceConversation, ...]:
    if name == REAL:
        found = _shrunk(load(SAMPLE).conversations, REAL_SHRINK)
    elif name in (MIX, BURST):
        found = _shrunk(workload.conversations(PaperMix(conversations=count)), MIX_SHRINK)
    else:
        found = list(load(Path(name)).conversations)
    return tuple(replace(conversation, parent=None) for conversation in found[:count])


def _shrunk(found: Sequence[TraceConversation], divisor: int) -> list[TraceConversation]:
    return list(generators.scale(found, generators.Scale(lengths=1 / divisor)))
