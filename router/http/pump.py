"""Streams that pass from socket to socket: no transport between, as long as each read is one whole event.

Transports and their protocols touch more memory for a token than its two system calls do. Here one loop makes
the calls for every stream that has something. Whatever is not simply the next event goes back to the stream's
connection, and with it, if need be, the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import time
from typing import Protocol

from router.http.observer import StreamObserver
from router.http.responder import Responder

LARGEST_EVENT = 4096
LARGEST_READ = 65536
ROOM_TO_SPARE = 64
AT_ONCE = 256
NEWLINE = 10
# The size line of a read that is exactly one chunk, by the length of that read; else "-".
SIZE_LINES = [b"-"] * (LARGEST_EVENT + 1)
for _size in range(1, LARGEST_EVENT - 6):
    _line = b"%x\r\n" % _size
    SIZE_LINES[len(_line) + _size + 2] = _line
BEHIND_SIZE_LINE = 5


log = logging.getLogger("conserve.router.http.pump")


class PassageOwner(Protocol):
    """The connection whose stream is in the pump."""

    def read_aside(self, data: bytes) -> None:
        """``data`` is not one whole event; empty, there is something else to see: an end, an error."""

    def write_aside(self, rest: bytes) -> None:
        """The client's socket did not take ``rest``."""


class Passage:
    """One stream's way through the pump, from the reads of an engine's socket to the client's."""

    __slots__ = ("client", "keep", "observer", "owner", "responder", "room")

    def __init__(
        self,
        client: int,
        responder: Responder,
        observer: StreamObserver,
        owner: PassageOwner,
        event_bytes: int,
    ) -> None:
        self.client = client
        self.responder = responder
        self.observer = observer
        self.keep = observer.last_pieces.append
        self.owner = owner
        # Little more than an event needs: a large buffer for each read costs more than filling it.
        self.room = min(event_bytes + ROOM_TO_SPARE, LARGEST_EVENT)

    def aside(self, engine: int, data: bytes) -> None:
        if len(data) == self.room:
            with contextlib.suppress(OSError):
                data += os.read(engine, LARGEST_READ)
            self.room = min(len(data) + ROOM_TO_SPARE, LARGEST_EVENT)
        self.owner.read_aside(data)


class Pump:
    """One for each loop, in an epoll of its own that the loop watches.

    Reports are edge-triggered: after a read that did not fill its room, the next byte or the end is reported.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._passages: dict[int, Passage] = {}
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._run)

    def take(self, engine: int, passage: Passage) -> None:
        """``engine``: a socket's number. Until ``drop`` nobody else reads it or writes to the client."""
        self._passages[engine] = passage
        self._epoll.register(engine, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def drop(self, engine: int) -> None:
        """Before either socket is closed: its number may be another's at once."""
        del self._passages[engine]
        self._epoll.unregister(engine)

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    @property
    def streams(self) -> int:
        return len(self._passages)

    def _run(self) -> None:
        passages, size_lines = self._passages, SIZE_LINES
        read, write, only_bytes = os.read, os.write, select.EPOLLIN
        now = time.monotonic()
        for engine, events in self._epoll.poll(0, AT_ONCE):
            if engine not in passages:
                continue  # dropped on account of one before it
            passage = passages[engine]
            room = passage.room
            try:
                data = read(engine, room) if events == only_bytes else b""
            except OSError:
                data = b""
            size = len(data)
            if (
                size == room
                or data.find(b"\n", BEHIND_SIZE_LINE) != size - 4
                or not data.startswith(size_lines[size])
                or data[-3] != NEWLINE
                or data[-1] != NEWLINE
            ):
                passage.aside(engine, data)
                continue
            observer = passage.observer
            observer.last_at = now
            observer.events += 1
            passage.keep(data)
            try:
                sent = write(passage.client, data)
            except OSError:
                sent = 0
            if sent != size:
                passage.owner.write_aside(data[sent:])


def pump_of(loop: asyncio.AbstractEventLoop) -> Pump | None:
    """None where the system has no epoll: every token then goes through the transports."""
    if hasattr(select, "epoll"):
        return Pump(loop)
    log.warning("no epoll on this system: a streamed token costs more")
    return None
