"""The HTTP/1.1 server: listens, counts, limits, drains."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Coroutine
from dataclasses import dataclass, field

from router.errors import ApiError, Unavailable
from router.http.connection import ServerConnection
from router.http.deadlines import Sweeper
from router.http.limits import ServerLimits
from router.http.message import Handler

log = logging.getLogger("conserve.router.http.server")


@dataclass(slots=True)
class ServerStats:
    """Running counts, for metrics and tests."""

    connections: int = 0
    accepted: int = 0
    requests: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    """By error code: refusals made here, before any handler ran."""
    timeouts: dict[str, int] = field(default_factory=dict)
    """By what did not come in time: head, body, idle, write."""


class Server:
    """``await start(...)``, then ``await drain(seconds)`` to stop. One per process; several share a port."""

    def __init__(self, handler: Handler, limits: ServerLimits | None = None) -> None:
        self.handler = handler
        self.limits = limits or ServerLimits()
        self.stats = ServerStats()
        self.draining = False
        self.loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._connections: set[ServerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._emptied = asyncio.Event()
        bounds = self.limits
        self._sweeper = Sweeper(
            self.loop,
            min(
                bounds.head_timeout_s,
                bounds.body_timeout_s,
                bounds.idle_timeout_s,
                bounds.write_stall_s,
                bounds.linger_s,
            ),
        )

    async def start(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        backlog: int = 4096,
        tls: ssl.SSLContext | None = None,
    ) -> int:
        """Listen; returns the port (the system chooses one for port 0)."""
        self._listener = await self.loop.create_server(
            lambda: ServerConnection(self),
            host,
            port,
            reuse_port=reuse_port,
            reuse_address=True,
            backlog=backlog,
            ssl=tls,
        )
        bound: socket.socket = self._listener.sockets[0]
        return int(bound.getsockname()[1])

    async def drain(self, bound_s: float) -> bool:
        """Stop accepting, let responses end within ``bound_s``, cut the rest. True if none was cut."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in tuple(self._connections):
            connection.close_if_idle()
        whole = await self._empty_within(bound_s)
        if not whole:
            log.warning(
                "drain cuts what is left connections=%d handlers=%d after_s=%.1f",
                len(self._connections),
                len(self._tasks),
                bound_s,
            )
            for connection in tuple(self._connections):
                connection.abort()
            for task in tuple(self._tasks):
                task.cancel()
            await self._empty_within(1.0)
        self._sweeper.close()
        return whole

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
        if self.stats.connections > self.limits.max_connections:
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
