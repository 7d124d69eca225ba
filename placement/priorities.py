"""Order of waiting turns: higher classes first, and fair shares of tokens among owners and their flows.

A class or priority has a queue weight in seconds. A turn with a higher weight goes first, but a lower class
is never left out for long. Under a lasting overload every turn of the lower class has waited for longer than
the difference of the weights at some time. If that alone put it first, the higher class would wait behind all
of them. So it goes first only when no turn of its class, or of a lower one, was served for as long. What the
higher class leaves belongs to the lower class anyway, and costs the higher class nothing.

Among names (owners, or flows) the order is deficit round robin over tokens. In a round each name may be
served a quantum of tokens; what it does not use, because its next turn is larger, it keeps for the next
round. A new round begins when no waiting name has enough left. Within a round the higher class comes first,
and in a class the earliest due. So a class counts among names, but never for more than a share.

While two names wait, neither is served more tokens than the other by more than a quantum and two turns of the
largest size. A name that leaves and comes back within a round has what it had left, so that returning often
gains nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

QUANTUM = 8192  # tokens of a round


class ClassOrder:
    """Order of classes in one queue; it remembers when turns of each class were last served."""

    def __init__(self) -> None:
        self._served: dict[float, float] = {}  # queue weight -> when

    def served(self, queue_weight: float, now: float) -> None:
        self._served[queue_weight] = now

    def level(self, queue_weight: float, arrival: float, highest_weight: float, now: float) -> float:
        """Return the level of a turn among others whose highest weight is `highest_weight`.

        The turn with the highest level goes first; among equal levels, the turn that is due first. The level
        is the turn's weight, or infinity once the turn and its class were left out for long enough.
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
    """Deficit round robin over tokens: decides which waiting names may be served now, and in which order."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._left: dict[str, int] = {}  # of this round; a name without an entry has all of it

    def left(self, name: str) -> int:
        return self._left.get(name, self._quantum)

    def order(self, heads: Mapping[str, QueueHead]) -> list[str]:
        """Return the names that may be served now, in order; start a new round if there are none."""
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
