"""Turns that wait in the directory for a place, each for a bounded time.

Owners are served fairly, by the tokens that their turns compute, and the flows of one owner likewise
(`placement/fleet/fairness.py`). Within a flow the order is that of arrivals, less what a turn's class and
priority are worth in seconds: whatever waits for longer than that comes first, so that nobody waits for ever.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

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
    def head(self) -> QueueHead:
        return QueueHead(self.tokens, self.due)


class OwnerQueue:
    """The waiting turns of one owner, by flow."""

    def __init__(self) -> None:
        self.flows: dict[str, list[Waiter]] = {}
        self.rounds = Rounds()
        self.size = 0

    @property
    def first(self) -> Waiter:
        heads = {flow: waiters[0].head for flow, waiters in self.flows.items()}
        return self.flows[self.rounds.order(heads)[0]][0]


class Waiting:
    def __init__(self) -> None:
        self._owners: dict[str, OwnerQueue] = {}
        self._rounds = Rounds()
        self._of_turn: dict[tuple[str, int], Waiter] = {}
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

    def may_pass(self, ask: Ask, tokens: int, due: float) -> bool:
        """A turn that comes now goes before those that wait: what they need is not there, none of its owner
        is due before, and its owner has not had its share."""
        mine = self._owners.get(ask.owner)
        if mine is not None and any(waiters[0].due <= due for waiters in mine.flows.values()):
            return False
        return not self._size or tokens <= self._rounds.left(ask.owner)

    def passed(self, ask: Ask, tokens: int) -> None:
        if self._size:
            self._rounds.served(ask.owner, tokens)

    def add(self, waiter: Waiter) -> None:
        ask = waiter.ask
        mine = self._owners.setdefault(ask.owner, OwnerQueue())
        insort(mine.flows.setdefault(ask.flow, []), waiter, key=lambda one: one.due)
        mine.size += 1
        self._size += 1
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
        while len(blocked) < _MOST_PASSED_BY and (first := self._first(blocked)) is not None:
            outcome = attempt(first.ask)
            if isinstance(outcome, Refusal):
                first.refusal = outcome
                if outcome.retry_after_s > 0:
                    blocked.add(first.ask.owner)
                    continue
            else:
                placed += 1
                self._rounds.served(first.ask.owner, first.tokens)
                self._owners[first.ask.owner].rounds.served(first.ask.flow, first.tokens)
            self.remove(first)
            first.settle(outcome)
        for waiter in [waiter for waiter in self._of_turn.values() if waiter.deadline <= now]:
            self.remove(waiter)
            waiter.settle(waiter.refusal)
        return placed

    def _first(self, blocked: set[str]) -> Waiter | None:
        heads = {owner: queue.first for owner, queue in self._owners.items()}
        order = self._rounds.order({owner: first.head for owner, first in heads.items()})
        return next((heads[owner] for owner in order if owner not in blocked), None)
