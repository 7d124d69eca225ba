"""Time: the next thing that happens, and nothing else."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventQueue:
    """Events at one instant happen in the order in which they were scheduled, so that runs repeat exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        self._scheduled += 1
        heappush(self._heap, (time, self._scheduled, action, argument))

    def run(self, until: float = float("inf")) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action, argument = heappop(heap)
            self.handled += 1
            action(argument)
