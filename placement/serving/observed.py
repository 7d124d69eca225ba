"""What a policy learns from the iterations it planned."""

import math

from placement.serving.state import Row


class Margin:
    """Share of a target kept free: what iterations take beyond their prediction, but for `beyond` of them."""

    def __init__(self, start: float, beyond: float, step: float = 0.02, most: float = 0.5) -> None:
        self.share = start
        self._step = step
        self._beyond = beyond
        self._most = most

    def see(self, predicted_s: float, seconds: float) -> None:
        over = seconds > predicted_s * (1 + self.share)
        self.share += self._step * ((1 - self._beyond) if over else -self._beyond)
        self.share = min(max(self.share, 0.0), self._most)


class ArrivalRate:
    """Online arrivals a second, forgetting over about half a minute."""

    def __init__(self, memory_s: float = 30.0) -> None:
        self._memory_s = memory_s
        self._seen: set[str] = set()
        self._at = 0.0
        self.rate = 0.0

    def see(self, now: float, waiting: tuple[Row, ...]) -> None:
        new = {row.key for row in waiting}
        self.settle(now)
        self.rate += len(new - self._seen) / self._memory_s
        self._seen = new

    def settle(self, now: float) -> None:
        if self._at:
            self.rate *= math.exp(-max(now - self._at, 0.0) / self._memory_s)
            if self.rate < 1e-6:
                self.rate = 0.0
        self._at = now
