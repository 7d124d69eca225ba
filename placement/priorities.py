"""Order of turns that wait: better classes go first, and names (owners, or flows of one owner) in rounds.

Of several classes the better go first, and the others are never left out for long.
A class, or a priority, is worth so many seconds (`ahead_s`). Under an overload that lasts, every turn of a
lesser class has waited for longer than that at some time; if that alone put it first, the better class would
wait behind all of them. So it goes first only when no turn of its own class, or of a lesser one, was served
for as long: what the better class leaves is theirs anyway, and costs it nothing.

Among names the order is fair: deficit round robin over tokens, by rounds. In a round each name may be served
a quantum of tokens; what it does not use up, because its next turn is larger, it keeps for the next. A new
round begins when nobody who waits has enough left. Within a round the better class comes first, and of one
class the earliest due: a class or priority is worth something among names, but never more than a share.

While two names wait, neither is served more tokens than the other by more than a quantum and two turns of the
largest size. Who leaves and comes back within a round has what it had left: coming back often earns nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

LATELY_S = 60.0
QUANTUM = 8192  # tokens of a round


class ClassOrder:
    """The order of classes in one queue: it remembers when turns of each class were last served."""

    def __init__(self) -> None:
        self._served: dict[float, float] = {}  # by what the class is worth
        self._shared_at = -inf
        self._best, self._best_at = -inf, -inf

    def served(self, ahead_s: float, now: float) -> None:
        self._served[ahead_s] = now

    def shared(self, now: float) -> None:
        """Lesser ones had their share of what a better class computes in."""
        self._shared_at = now

    def left_out_s(self, now: float) -> float:
        """Since then."""
        return now - self._shared_at

    def best_of_late(self, best_s: float, now: float) -> float:
        """The most that turns here were worth within a minute; `best_s`: of those that are here."""
        if best_s >= self._best or now - self._best_at > LATELY_S:
            self._best, self._best_at = best_s, now
        return self._best

    @property
    def best_s(self) -> float:
        """The most that turns here were worth when the latest were looked at."""
        return self._best

    def level(self, ahead_s: float, arrival: float, best_s: float, now: float) -> float:
        """What a turn is worth now, beside others of which the best is worth `best_s`: the most goes first,
        among equals whoever is due first. Infinity: it was left out for long enough."""
        longest_s = best_s - ahead_s
        if longest_s <= 0 or now - arrival <= longest_s:
            return ahead_s
        last = max((at for worth, at in self._served.items() if worth <= ahead_s), default=-inf)
        return inf if now - last > longest_s else ahead_s


@dataclass(frozen=True, slots=True)
class QueueHead:
    """The turn of a name that would be served next."""

    tokens: int
    due: float
    level: float = 0.0  # of its class, as `ClassOrder.level` says

    @property
    def rank(self) -> tuple[float, float]:
        return -self.level, self.due


class Rounds:
    """Deficit round robin over tokens: which of the names that wait (owners, or flows of one owner) may be
    served now, and in which order."""

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
