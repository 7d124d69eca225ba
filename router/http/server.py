"""The HTTP/1.1 server: what listens, what is under way, and how it ends.

A handler (``async def handler(request, responder)``) answers through the responder (``respond`` for a whole
answer, ``start``/``write``/``finish`` for a streamed one, or ``relay``). It may raise any
``router.errors.ApiError``: before the response has started it becomes that error's answer; later it cuts the
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

from router.errors import ApiError, Unavailable
from router.http.connection import ServerConnection
from router.http.limits import Crowd, ServerLimits, Sweeper
from router.http.response import Handler
from router.http.tls import Certificate, Handshakes

log = logging.getLogger("conserve.router.http.server")

BACKLOG = 4096


@dataclass(slots=True)
class ServerStats:
    """Running counts, for metrics and tests."""

    connections: int = 0
    accepted: int = 0
    requests: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    """By error code: refusals made here, before any handler ran."""
    timeouts: dict[str, int] = field(default_factory=dict)
    """By what did not come in time: head, body, idle, write; or `gave_way` to others, asking for nothing."""
    handshakes: dict[str, int] = field(default_factory=dict)
    """Of TLS, by how they ended: done, refused, not_tls, late, left, too_many, gave_way."""


class Server:
    """``await start(...)``, then ``await drain(seconds)`` to stop. One per process; several share a port."""

    def __init__(self, handler: Handler, limits: ServerLimits | None = None) -> None:
        self.handler = handler
        self.limits = limits or ServerLimits()
        self.stats = ServerStats()
        self.draining = False
        self.loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._handshakes: Handshakes | None = None
        self._connections: set[ServerConnection] = set()
        self.idle_ones = Crowd()
        self._tasks: set[asyncio.Task[None]] = set()
        self._emptied = asyncio.Event()
        self._sweeper = Sweeper(self.loop, self.limits.shortest_s)

    async def start(
        self, host: str, port: int, *, reuse_port: bool = False, certificate: Certificate | None = None
    ) -> int:
        """Listen; returns the port (the system chooses one for port 0). With a certificate, for TLS alone."""
        connect = partial(ServerConnection, self)
        accepted: Callable[[], asyncio.Protocol] = connect
        if certificate is not None:
            self._handshakes = Handshakes(certificate, self.limits, connect, self._full, self.idle_ones)
            self.stats.handshakes = self._handshakes.ended
            accepted = self._handshakes.accepted
        self._listener = await self.loop.create_server(
            accepted,
            host,
            port,
            reuse_port=reuse_port,
            reuse_address=True,
            backlog=BACKLOG,
        )
        bound: socket.socket = self._listener.sockets[0]
        return int(bound.getsockname()[1])

    async def drain(self, bound_s: float) -> bool:
        """Stop accepting, let responses end within ``bound_s``, cut the rest. True if none was cut."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        if self._handshakes is not None:
            self._handshakes.close()
        for connection in tuple(self._connections):
            connection.close_if_idle()
        whole = await self._empty_within(bound_s)
        if not whole:
            left = len(self._connections), len(self._tasks)
            log.warning("drain cuts what is left connections=%d handlers=%d after_s=%.1f", *left, bound_s)
            for connection in tuple(self._connections):
                connection.abort()
            for task in tuple(self._tasks):
                task.cancel()
            await self._empty_within(1.0)
        self._sweeper.close()
        return whole

    @property
    def idle(self) -> bool:
        """No request is under way."""
        return not self._tasks

    async def run_until_signal(self, drain_s: float) -> bool:
        """Serve until SIGTERM or SIGINT, then drain; a second signal cuts the drain short."""
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

    def _full(self) -> bool:
        """No handshake may begin."""
        under_way = self._handshakes.under_way if self._handshakes is not None else 0
        many = self.stats.connections + under_way >= self.limits.max_connections
        return self.draining or (many and not self.idle_ones.make_way())

    # The connections' side

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self.stats.requests += 1
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def connection_opened(self, connection: ServerConnection) -> ApiError | None:
        self.stats.accepted += 1
        self.stats.connections += 1
        self._connections.add(connection)
        self._sweeper.add(connection)
        if self.draining:
            return Unavailable("This gateway is shutting down; connect again.", retry_after_s=1.0)
        if self.stats.connections > self.limits.max_connections and not self.idle_ones.make_way():
            text = f"This gateway already has {self.limits.max_connections} connections; try again later."
            return Unavailable(text, code="too_many_connections", retry_after_s=1.0)
        return None

    def connection_closed(self, connection: ServerConnection) -> None:
        self.stats.connections -= 1
        self._connections.discard(connection)
        self._sweeper.discard(connection)
        self._note_if_empty()

    def refused(self, error: ApiError) -> None:
        code = error.code or error.type
        self.stats.refusals[code] = self.stats.refusals.get(code, 0) + 1

    def timed_out(self, what: str) -> None:
        self.stats.timeouts[what] = self.stats.timeouts.get(what, 0) + 1

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not self._connections and not self._tasks:
            self._emptied.set()
