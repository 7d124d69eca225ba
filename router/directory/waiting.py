"""Turns that wait in the directory for a place, each for a bounded time.

Owners are served fairly, by the tokens that their turns compute, and the flows of one owner likewise
(`placement/fleet/fairness.py`). Within a flow turns of a better class or priority come first, but no class is
left out for longer than the other is worth (`placement/classes.py`); those of one class in order of arrival.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from placement.classes import ClassOrder
from placement.fleet.answers import Refusal, RefusalReason
from placement.fleet.fairness import QueueHead, Rounds
from router.directory.messages import Ask, Placed

MAX_WAITING = 4096
_MOST_PASSED_BY = 16  # owners whose turn does not fit, in one look at the queue


@dataclass(slots=True, eq=False)
class Waiter:
    ask: Ask
    tokens: int  # that it computes, by estimate
    due: float
    deadline: float
    refusal: Refusal
    settle: Callable[[Placed | Refusal], None] = field(repr=False)

    @property
    def place(self) -> tuple[float, float]:
        """In its flow."""
        return -self.ask.ahead_s, self.due


class OwnerQueue:
    """The waiting turns of one owner, by flow."""

    def __init__(self) -> None:
        self.flows: dict[str, list[Waiter]] = {}
        self.rounds = Rounds()
        self.size = 0

    def firsts(self, rank: Callable[[Waiter], QueueHead]) -> dict[str, tuple[QueueHead, Waiter]]:
        """Of each flow."""
        return {
            flow: min(
                ((rank(one), one) for one in _first_of_each_class(waiters)), key=lambda pair: pair[0].rank
            )
            for flow, waiters in self.flows.items()
        }

    def first(self, rank: Callable[[Waiter], QueueHead]) -> tuple[QueueHead, Waiter]:
        firsts = self.firsts(rank)
        return firsts[self.rounds.order({flow: head for flow, (head, _) in firsts.items()})[0]]


def _first_of_each_class(waiters: list[Waiter]) -> Iterator[Waiter]:
    at = 0
    while at < len(waiters):
        yield waiters[at]
        at = bisect_right(waiters, -waiters[at].ask.ahead_s, lo=at, key=lambda one: one.place[0])


class Waiting:
    def __init__(self) -> None:
        self._owners: dict[str, OwnerQueue] = {}
        self._rounds = Rounds()
        self._of_turn: dict[tuple[str, int], Waiter] = {}
        self._classes = ClassOrder()
        self._worths = Counter[float]()  # of those that wait, how many have a class worth so much
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def refused_tokens(self) -> list[int]:
        """Of each prompt that fits on no decoder."""
        refused = (w for w in self._of_turn.values() if w.refusal.reason is RefusalReason.NO_CAPACITY)
        return [waiter.ask.prompt_tokens for waiter in refused]

    def full_for(self, ask: Ask) -> bool:
        mine = self._owners.get(ask.owner)
        share = max(1, int(ask.waiting_share * MAX_WAITING))
        return self._size >= MAX_WAITING or (mine is not None and mine.size >= share)

    def may_pass(self, ask: Ask, tokens: int, due: float, now: float) -> bool:
        """A turn that comes now goes before those that wait: what they need is not there, none of its owner
        goes before it, and its owner has not had its share of what others wait for."""
        mine = self._owners.get(ask.owner)
        if mine is not None:
            best_s = max(ask.ahead_s, *self._worths)
            firsts = mine.firsts(lambda one: self._head(one, best_s, now)).values()
            if any(head.rank <= (-ask.ahead_s, due) for head, _ in firsts):
                return False
        alone = not self._size or (mine is not None and mine.size == self._size)
        return alone or tokens <= self._rounds.left(ask.owner)

    def passed(self, ask: Ask, tokens: int, now: float) -> None:
        self._classes.served(ask.ahead_s, now)
        if self._size:
            self._rounds.served(ask.owner, tokens)

    def _head(self, waiter: Waiter, best_s: float, now: float) -> QueueHead:
        ahead_s = waiter.ask.ahead_s
        level = self._classes.level(ahead_s, waiter.due + ahead_s, best_s, now)
        return QueueHead(waiter.tokens, waiter.due, level)

    def add(self, waiter: Waiter) -> None:
        ask = waiter.ask
        mine = self._owners.setdefault(ask.owner, OwnerQueue())
        insort(mine.flows.setdefault(ask.flow, []), waiter, key=lambda one: one.place)
        mine.size += 1
        self._size += 1
        self._worths[ask.ahead_s] += 1
        self._of_turn[ask.gateway, ask.turn] = waiter

    def of_turn(self, gateway: str, turn: int) -> Waiter | None:
        return self._of_turn.get((gateway, turn))

    def remove(self, waiter: Waiter) -> None:
        ask = waiter.ask
        mine = self._owners.get(ask.owner)
        waiters = mine.flows.get(ask.flow, []) if mine is not None else []
        if mine is not None and waiter in waiters:
            waiters.remove(waiter)
            mine.size -= 1
            self._size -= 1
            self._worths[ask.ahead_s] -= 1
            if not self._worths[ask.ahead_s]:
                del self._worths[ask.ahead_s]
            if not waiters:
                del mine.flows[ask.flow]
            if not mine.size:
                del self._owners[ask.owner]
        if self._of_turn.get((ask.gateway, ask.turn)) is waiter:
            del self._of_turn[ask.gateway, ask.turn]

    def serve(self, now: float, attempt: Callable[[Ask], Placed | Refusal]) -> int:
        """Place who is next until none fits; refuse those whose time is over. Returns how many were placed.

        Behind a turn that does not fit, those of its owner wait, and others' pass it while they have
        something left of the round: so a large conversation gets its place."""
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
                self._classes.served(first.ask.ahead_s, now)
                self._rounds.served(first.ask.owner, first.tokens)
                self._owners[first.ask.owner].rounds.served(first.ask.flow, first.tokens)
            self.remove(first)
            first.settle(outcome)
        for waiter in [waiter for waiter in self._of_turn.values() if waiter.deadline <= now]:
            self.remove(waiter)
            waiter.settle(waiter.refusal)
        return placed

    def _first(self, blocked: set[str], now: float) -> Waiter | None:
        best_s = max(self._worths, default=0.0)
        firsts = {
            owner: queue.first(lambda one: self._head(one, best_s, now))
            for owner, queue in self._owners.items()
        }
        order = self._rounds.order({owner: head for owner, (head, _) in firsts.items()})
        return next((firsts[owner][1] for owner in order if owner not in blocked), None)
