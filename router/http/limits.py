"""Limits on clients and on connections to engines, the timers that enforce them, and the open-file limit.

All values are seconds or bytes, unless their names say otherwise. No message has a timer of its own: a
periodic sweep checks every open connection, and a flag that arriving data sets, so that relaying bytes reads
no clock. A deadline is enforced up to one interval of the sweep late.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Protocol

from router.errors import GatewayConfigError

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on clients. A client that exceeds one is refused or disconnected."""

    max_connections: int = 8192
    max_url_bytes: int = 8 * KIB
    max_headers: int = 100
    max_head_bytes: int = 64 * KIB
    max_body_bytes: int = 32 * MIB
    handshake_timeout_s: float = 10.0
    """Longest TLS handshake."""
    head_timeout_s: float = 30.0
    """Longest time from a request's first byte to the end of its head."""
    body_timeout_s: float = 30.0
    """Longest silence inside a body that a handler waits for."""
    body_grace_s: float = 60.0
    """A body may take this long, and longer by its size divided by ``body_bytes_per_s``."""
    body_bytes_per_s: float = 64.0 * KIB
    idle_timeout_s: float = 75.0
    """Longest time that a kept-alive connection waits for a request."""
    write_stall_s: float = 120.0
    """A client that leaves ``write_high_bytes`` unread for this long is cut off."""
    write_high_bytes: int = 256 * KIB
    write_low_bytes: int = 64 * KIB
    read_high_bytes: int = 256 * KIB
    """Most body bytes held for a handler that does not read them; beyond it the client is paused."""
    linger_s: float = 2.0
    """After a refusal, the rest of the request is read and dropped this long, so that the answer arrives."""

    @property
    def shortest_s(self) -> float:
        waits = self.head_timeout_s, self.body_timeout_s, self.body_grace_s, self.idle_timeout_s
        return min(*waits, self.write_stall_s, self.linger_s)


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Limits on connections to engines."""

    max_connections: int = 2048
    """Largest number of connections to one endpoint."""
    acquire_timeout_s: float = 5.0
    """Longest wait for a connection when all are in use."""
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    """Large, because without streaming an engine's first byte comes after its last token."""
    chunk_timeout_s: float = 120.0
    idle_timeout_s: float = 4.0
    """Below uvicorn's five seconds: the gateway closes an idle connection before the engine does."""
    max_head_bytes: int = 64 * KIB

    @property
    def shortest_s(self) -> float:
        return min(self.first_byte_timeout_s, self.chunk_timeout_s, self.idle_timeout_s)


class AnswerTimer:
    """Deadline for the engine's next bytes. Traffic only sets ``active``, without reading a clock."""

    __slots__ = ("_first_byte_s", "_limits", "active", "answered", "deadline", "sending")

    def __init__(self, limits: UpstreamLimits) -> None:
        self._limits = limits
        self._first_byte_s = 0.0
        self.deadline = 0.0
        self.active = False
        """Bytes have passed since the last check."""
        self.answered = False
        """Bytes of the current response have arrived."""
        self.sending = False
        """The current request's body is still on its way."""

    def start(self, now: float, first_byte_timeout_s: float | None) -> None:
        self.active = self.answered = False
        self._first_byte_s = first_byte_timeout_s or self._limits.first_byte_timeout_s
        self.deadline = now + self._first_byte_s

    def start_idle(self, now: float) -> None:
        self.deadline = now + self._limits.idle_timeout_s

    def extend(self, now: float) -> None:
        self.active = False
        limit = self._limits.chunk_timeout_s
        if not (self.answered or self.sending):
            limit = max(limit, self._first_byte_s)
        self.deadline = now + limit


class BodyTimer:
    """Deadline for a request's body: limits silence, and requires a minimum rate after a grace period.

    Only the time during which a handler waits for the body counts. The minimum rate ends a body that
    trickles in a byte at a time.
    """

    __slots__ = ("_checked_at", "_deadline", "_limits", "_waited_s", "active")

    def __init__(self, limits: ServerLimits, now: float) -> None:
        self._limits = limits
        self._deadline = now + limits.body_timeout_s
        self._checked_at = now
        self._waited_s = 0.0
        self.active = False
        """Bytes have arrived since the last check."""

    def paused(self, now: float) -> None:
        """Restart the limit on the client's silence, because the gateway itself paused the client."""
        self._checked_at = now
        self._deadline = now + self._limits.body_timeout_s

    def problem(self, now: float, *, awaited: bool, received: int) -> str | None:
        """Return why the body is overdue, or None. ``awaited``: a handler waits for the body."""
        limits = self._limits
        elapsed, self._checked_at = now - self._checked_at, now
        if awaited:
            self._waited_s += elapsed
        if self.active or not awaited:
            self.active = False
            self._deadline = now + limits.body_timeout_s
        elif now > self._deadline:
            return "The request's body stopped arriving; send it again."
        if self._waited_s > limits.body_grace_s + received / limits.body_bytes_per_s:
            return "The request's body arrives too slowly; send it again, or send less."
        return None


class HasDeadlines(Protocol):
    """Connection whose deadlines a `Sweeper` checks."""

    def check_deadlines(self, now: float) -> None:
        """Act on the deadlines that have passed at ``now``, a time of the event loop's clock."""


class Sweeper:
    """Periodic check of the deadlines of all open connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shortest_timeout_s: float) -> None:
        self._loop = loop
        self._interval_s = min(1.0, max(0.01, shortest_timeout_s / 4))
        self._connections: set[HasDeadlines] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: HasDeadlines) -> None:
        self._connections.add(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._sweep)

    def discard(self, connection: HasDeadlines) -> None:
        self._connections.discard(connection)

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in tuple(self._connections):
            connection.check_deadlines(now)
        rearm = bool(self._connections)
        self._timer = self._loop.call_later(self._interval_s, self._sweep) if rearm else None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connections.clear()


OTHER_DESCRIPTORS = 256  # open files of a process besides the sockets of clients and engines


def descriptors_problem(connections: int) -> str:
    """Return why the open-file limit is too low for this many clients; empty if it is not."""
    wanted, hard = _descriptors(connections), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return ""
    return (
        f"gateway.limits.connections is {connections}, for which a gateway opens up to {wanted} files, and "
        f"here it may open {hard} (ulimit -Hn): allow more, or set it to "
        f"{max(1, (hard - OTHER_DESCRIPTORS) // 2)} at most"
    )


def reserve_descriptors(connections: int) -> None:
    """Raise the open-file limit for this many clients, or raise GatewayConfigError.

    Without enough descriptors, connections to engines fail and the engines seem to be lost.
    """
    if problem := descriptors_problem(connections):
        raise GatewayConfigError(problem)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _descriptors(connections)), hard))


def _descriptors(connections: int) -> int:
    return 2 * connections + OTHER_DESCRIPTORS  # a client's socket and one to its engine
