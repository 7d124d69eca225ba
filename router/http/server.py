"""HTTP/1.1 server: listens, limits the number of connections, and drains.

A handler (``async def handler(request, responder)``) answers through the responder: ``respond`` for a whole
answer, ``start``/``write``/``finish`` for a streamed one, or ``relay``. It may raise any
``router.errors.ApiError``: before the response has started the error becomes the answer; later it cuts the
connection. A client that leaves does not cancel the handler: use ``responder.on_disconnect``.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Protocol

from router.errors import ApiError, Unavailable
from router.http.connection import ServerConnection
from router.http.limits import ServerLimits, Sweeper
from router.http.response import Handler
from router.http.tls import Certificate, TlsHandshake

log = logging.getLogger("conserve.router.http.server")

BACKLOG = 4096
MAX_EVICTION_CANDIDATES = 64


@dataclass(slots=True)
class ServerStats:
    """Running counts of a server's connections and requests, for metrics and tests."""

    connections: int = 0
    accepted: int = 0
    requests: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    """Requests refused before a handler ran, by error code."""
    timeouts: dict[str, int] = field(default_factory=dict)
    """Closed connections by time-out (head, body, idle, write), and idle connections evicted for new ones."""
    handshakes: dict[str, int] = field(default_factory=dict)
    """TLS handshakes by outcome: done, failed, timeout, evicted, too_many."""


class Evictable(Protocol):
    """Connection without a running request, or a TLS handshake in progress."""

    @property
    def sending(self) -> bool:
        """Return whether a part of the last answer still has to be sent."""

    def evict(self) -> None:
        """Close this connection, because a new one needs its place."""


class Server:
    """Listener with its connections: ``await start(...)``, then ``await drain(seconds)``.

    A process may have several, and several processes may share a port.
    """

    def __init__(self, handler: Handler, limits: ServerLimits | None = None) -> None:
        self.handler = handler
        self.limits = limits or ServerLimits()
        self.stats = ServerStats()
        self.draining = False
        self.loop = asyncio.get_running_loop()
        self.idle_connections: dict[Evictable, None] = {}
        """Connections that can be evicted, longest idle first."""
        self._listener: asyncio.Server | None = None
        self._connections: set[ServerConnection] = set()
        self._handshakes: set[TlsHandshake] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._emptied = asyncio.Event()
        self._sweeper = Sweeper(self.loop, self.limits.shortest_s)

    async def start(
        self, host: str, port: int, *, reuse_port: bool = False, certificate: Certificate | None = None
    ) -> int:
        """Listen and return the port; the system chooses one for port 0. A certificate turns TLS on."""
        accept: Callable[[], asyncio.Protocol] = partial(ServerConnection, self)
        if certificate is not None:
            accept = partial(TlsHandshake, self, certificate, accept)
        self._listener = await self.loop.create_server(
            accept,
            host,
            port,
            reuse_port=reuse_port,
            reuse_address=True,
            backlog=BACKLOG,
        )
        bound: socket.socket = self._listener.sockets[0]
        return int(bound.getsockname()[1])

    async def drain(self, limit_s: float) -> bool:
        """Stop accepting, let responses end within ``limit_s``, cut the rest. Return True if none was cut."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        for handshake in tuple(self._handshakes):
            handshake.abort()
        for connection in tuple(self._connections):
            connection.close_if_idle()
        whole = await self._empty_within(limit_s)
        if not whole:
            left = len(self._connections), len(self._tasks)
            log.warning("drain aborts what is left connections=%d handlers=%d after_s=%.1f", *left, limit_s)
            for connection in tuple(self._connections):
                connection.abort()
            for task in tuple(self._tasks):
                task.cancel()
            await self._empty_within(1.0)
        self._sweeper.close()
        return whole

    @property
    def idle(self) -> bool:
        """Return whether no request is running."""
        return not self._tasks

    async def run_until_signal(self, drain_s: float) -> bool:
        """Serve until SIGTERM or SIGINT, then drain. A second signal cuts the drain short."""
        stop, hurry = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (hurry if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, on_signal)
        await stop.wait()
        draining = self.loop.create_task(self.drain(drain_s))
        hurrying = self.loop.create_task(hurry.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not draining.done():
            draining.cancel()
            return await self.drain(0.0)
        return draining.result()

    async def _empty_within(self, seconds: float) -> bool:
        if not self._connections and not self._tasks:
            return True
        self._emptied.clear()
        try:
            await asyncio.wait_for(self._emptied.wait(), seconds)
        except TimeoutError:
            return False
        return True

    # Called by connections and handshakes

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run the handler of one request."""
        self.stats.requests += 1
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def handshake_started(self, handshake: TlsHandshake) -> bool:
        """Count a new TLS handshake; return False if the server is full or drains."""
        self._handshakes.add(handshake)
        if self.draining or not self._make_place():
            return False
        self.idle_connections[handshake] = None
        return True

    def handshake_ended(self, handshake: TlsHandshake, outcome: str) -> None:
        if handshake in self._handshakes:
            self._handshakes.discard(handshake)
            self.idle_connections.pop(handshake, None)
            self.stats.handshakes[outcome] = self.stats.handshakes.get(outcome, 0) + 1

    def connection_opened(self, connection: ServerConnection) -> ApiError | None:
        """Count a new connection; return the error for its client if the server is full or drains."""
        self.stats.accepted += 1
        self.stats.connections += 1
        self._connections.add(connection)
        self._sweeper.add(connection)
        if self.draining:
            return Unavailable("This gateway is shutting down; connect again.", retry_after_s=1.0)
        if not self._make_place():
            text = f"This gateway already has {self.limits.max_connections} connections; try again later."
            return Unavailable(text, code="too_many_connections", retry_after_s=1.0)
        return None

    def connection_closed(self, connection: ServerConnection) -> None:
        self.stats.connections -= 1
        self._connections.discard(connection)
        self._sweeper.discard(connection)
        self._check_emptied()

    def refused(self, error: ApiError) -> None:
        code = error.code or error.type
        self.stats.refusals[code] = self.stats.refusals.get(code, 0) + 1

    def timed_out(self, what: str) -> None:
        self.stats.timeouts[what] = self.stats.timeouts.get(what, 0) + 1

    def _make_place(self) -> bool:
        """Evict the longest idle connection if there are too many; return False if every one runs a request.

        Otherwise one client could open as many connections as the limit allows and keep everybody else out.
        Clients have to expect that an idle connection ends.
        """
        if self.stats.connections + len(self._handshakes) <= self.limits.max_connections:
            return True
        if not self.idle_connections:
            return False
        candidates = islice(self.idle_connections, MAX_EVICTION_CANDIDATES)
        oldest = next(iter(self.idle_connections))
        evicted = next((one for one in candidates if not one.sending), oldest)
        del self.idle_connections[evicted]
        evicted.evict()
        return True

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._check_emptied()

    def _check_emptied(self) -> None:
        if not self._connections and not self._tasks:
            self._emptied.set()
