"""Conversations that wait for room: first come, first served, each for a bounded time."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from placement.admission import Refusal, RefusalReason
from router.identity.chain import End

LEFT = Refusal(RefusalReason.NO_ROOM, "whoever asked has left", 0.0)
BEHIND = Refusal(RefusalReason.NO_ROOM, "conversations that came earlier still wait for room", 1.0)
RESTARTED = Refusal(RefusalReason.NO_DECODER, "not all engines have reported since a restart; try again", 1.0)


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that needs a place: the first of a conversation, or a later one that may have to be moved
    through a prefiller (`uncached_tokens`), or one whose decoder was lost (`lost`)."""

    key: str
    gateway: str
    prompt_tokens: int
    wait_s: float
    parent: str | None = None
    uncached_tokens: int | None = None
    lost: tuple[str, int] | None = None  # engine and epoch that did not answer
    end: End | None = None  # of the prompt, recorded as the conversation's newest node
    turn: int = 0  # the gateway's number of it, by which its end is known
    again: bool = False  # an earlier call with this very ask got no answer
    alone: bool = False  # no other turn of it runs at this gateway; its reports may be on their way


@dataclass(frozen=True, slots=True)
class Placed:
    key: str
    engine: str
    epoch: int
    prefiller: str | None
    known: bool  # it was bound already
    cause: str
    note: dict[str, object]
    context_tokens: int


@dataclass(slots=True, eq=False)
class Waiter:
    ask: Ask
    deadline: float
    refusal: Refusal
    settle: Callable[["Placed | Refusal"], None] = field(repr=False)


class Waiting:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: OrderedDict[Waiter, None] = OrderedDict()
        self._of_turn: dict[tuple[str, int], Waiter] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        return len(self._queue) >= self._limit

    def add(self, waiter: Waiter) -> None:
        self._queue[waiter] = None
        self._of_turn[waiter.ask.gateway, waiter.ask.turn] = waiter

    def of_turn(self, gateway: str, turn: int) -> Waiter | None:
        return self._of_turn.get((gateway, turn))

    def remove(self, waiter: Waiter) -> None:
        self._queue.pop(waiter, None)
        if self._of_turn.get((waiter.ask.gateway, waiter.ask.turn)) is waiter:
            del self._of_turn[waiter.ask.gateway, waiter.ask.turn]

    def serve(self, now: float, attempt: Callable[[Ask], "Placed | Refusal"]) -> int:
        """Place from the front until one does not fit; refuse those whose time is over. Returns how many
        were placed. Later ones do not overtake: a large conversation would never get its place."""
        placed = 0
        while self._queue:
            first = next(iter(self._queue))
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
