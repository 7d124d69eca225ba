"""Splicing of streams: complete events go straight from an engine's socket to the client's socket.

A stream is spliced once its first content has come, as long as each read is exactly one event. asyncio's
transports and protocols touch more memory for a token than the two system calls that it needs. Here one loop
makes these calls for all streams that have data. Anything but one whole event goes back to the stream's
connection (`on_diverted`), which may end the splicing. Only plain sockets can be spliced, because over TLS
the socket carries what TLS has encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import time
from typing import Protocol

from router.http.response import Responder
from router.http.streams.resume import MAX_LINES_BYTES, StreamProgress
from router.http.streams.sse_observer import AFTER_SIZE_LINE, StreamObserver

log = logging.getLogger("conserve.router.http.splice")

LARGEST_EVENT = 4096
LARGEST_READ = 65536
SPARE_BYTES = 64
MAX_READY_STREAMS = 256
LETTER_D = ord("d")
NEWLINE = ord("\n")
# SIZE_LINES[n] is the size line of a chunk of n bytes, framing included; "-" if no chunk has that size.
SIZE_LINES = [b"-"] * (LARGEST_EVENT + 1)
# CONTENT_LINES[n] is the size line of a chunk with n bytes of content.
CONTENT_LINES = [b"%x\r\n" % _size for _size in range(LARGEST_EVENT)]
for _size in range(1, LARGEST_EVENT - 6):
    _line = CONTENT_LINES[_size]
    SIZE_LINES[len(_line) + _size + 2] = _line


class SplicedConnection(Protocol):
    """Engine connection of a spliced stream. It handles everything that is not one whole event."""

    def on_diverted(self, data: bytes) -> None: ...

    def on_unsent(self, rest: bytes) -> None: ...


class SpliceStream:
    """One stream from the socket ``engine`` to the socket ``client``, both file descriptors."""

    def __init__(
        self,
        engine: int,
        client: int,
        connection: SplicedConnection,
        responder: Responder,
        observer: StreamObserver,
        chunk_bytes: int,
        progress: StreamProgress | None,
    ) -> None:
        self.engine, self.client = engine, client
        self.connection = connection
        self.responder = responder
        self.observer = observer
        self.keep = observer.last_pieces.append
        self.token_lines = progress.lines if progress is not None and progress.reported else None
        # Little more than an event needs: allocating a large buffer for each read costs more than filling it.
        self.read_bytes = min(chunk_bytes + SPARE_BYTES, LARGEST_EVENT)
        self._checked_events = observer.events

    def was_active(self) -> bool:
        """Return whether events were passed to the client since the last call."""
        before, self._checked_events = self._checked_events, self.observer.events
        return self._checked_events != before

    def divert(self, data: bytes) -> None:
        """Hand ``data`` to the connection, together with bytes that did not fit into the read's buffer."""
        if len(data) == self.read_bytes:
            with contextlib.suppress(OSError):
                data += os.read(self.engine, LARGEST_READ)
            self.read_bytes = min(len(data) + SPARE_BYTES, LARGEST_EVENT)
        self.connection.on_diverted(data)


class SpliceLoop:
    """Reads and writes the sockets of all spliced streams; the event loop watches its epoll.

    Notifications are edge-triggered: after a read that did not fill its buffer, the next byte or the end
    causes a new one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[int, SpliceStream] = {}
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._run)

    def add(self, stream: SpliceStream) -> None:
        """Take over a stream. Until ``remove`` nobody else may read its engine or write to its client."""
        self._streams[stream.engine] = stream
        self._epoll.register(stream.engine, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def remove(self, stream: SpliceStream) -> None:
        """Give back a stream. Call it before a socket closes, as its descriptor may be reused immediately."""
        del self._streams[stream.engine]
        self._epoll.unregister(stream.engine)

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    def _run(self) -> None:
        streams, size_lines = self._streams, SIZE_LINES
        read, write, only_bytes = os.read, os.write, select.EPOLLIN
        now = time.monotonic()
        for engine, events in self._epoll.poll(0, MAX_READY_STREAMS):
            if engine not in streams:
                continue  # removed while an earlier stream of this poll was handled
            stream = streams[engine]
            read_bytes = stream.read_bytes
            try:
                data = read(engine, read_bytes) if events == only_bytes else b""
            except OSError:
                data = b""
            size = len(data)
            lines, line_end = stream.token_lines, 0
            if lines is not None:  # the data should be a token line, then an event of one line
                line_end = data.find(b"\n", AFTER_SIZE_LINE) + 1
            if (
                size == read_bytes
                or data.find(b"\n", line_end or AFTER_SIZE_LINE) != size - 4
                or not data.startswith(size_lines[size])
                or data[-3] != NEWLINE
                or data[-1] != NEWLINE
                or (lines is not None and data[line_end] != LETTER_D)
            ):
                stream.divert(data)
                continue
            if lines is not None:
                if len(lines) < MAX_LINES_BYTES:
                    lines += data[len(size_lines[size]) : line_end]
                data = CONTENT_LINES[size - line_end - 2] + data[line_end:]
                size = len(data)
            observer = stream.observer
            observer.last_at = now
            observer.events += 1
            stream.keep(data)
            try:
                sent = write(stream.client, data)
            except OSError:
                sent = 0
            if sent != size:
                stream.connection.on_unsent(data[sent:])


def make_splice_loop(loop: asyncio.AbstractEventLoop) -> SpliceLoop | None:
    """Return a splice loop, or None on a system without epoll, where streams are not spliced."""
    if hasattr(select, "epoll"):
        return SpliceLoop(loop)
    log.warning("this system has no epoll: a streamed token costs more processor time")
    return None
