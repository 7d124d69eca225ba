"""Order of waiting turns: higher classes first, and fair shares of tokens among owners and their flows.

A turn's class and priority give it a queue weight in seconds (here, a class is all turns of one weight). The
turn with the highest weight goes first, but no class starves. A turn of a lower class goes first once two
things have lasted for longer than the difference between the highest weight and its own: it has waited, and
no turn of its class or a lower one was served. The wait alone is not enough: in a lasting overload every turn
of the lower class waits that long, and the higher class would then wait behind all of them.

Names (owners, or the flows of an owner) take turns by deficit round robin over tokens. In each round a name
may be served a quantum of tokens. What it does not use, because its next turn is larger, is kept for the
next round. A new round begins when no waiting name has enough left for its next turn. Within a round the
higher class comes first, and within a class the turn that is due first. So a class decides the order of the
names, but does not increase a name's share.

While two names wait, the tokens that they are served differ by at most a quantum and two turns of the largest
size. A name that leaves and returns within a round has what it had left, so leaving gains nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

QUANTUM = 8192  # tokens of a round


class ClassOrder:
    """Rank of turns in one queue by class; it remembers when a turn of each class was last served."""

    def __init__(self) -> None:
        self._served: dict[float, float] = {}  # queue weight -> time of the last served turn

    def served(self, queue_weight: float, now: float) -> None:
        self._served[queue_weight] = now

    def level(self, queue_weight: float, arrival: float, highest_weight: float, now: float) -> float:
        """Return the level of a turn in a queue whose highest queue weight is `highest_weight`.

        The turn with the highest level goes first; among equal levels, the turn that is due first. The level
        is the turn's `queue_weight`, or infinity once the turn and its class were left out for long enough.
        """
        longest_s = highest_weight - queue_weight
        if longest_s <= 0 or now - arrival <= longest_s:
            return queue_weight
        last = max((at for weight, at in self._served.items() if weight <= queue_weight), default=-inf)
        return inf if now - last > longest_s else queue_weight


@dataclass(frozen=True, slots=True)
class QueueHead:
    """Turn at the head of one name's queue (an owner or a flow)."""

    tokens: int
    due: float
    level: float = 0.0  # value of `ClassOrder.level`

    @property
    def rank(self) -> tuple[float, float]:
        return -self.level, self.due


class FairRounds:
    """Deficit round robin that decides which waiting names may be served now, and in which order."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._left: dict[str, int] = {}  # tokens of this round; a name without an entry has the whole quantum

    def left(self, name: str) -> int:
        return self._left.get(name, self._quantum)

    def order(self, heads: Mapping[str, QueueHead]) -> list[str]:
        """Return the names that may be served now, in order; if there are none, start a new round first."""
        if not heads:
            self._left.clear()
            return []
        allowed = [name for name, head in heads.items() if head.tokens <= self.left(name)]
        if not allowed:
            missing = (head.tokens - self.left(name) for name, head in heads.items())
            more = ceil(min(missing) / self._quantum) * self._quantum
            self._left = {name: self.left(name) + more for name in heads}
            allowed = [name for name, head in heads.items() if head.tokens <= self.left(name)]
        return sorted(allowed, key=lambda name: heads[name].rank)

    def served(self, name: str, tokens: int) -> None:
        self._left[name] = self.left(name) - tokens
