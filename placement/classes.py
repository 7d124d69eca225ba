"""Order of turns of several classes that wait: the better go first, the others are never left out for long.

A class, or a priority, is worth so many seconds (`ahead_s`). Under an overload that lasts, every turn of a
lesser class has waited for longer than that at some time; if that alone put it first, the better class would
wait behind all of them. So it goes first only when no turn of its own class, or of a lesser one, was served
for as long: what the better class leaves is theirs anyway, and costs it nothing.
"""

from math import inf

LATELY_S = 60.0


class ClassOrder:
    """Of one queue: it remembers when turns of each class were last served."""

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

    def level(self, ahead_s: float, arrival: float, best_s: float, now: float) -> float:
        """What a turn is worth now, beside others of which the best is worth `best_s`: the most goes first,
        among equals whoever is due first. Infinity: it was left out for long enough."""
        longest_s = best_s - ahead_s
        if longest_s <= 0 or now - arrival <= longest_s:
            return ahead_s
        last = max((at for worth, at in self._served.items() if worth <= ahead_s), default=-inf)
        return inf if now - last > longest_s else ahead_s
