"""Kept-alive connections to engines, bounded for each endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from router.errors import EngineBusy, EngineUnreachable
from router.http.limits import Sweeper, UpstreamLimits
from router.http.stream import pump_of
from router.http.upstream import Endpoint, UpstreamConnection

log = logging.getLogger("conserve.router.http.pool")


@dataclass(slots=True)
class PoolStats:
    """Running counts, for metrics and tests."""

    connections: int = 0
    connected: int = 0
    stale_retries: int = 0
    connect_failures: int = 0
    acquire_timeouts: int = 0


@dataclass(slots=True)
class _Places:
    """One endpoint's connections: ``open`` counts idle, busy and connecting ones."""

    open: int = 0
    idle: list[UpstreamConnection] = field(default_factory=list)
    waiters: deque[asyncio.Future[UpstreamConnection | None]] = field(default_factory=deque)


class UpstreamPool:
    def __init__(self, limits: UpstreamLimits | None = None, key: str = "") -> None:
        """`key`: shown to engines with every request."""
        self.limits = limits or UpstreamLimits()
        self._key = key
        self.stats = PoolStats()
        self.loop = asyncio.get_running_loop()
        self._places: dict[Endpoint, _Places] = {}
        self._all: set[UpstreamConnection] = set()
        self.pump = pump_of(self.loop)
        self._sweeper = Sweeper(self.loop, self.limits.shortest_s)

    def idle(self, endpoint: Endpoint, *, fresh: bool = False) -> UpstreamConnection | None:
        """The most recently used of those that wait for work.

        ``fresh`` drops them all: for a repeat after a kept-alive connection was found dead.
        """
        places = self._places.get(endpoint)
        while places is not None and places.idle:
            connection = places.idle.pop()
            if fresh:
                connection.abort()  # as old as the one that was dead
            elif not connection.closed:
                return connection
        return None

    async def acquire(self, endpoint: Endpoint) -> UpstreamConnection:
        """Where none is idle: a new connection, or the next to come free."""
        places = self._places.get(endpoint)
        if places is None:
            places = self._places[endpoint] = _Places()
        if places.open < self.limits.max_connections:
            places.open += 1
            return await self._connect(places, endpoint)
        while (handed := await self._wait(places, endpoint)) is not None:
            if not handed.closed:
                return handed
        return await self._connect(places, endpoint)

    async def _wait(self, places: _Places, endpoint: Endpoint) -> UpstreamConnection | None:
        """A connection that came free, or None: the place of one that closed."""
        waiter: asyncio.Future[UpstreamConnection | None] = self.loop.create_future()
        places.waiters.append(waiter)
        try:
            async with asyncio.timeout(self.limits.acquire_timeout_s):
                return await waiter
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter.done() and not waiter.cancelled():
                self._return(places, waiter.result())
            if isinstance(error, asyncio.CancelledError):
                raise
            self.stats.acquire_timeouts += 1
            text = f"All {self.limits.max_connections} connections to the engine at {endpoint} are in use."
            raise EngineBusy(text, retry_after_s=1.0) from None

    async def _connect(self, places: _Places, endpoint: Endpoint) -> UpstreamConnection:
        try:
            async with asyncio.timeout(self.limits.connect_timeout_s):
                _, connection = await self.loop.create_connection(
                    lambda: UpstreamConnection(
                        endpoint,
                        self.limits,
                        self.pump,
                        self.connection_free,
                        self.connection_gone,
                        self._key,
                    ),
                    *endpoint,
                )
        except (OSError, TimeoutError) as error:
            self._free_place(places)
            self.stats.connect_failures += 1
            why = "timed out" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
            raise EngineUnreachable(f"The engine at {endpoint} cannot be reached ({why}).") from error
        except asyncio.CancelledError:
            self._free_place(places)
            raise
        if connection.closed:  # accepted and reset before we could look at it
            self._free_place(places)
            self.stats.connect_failures += 1
            raise EngineUnreachable(f"The engine at {endpoint} closed a new connection at once.")
        self.stats.connected += 1
        self.stats.connections += 1
        self._all.add(connection)
        self._sweeper.add(connection)
        return connection

    def _return(self, places: _Places, handed: UpstreamConnection | None) -> None:
        if handed is not None and not handed.closed:
            self.connection_free(handed)
        elif handed is None:
            self._free_place(places)

    def _free_place(self, places: _Places) -> None:
        """A place came free: the first who waits may connect."""
        while places.waiters:
            waiter = places.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        places.open -= 1

    def lose(self, endpoint: Endpoint) -> None:
        """Nobody is there any more, and the system may be long in saying so: a machine that vanished."""
        for connection in [one for one in self._all if one.endpoint == endpoint]:
            connection.lose()

    # The connections' side

    def connection_free(self, connection: UpstreamConnection) -> None:
        places = self._places[connection.endpoint]
        connection.park(self.loop.time())
        while places.waiters:
            waiter = places.waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        places.idle.append(connection)

    def connection_gone(self, connection: UpstreamConnection) -> None:
        if connection not in self._all:
            return  # it never left _connect, which gives the place back
        self._all.discard(connection)
        self._sweeper.discard(connection)
        self.stats.connections -= 1
        places = self._places[connection.endpoint]
        if connection in places.idle:
            places.idle.remove(connection)
        self._free_place(places)

    async def close(self) -> None:
        """Abort every connection and wait until the sockets are closed."""
        gone = [connection.gone for connection in self._all]
        for connection in tuple(self._all):
            connection.abort()
        if gone:
            await asyncio.wait(gone)
        self._sweeper.close()
        if self.pump is not None:
            self.pump.close()
