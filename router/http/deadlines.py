"""Time-outs without a timer per message: one periodic check over everything that is open.

A check looks at a flag that traffic sets, so that the byte path never reads a clock. A deadline is met up to
one interval late.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Watched(Protocol):
    def check(self, now: float) -> None:
        """Act on what is overdue at ``now`` (the loop's clock)."""


class Sweeper:
    def __init__(self, loop: asyncio.AbstractEventLoop, shortest_timeout_s: float) -> None:
        self._loop = loop
        self._interval = min(1.0, max(0.01, shortest_timeout_s / 4))
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Watched) -> None:
        self._watched.add(item)
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval, self._sweep)

    def discard(self, item: Watched) -> None:
        self._watched.discard(item)

    def _sweep(self) -> None:
        now = self._loop.time()
        for item in tuple(self._watched):
            item.check(now)
        rearm = bool(self._watched)
        self._timer = self._loop.call_later(self._interval, self._sweep) if rearm else None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watched.clear()
