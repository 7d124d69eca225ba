"""Turns that wait in the directory for a place, each for a bounded time.

The order is that of their arrivals, less what their class and priority are worth in seconds: whatever waits
for longer than that comes first, so that nobody waits for ever.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from placement.fleet.answers import Refusal
from router.directory.messages import Ask, Placed

MAX_WAITING = 4096


@dataclass(slots=True, eq=False)
class Waiter:
    ask: Ask
    due: float
    deadline: float
    refusal: Refusal
    settle: Callable[[Placed | Refusal], None] = field(repr=False)


class Waiting:
    def __init__(self) -> None:
        self._queue: list[Waiter] = []
        self._of_turn: dict[tuple[str, int], Waiter] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        return len(self._queue) >= MAX_WAITING

    def any_before(self, due: float) -> bool:
        return bool(self._queue) and self._queue[0].due <= due

    def add(self, waiter: Waiter) -> None:
        insort(self._queue, waiter, key=lambda one: one.due)
        self._of_turn[waiter.ask.gateway, waiter.ask.turn] = waiter

    def of_turn(self, gateway: str, turn: int) -> Waiter | None:
        return self._of_turn.get((gateway, turn))

    def remove(self, waiter: Waiter) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
        if self._of_turn.get((waiter.ask.gateway, waiter.ask.turn)) is waiter:
            del self._of_turn[waiter.ask.gateway, waiter.ask.turn]

    def serve(self, now: float, attempt: Callable[[Ask], Placed | Refusal]) -> int:
        """Place from the front until one does not fit; refuse those whose time is over. Returns how many
        were placed. Later ones do not overtake: a large conversation would never get its place."""
        placed = 0
        while self._queue:
            first = self._queue[0]
            outcome = attempt(first.ask)
            if isinstance(outcome, Refusal):
                first.refusal = outcome
                if outcome.retry_after_s > 0:
                    break
            else:
                placed += 1
            self.remove(first)
            first.settle(outcome)
        for waiter in [waiter for waiter in self._queue if waiter.deadline <= now]:
            self.remove(waiter)
            waiter.settle(waiter.refusal)
        return placed
