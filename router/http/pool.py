"""Pool of kept-alive connections to engines, with a limit for each endpoint."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from router.errors import EngineBusy, EngineUnreachable
from router.http.limits import Sweeper, UpstreamLimits
from router.http.streams.socket_splice import make_splice_loop
from router.http.upstream import Endpoint, UpstreamConnection


@dataclass(slots=True)
class PoolStats:
    """Running counts of a pool's connections, for metrics and tests."""

    connections: int = 0
    connected: int = 0
    stale_retries: int = 0
    connect_failures: int = 0
    acquire_timeouts: int = 0


@dataclass(slots=True)
class _EndpointConnections:
    """Connections to one endpoint; ``open`` counts idle, busy and connecting ones."""

    open: int = 0
    idle: list[UpstreamConnection] = field(default_factory=list)
    waiters: deque[asyncio.Future[UpstreamConnection | None]] = field(default_factory=deque)


class UpstreamPool:
    """Pool of the connections to all engines. Ends those that time out, and runs the splice loop."""

    def __init__(self, limits: UpstreamLimits | None = None, engine_key: str = "") -> None:
        """Create an empty pool. Every request carries ``engine_key`` as proof that the fleet sent it."""
        self.limits = limits or UpstreamLimits()
        self.engine_key = engine_key
        self.stats = PoolStats()
        self.loop = asyncio.get_running_loop()
        self._endpoints: dict[Endpoint, _EndpointConnections] = {}
        self._all: set[UpstreamConnection] = set()
        self.splice_loop = make_splice_loop(self.loop)
        self._sweeper = Sweeper(self.loop, self.limits.shortest_s)

    def take_idle(self, endpoint: Endpoint, *, fresh: bool = False) -> UpstreamConnection | None:
        """Take the endpoint's most recently used idle connection; return None if there is none.

        ``fresh``: abort all idle connections and return None, because one of them was found dead.
        """
        connections = self._endpoints.get(endpoint)
        while connections is not None and connections.idle:
            connection = connections.idle.pop()
            if fresh:
                connection.abort()  # as old as the dead one
            elif not connection.closed:
                return connection
        return None

    async def acquire(self, endpoint: Endpoint) -> UpstreamConnection:
        """Open a connection, or wait for a free one if the endpoint has reached its limit."""
        connections = self._endpoints.get(endpoint)
        if connections is None:
            connections = self._endpoints[endpoint] = _EndpointConnections()
        if connections.open < self.limits.max_connections:
            connections.open += 1
            return await self._connect(connections, endpoint)
        while (handed := await self._wait(connections, endpoint)) is not None:
            if not handed.closed:
                return handed
        return await self._connect(connections, endpoint)

    async def _wait(self, connections: _EndpointConnections, endpoint: Endpoint) -> UpstreamConnection | None:
        """Wait for a free connection. Returns None if one has closed and the caller may open another."""
        waiter: asyncio.Future[UpstreamConnection | None] = self.loop.create_future()
        connections.waiters.append(waiter)
        try:
            async with asyncio.timeout(self.limits.acquire_timeout_s):
                return await waiter
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter.done() and not waiter.cancelled():
                self._return(connections, waiter.result())
            if isinstance(error, asyncio.CancelledError):
                raise
            self.stats.acquire_timeouts += 1
            text = f"All {self.limits.max_connections} connections to the engine at {endpoint} are in use."
            raise EngineBusy(text, retry_after_s=1.0) from None

    async def _connect(self, connections: _EndpointConnections, endpoint: Endpoint) -> UpstreamConnection:
        try:
            async with asyncio.timeout(self.limits.connect_timeout_s):
                _, connection = await self.loop.create_connection(
                    lambda: UpstreamConnection(endpoint, self), *endpoint
                )
        except (OSError, TimeoutError) as error:
            self._free_slot(connections)
            self.stats.connect_failures += 1
            why = "timed out" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
            raise EngineUnreachable(f"The engine at {endpoint} cannot be reached ({why}).") from error
        except asyncio.CancelledError:
            self._free_slot(connections)
            raise
        if connection.closed:  # accepted and immediately reset
            self._free_slot(connections)
            self.stats.connect_failures += 1
            raise EngineUnreachable(f"The engine at {endpoint} closed a new connection at once.")
        self.stats.connected += 1
        self.stats.connections += 1
        self._all.add(connection)
        self._sweeper.add(connection)
        return connection

    def _return(self, connections: _EndpointConnections, handed: UpstreamConnection | None) -> None:
        if handed is not None and not handed.closed:
            self.connection_free(handed)
        elif handed is None:
            self._free_slot(connections)

    def _free_slot(self, connections: _EndpointConnections) -> None:
        """Let the first waiter open a connection in place of one that closed."""
        while connections.waiters:
            waiter = connections.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        connections.open -= 1

    def fail_endpoint(self, endpoint: Endpoint) -> None:
        """End all exchanges with a lost engine, because TCP may take long to notice a lost machine."""
        for connection in [one for one in self._all if one.endpoint == endpoint]:
            connection.fail_as_lost()

    # Called by connections

    def connection_free(self, connection: UpstreamConnection) -> None:
        connections = self._endpoints[connection.endpoint]
        connection.start_idle()
        while connections.waiters:
            waiter = connections.waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        connections.idle.append(connection)

    def connection_gone(self, connection: UpstreamConnection) -> None:
        if connection not in self._all:
            return  # still in _connect, which releases its slot
        self._all.discard(connection)
        self._sweeper.discard(connection)
        self.stats.connections -= 1
        connections = self._endpoints[connection.endpoint]
        if connection in connections.idle:
            connections.idle.remove(connection)
        self._free_slot(connections)

    async def close(self) -> None:
        """Abort every connection and wait until the sockets are closed."""
        gone = [connection.gone for connection in self._all]
        for connection in tuple(self._all):
            connection.abort()
        if gone:
            await asyncio.wait(gone)
        self._sweeper.close()
        if self.splice_loop is not None:
            self.splice_loop.close()
