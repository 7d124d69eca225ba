"""Fair order among names (owners, or flows of one owner): deficit round robin over tokens, by rounds.

In a round each name may be served a quantum of tokens; what it does not use up, because its next turn is
larger, it keeps for the next. A new round begins when nobody who waits has enough left. Within a round the
better class comes first, and of one class the earliest due: a class or priority is worth something among
names, but never more than a share.

While two names wait, neither is served more tokens than the other by more than a quantum and two turns of the
largest size. Who leaves and comes back within a round has what it had left: coming back often earns nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

QUANTUM = 8192


@dataclass(frozen=True, slots=True)
class QueueHead:
    """The turn of a name that would be served next."""

    tokens: int
    due: float
    level: float = 0.0  # of its class (`placement/classes.py`)

    @property
    def rank(self) -> tuple[float, float]:
        return -self.level, self.due


class Rounds:
    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._left: dict[str, int] = {}  # of this round; a name that is not here has all of it

    def left(self, name: str) -> int:
        return self._left.get(name, self._quantum)

    def order(self, heads: Mapping[str, QueueHead]) -> list[str]:
        """Who may be served now, in their order; a new round where nobody might."""
        if not heads:
            self._left.clear()
            return []
        may = [name for name, head in heads.items() if head.tokens <= self.left(name)]
        if not may:
            missing = (head.tokens - self.left(name) for name, head in heads.items())
            more = ceil(min(missing) / self._quantum) * self._quantum
            self._left = {name: self.left(name) + more for name in heads}
            may = [name for name, head in heads.items() if head.tokens <= self.left(name)]
        return sorted(may, key=lambda name: heads[name].rank)

    def served(self, name: str, tokens: int) -> None:
        self._left[name] = self.left(name) - tokens
