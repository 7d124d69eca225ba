"""Queues the turns that wait in the directory for placement, each for a limited time.

Owners get fair shares of the tokens that turns compute. So do the flows of one owner: groups of turns that
its clients name in a header. Among owners, turns of a better class come first. Within an owner, the clients'
priorities count as well. `placement/priorities.py` limits how long a turn with less weight is passed over.
Turns of equal weight go in order of arrival.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from placement.priorities import ClassOrder, FairRounds, QueueHead
from placement.routing.receipts import Refusal, RefusalReason
from router.directory.api.messages import Ask, Placed

MAX_WAITING = 4096
FLOWS = 64  # flows of one owner with a queue of their own; clients can invent any number of flows
_MOST_PASSED_BY = 16  # owners whose next turn does not fit, after which `serve` stops


@dataclass(slots=True, eq=False)
class Waiter:
    ask: Ask
    tokens: int  # estimate of the tokens that the turn computes
    due: float
    deadline: float
    refusal: Refusal
    settle: Callable[[Placed | Refusal], None] = field(repr=False)

    @property
    def place(self) -> tuple[float, float, float]:
        """Return the sort key by which the waiting turns of one flow are ordered."""
        return -self.ask.owner_weight, -self.ask.queue_weight, self.due

    @property
    def arrival(self) -> float:
        return self.due + self.ask.queue_weight


class Flow:
    """Queue of one flow's waiting turns. Of an owner with more than `FLOWS` flows, some share a queue."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.classes = ClassOrder()

    def first(self, now: float, coming_s: float = -inf) -> tuple[Waiter, float]:
        """Return the flow's next turn, and the weight with which it competes with other flows.

        A turn that was passed over for long is next. It competes with the highest weight of the flow's turns,
        including `coming_s`, the weight of a turn that arrives now.
        """
        best_s = max(coming_s, self.waiters[0].ask.owner_weight)
        levels = (
            (self.classes.level(one.ask.owner_weight, one.arrival, best_s, now), one)
            for one in _first_of_each_weight(self.waiters)
        )
        level, first = min(levels, key=lambda pair: (-pair[0], pair[1].due))
        return first, min(level, best_s)

    def class_of(self, first: Waiter, counts_s: float) -> float:
        """Return the class weight with which `first`, the flow's next turn, competes among owners."""
        if counts_s <= first.ask.owner_weight:
            return first.ask.queue_weight
        return max(one.ask.queue_weight for one in _first_of_each_weight(self.waiters))


