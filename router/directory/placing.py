"""One call for places, the directory's side: each ask is answered as soon as it can be."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import TYPE_CHECKING

from placement.admission import Refusal
from router.directory.waiting import Ask, Placed, Waiter

if TYPE_CHECKING:
    from router.directory.server import DirectoryServer

Answer = tuple[int, Placed | Refusal]


class Placing:
    """Use it as a context: what has not been answered at its end must not stay reserved."""

    def __init__(self, server: "DirectoryServer", asks: Iterable[Ask]) -> None:
        self._server = server
        self._table = server.table
        self._asks = tuple(asks)
        self._open = set(range(len(self._asks)))
        self._waiters: dict[int, Waiter] = {}
        self._settled: list[Answer] = []
        self._some = asyncio.Event()

    def __enter__(self) -> "Placing":
        now = self._server.clock()
        for index, ask in enumerate(self._asks):
            settle = partial(self._settle, index)
            outcome = self._table.place(ask, now, settle)
            if isinstance(outcome, Waiter):
                self._waiters[index] = outcome
            else:
                settle(outcome)
        self._server.changed()
        return self

    async def answers(self) -> AsyncIterator[list[Answer]]:
        """In groups, as they are known; a placement leaves when it is in the journal."""
        while self._open:
            await self._some.wait()
            self._some.clear()
            ready = list(self._settled)
            placed = [(self._asks[index], outcome) for index, outcome in ready if isinstance(outcome, Placed)]
            if placed:
                await self._server.durable()
            for ask, outcome in placed:
                moved = outcome.prefiller is not None
                self._server.lanes.turn_started(ask.key, outcome.engine, moved, self._server.clock())
            self._settled = self._settled[len(ready) :]
            self._open.difference_update(index for index, _ in ready)
            yield ready

    def __exit__(self, *_: object) -> None:
        if not self._open:
            return
        for index, outcome in self._settled:
            if isinstance(outcome, Placed):
                self._table.unused(outcome, self._asks[index], self._server.clock())
        for waiter in self._waiters.values():
            self._table.give_up(waiter)
        self._server.changed()

    def _settle(self, index: int, outcome: Placed | Refusal) -> None:
        self._waiters.pop(index, None)
        self._settled.append((index, outcome))
        self._some.set()
