"""What the server and the upstream pool allow, each with a bound, and how bounds are kept: on time, on files,
and on connections that ask for nothing.

Seconds and bytes. No timer per message: one periodic check over everything that is open looks at a flag that
traffic sets, so that the byte path never reads a clock. A deadline is met up to one interval late.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_network
from itertools import islice
from typing import Any, Protocol

from router.errors import GatewayConfigError

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_connections: int = 8192
    max_url_bytes: int = 8 * KIB
    max_headers: int = 100
    max_head_bytes: int = 64 * KIB
    max_body_bytes: int = 32 * MIB
    handshake_timeout_s: float = 10.0
    """Of TLS, where the server speaks it."""
    head_timeout_s: float = 30.0
    """From a request's first byte to the end of its head."""
    body_timeout_s: float = 30.0
    """Longest silence inside a body that a handler waits for."""
    body_grace_s: float = 60.0
    """A body may take this long, and longer by what has come of it at ``body_bytes_per_s``."""
    body_bytes_per_s: float = 64.0 * KIB
    idle_timeout_s: float = 75.0
    """A kept-alive connection without a request."""
    write_stall_s: float = 120.0
    """A client that leaves ``write_high_bytes`` unread for this long is cut off."""
    write_high_bytes: int = 256 * KIB
    write_low_bytes: int = 64 * KIB
    read_high_bytes: int = 256 * KIB
    """Body bytes held for a handler that is not reading; beyond it the client is paused."""
    linger_s: float = 2.0
    """After a refusal the rest of the request is read and dropped this long, so that the answer arrives."""

    @property
    def shortest_s(self) -> float:
        waits = self.head_timeout_s, self.body_timeout_s, self.body_grace_s, self.idle_timeout_s
        return min(*waits, self.write_stall_s, self.linger_s)


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    max_connections: int = 2048
    """Connections to one endpoint."""
    acquire_timeout_s: float = 5.0
    """Longest wait for one of them."""
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    """Without streaming, an engine's first byte comes after its last token."""
    chunk_timeout_s: float = 120.0
    idle_timeout_s: float = 4.0
    """Below uvicorn's five seconds, so that we close an idle connection before the engine does."""
    max_head_bytes: int = 64 * KIB

    @property
    def shortest_s(self) -> float:
        return min(self.first_byte_timeout_s, self.chunk_timeout_s, self.idle_timeout_s)


class AnswerTimer:
    """Deadline for the engine's next bytes. Traffic sets ``active``; bytes read no clock."""

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


class HasDeadlines(Protocol):
    def check_deadlines(self, now: float) -> None:
        """Act on what is overdue at ``now``, by the event loop's clock."""


class Sweeper:
    def __init__(self, loop: asyncio.AbstractEventLoop, shortest_timeout_s: float) -> None:
        self._loop = loop
        self._interval = min(1.0, max(0.01, shortest_timeout_s / 4))
        self._watched: set[HasDeadlines] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: HasDeadlines) -> None:
        self._watched.add(item)
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval, self._sweep)

    def discard(self, item: HasDeadlines) -> None:
        self._watched.discard(item)

    def _sweep(self) -> None:
        now = self._loop.time()
        for item in tuple(self._watched):
            item.check_deadlines(now)
        rearm = bool(self._watched)
        self._timer = self._loop.call_later(self._interval, self._sweep) if rearm else None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watched.clear()


DESCRIPTORS_BESIDE = 256  # of a process, for all but clients and what they wait for at engines


def descriptors_problem(connections: int) -> str:
    """Empty where the system allows a gateway as many open files as so many clients may take."""
    wanted, hard = _descriptors(connections), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return ""
    return (
        f"gateway.limits.connections is {connections}, for which a gateway opens up to {wanted} files, and "
        f"here it may open {hard} (ulimit -Hn): allow more, or set it to "
        f"{max(1, (hard - DESCRIPTORS_BESIDE) // 2)} at most"
    )


def reserve_descriptors(connections: int) -> None:
    """GatewayConfigError where there cannot be so many: engines would seem lost for want of them."""
    if problem := descriptors_problem(connections):
        raise GatewayConfigError(problem)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _descriptors(connections)), hard))


def _descriptors(connections: int) -> int:
    return 2 * connections + DESCRIPTORS_BESIDE  # a client's, and one to its engine


_LOOKED_AT = 64  # of an address's, for one whose answer has gone out


class Idle(Protocol):
    """A connection without a request under way, or the handshake before one."""

    @property
    def sending(self) -> bool:
        """The end of its last answer is still on its way."""

    def give_way(self) -> None:
        """End now."""


class Crowd:
    """Connections that ask for nothing, by address: which gives way when there are as many as may be.

    An open connection costs a client nothing, so that one address could hold all of a server's, with or
    without bytes of a head. It keeps them while there is place. Then a new one is accepted all the same, and
    the address with most of them loses the one that has asked for nothing longest: nobody who holds few is
    kept out by somebody who holds many. Of a load balancer's these are kept-alive ones, which may end at any
    time.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[Idle, None]] = {}  # by address, longest idle first
        self._holding: dict[
            int, dict[str, None]
        ] = {}  # addresses by how many they have; unchanged longest first

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def add(self, address: str, one: Idle) -> None:
        there = self._of.setdefault(address, {})
        before = len(there)
        there[one] = None
        self._moved(address, before, len(there))

    def discard(self, address: str, one: Idle) -> None:
        """It has a request now, or has ended."""
        there = self._of.get(address, {})
        before = len(there)
        there.pop(one, None)
        self._moved(address, before, len(there))
        if not there:
            self._of.pop(address, None)

    def make_way(self) -> bool:
        """One of them ends; False where all have requests under way."""
        if not self._of:
            return False
        address = next(iter(self._holding[max(self._holding)]))
        there = self._of[address]
        oldest = islice(there, _LOOKED_AT)
        one = next((idle for idle in oldest if not idle.sending), next(iter(there)))
        self.discard(address, one)
        one.give_way()
        return True

    def _moved(self, address: str, before: int, after: int) -> None:
        if before == after:
            return
        if before:
            self._holding[before].pop(address, None)
            if not self._holding[before]:
                del self._holding[before]
        if after:
            self._holding.setdefault(after, {})[address] = None


def address_of(peer: Any) -> str:
    """Of a transport's `peername`; of IPv6 its network, of which a host has all. Empty for what has none."""
    host = str(peer[0]) if isinstance(peer, tuple) else ""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ip_network((address, 64), strict=False))