class OwnerQueue:
    """Waiting turns of one owner, grouped by flow."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}  # by the number of the queue that `lane` returns
        self.rounds = FairRounds()
        self.classes = ClassOrder()
        self.size = 0
        self._lanes: dict[str, str] = {}  # queue of each waiting flow
        self._waiting = Counter[str]()  # waiting turns of each flow

    def lane(self, flow: str) -> str:
        """Return the number of a flow's queue, one of `FLOWS`. Flows share a queue only if none is free.

        A flow that returns gets the same queue if possible, because the queue remembers what the flow has
        used of a round.
        """
        if (lane := self._lanes.get(flow)) is not None:
            return lane
        home = hash(flow) % FLOWS
        free = (lane for at in range(FLOWS) if (lane := str((home + at) % FLOWS)) not in self.flows)
        return next(free, str(home))

    def add(self, waiter: Waiter) -> None:
        flow = waiter.ask.flow
        lane = self._lanes[flow] = self.lane(flow)
        insort(self.flows.setdefault(lane, Flow()).waiters, waiter, key=lambda one: one.place)
        self._waiting[flow] += 1
        self.size += 1

    def remove(self, waiter: Waiter) -> bool:
        """Remove a waiting turn; return False if it does not wait here."""
        flow = waiter.ask.flow
        lane = self._lanes.get(flow, "")
        waiters = self.flows[lane].waiters if lane else []
        if waiter not in waiters:
            return False
        waiters.remove(waiter)
        self.size -= 1
        self._waiting[flow] -= 1
        if not self._waiting[flow]:
            del self._waiting[flow], self._lanes[flow]
        if not waiters:
            del self.flows[lane]
        return True

    def served(self, ask: Ask, tokens: int, now: float) -> None:
        """Charge a served turn to its flow and class."""
        lane = self.lane(ask.flow)
        self.rounds.served(lane, tokens)
        self.classes.served(ask.owner_weight, now)
        if lane in self.flows:
            self.flows[lane].classes.served(ask.owner_weight, now)

    def may_pass(self, ask: Ask, tokens: int, due: float, now: float) -> bool:
        """Return whether an arriving turn goes before all turns that wait here.

        It does if its flow has enough left of its share, and if it weighs more than each waiting turn or is
        due sooner.
        """
        own = self.lane(ask.flow)
        if not self.flows.keys() <= {own} and tokens > self.rounds.left(own):
            return False
        best_s = max(ask.owner_weight, self._best_s())
        for lane, flow in self.flows.items():
            first = flow.first(now, ask.owner_weight if lane == own else -inf)
            if self._head(*first, best_s, now).rank <= (-ask.owner_weight, due):
                return False
        return True

    def first(self, now: float) -> tuple[Waiter, float]:
        """Return the owner's next turn, and the weight with which it competes with other owners' turns."""
        best_s = self._best_s()
        firsts = {lane: flow.first(now) for lane, flow in self.flows.items()}
        heads = {lane: self._head(*first, best_s, now) for lane, first in firsts.items()}
        lane = self.rounds.order(heads)[0]
        return firsts[lane][0], self.flows[lane].class_of(*firsts[lane])

    def _best_s(self) -> float:
        return max(flow.waiters[0].ask.owner_weight for flow in self.flows.values())

    def _head(self, waiter: Waiter, counts_s: float, best_s: float, now: float) -> QueueHead:
        """Describe `waiter`, the next turn of its flow, for the comparison with other flows."""
        level = self.classes.level(waiter.ask.owner_weight, waiter.arrival, best_s, now)
        return QueueHead(waiter.tokens, waiter.due, max(level, counts_s))


def _first_of_each_weight(waiters: list[Waiter]) -> Iterator[Waiter]:
    at = 0
    while at < len(waiters):
        yield waiters[at]
        at = bisect_right(waiters, -waiters[at].ask.owner_weight, lo=at, key=lambda one: one.place[0])


class Waiting:
    def __init__(self) -> None:
        self._owners: dict[str, OwnerQueue] = {}
        self._rounds = FairRounds()
        self._of_turn: dict[tuple[str, int], Waiter] = {}
        self._classes = ClassOrder()
        self._weights = Counter[float]()  # queue weights of all waiting turns
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def refused_tokens(self) -> list[int]:
        """Return the prompt tokens of each waiting turn that fits on no decoder."""
        refused = (w for w in self._of_turn.values() if w.refusal.reason is RefusalReason.NO_CAPACITY)
        return [waiter.ask.prompt_tokens for waiter in refused]

    def full_for(self, ask: Ask) -> bool:
        mine = self._owners.get(ask.owner)
        share = max(1, int(ask.waiting_share * MAX_WAITING))
        return self._size >= MAX_WAITING or (mine is not None and mine.size >= share)

    def may_pass(self, ask: Ask, tokens: int, due: float, now: float) -> bool:
        """Return whether an arriving turn goes before all waiting turns.

        It does if it goes before its owner's other turns, and if its owner has enough left of its share.
        """
        mine = self._owners.get(ask.owner)
        if mine is not None and not mine.may_pass(ask, tokens, due, now):
            return False
        alone = not self._size or (mine is not None and mine.size == self._size)
        return alone or tokens <= self._rounds.left(ask.owner)

    def served(self, ask: Ask, tokens: int, now: float) -> None:
        """Charge a served turn to its class, owner and flow; call it before the waiter is removed."""
        self._classes.served(ask.queue_weight, now)
        if self._size:
            self._rounds.served(ask.owner, tokens)
        if (mine := self._owners.get(ask.owner)) is not None:
            mine.served(ask, tokens, now)

    def add(self, waiter: Waiter) -> None:
        ask = waiter.ask
        self._owners.setdefault(ask.owner, OwnerQueue()).add(waiter)
        self._size += 1
        self._weights[ask.queue_weight] += 1
        self._of_turn[ask.gateway, ask.turn] = waiter

    def of_turn(self, gateway: str, turn: int) -> Waiter | None:
        return self._of_turn.get((gateway, turn))

    def remove(self, waiter: Waiter) -> None:
        ask = waiter.ask
        mine = self._owners.get(ask.owner)
        if mine is not None and mine.remove(waiter):
            self._size -= 1
            self._weights[ask.queue_weight] -= 1
            if not self._weights[ask.queue_weight]:
                del self._weights[ask.queue_weight]
            if not mine.size:
                del self._owners[ask.owner]
        if self._of_turn.get((ask.gateway, ask.turn)) is waiter:
            del self._of_turn[ask.gateway, ask.turn]

    def serve(self, now: float, attempt: Callable[[Ask], Placed | Refusal]) -> int:
        """Place waiting turns until none fits, refuse those whose time is over, and return the number placed.

        While an owner's next turn does not fit, its other turns wait too. Other owners' turns pass only while
        they have a share of the round left, so that a large conversation gets its place.
        """
        placed, blocked = 0, set[str]()
        while len(blocked) < _MOST_PASSED_BY and (first := self._first(blocked, now)) is not None:
            outcome = attempt(first.ask)
            if isinstance(outcome, Refusal):
                first.refusal = outcome
                if outcome.retry_after_s > 0:
                    blocked.add(first.ask.owner)
                    continue
            else:
                placed += 1
                self.served(first.ask, first.tokens, now)
            self.remove(first)
            first.settle(outcome)
        for waiter in [waiter for waiter in self._of_turn.values() if waiter.deadline <= now]:
            self.remove(waiter)
            waiter.settle(waiter.refusal)
        return placed

    def _first(self, blocked: set[str], now: float) -> Waiter | None:
        best_s = max(self._weights, default=0.0)
        firsts = {owner: self._first_of(queue, best_s, now) for owner, queue in self._owners.items()}
        order = self._rounds.order({owner: head for owner, (head, _) in firsts.items()})
        return next((firsts[owner][1] for owner in order if owner not in blocked), None)

    def _first_of(self, queue: OwnerQueue, best_s: float, now: float) -> tuple[QueueHead, Waiter]:
        first, class_s = queue.first(now)
        level = self._classes.level(first.ask.queue_weight, first.arrival, best_s, now)
        return QueueHead(first.tokens, first.due, max(level, class_s)), first
