"""Connection to an engine: sends the request, parses the response, and passes it to a receiver.

`UpstreamConnection` carries one exchange at a time. Complete chunks of a stream bypass the parser, and after
the first content the connection as well (`router/http/streams/socket_splice.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from functools import lru_cache
from typing import NamedTuple, Protocol, Self, cast
from urllib.parse import urlsplit

import httptools

from router.errors import EngineGarbled, EngineLost, EngineSilent, UpstreamError
from router.http.limits import AnswerTimer, UpstreamLimits
from router.http.parsers import ResponseParser
from router.http.request import HOP_BY_HOP, RawHeaders, RequestBody, end_to_end
from router.http.response import Responder
from router.http.streams.resume import StreamProgress
from router.http.streams.socket_splice import (
    LARGEST_EVENT,
    LARGEST_READ,
    SIZE_LINES,
    SpliceLoop,
    SpliceStream,
)
from router.http.streams.sse_observer import StreamObserver

log = logging.getLogger("conserve.router.http.upstream")

ENGINE_KEY = b"x-conserve-key"
# The connection writes its own host, length and key; the server has dealt with `expect`.
NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", ENGINE_KEY}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
QUICK_ACKNOWLEDGEMENT: int | None = getattr(socket, "TCP_QUICKACK", None)
EVENT_CHUNK_END = b"\n\n\r\n"
CHEAPLY_COPIED = 64 * 1024


class Endpoint(NamedTuple):
    """Host and port of an engine."""

    host: str
    port: int

    @classmethod
    @lru_cache(4096)
    def parse(cls, url: str) -> Self:
        """Return the endpoint of a URL, ``host:port`` or ``http://host:port``; a path is ignored."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an engine's address; expected http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UpstreamRequest(NamedTuple):
    """Request to an engine. ``headers`` may be the client's: hop-by-hop headers are dropped here."""

    method: str
    target: bytes
    """Path and query as they go on the wire."""
    headers: RawHeaders
    body: tuple[bytes, ...] = ()
    """Parts of the body: a large body is never copied into one piece."""
    repeatable: bool | None = None
    """Whether the request may be sent again after a kept-alive connection turned out dead. None: only if its
    method is safe.

    A generation is repeatable until its answer begins: the engine aborts a request whose connection is gone.
    A leg of a KV transfer is not, because its transfer id may be used up.
    """
    first_byte_timeout_s: float | None = None
    stream: RequestBody | None = None
    """Body that the client is still sending, instead of ``body``. It can be sent only once."""
    max_bytes: int = 0
    """Largest size of ``stream``; the server's limit for bodies that are read whole does not apply to it."""

    @property
    def may_repeat(self) -> bool:
        if self.stream is not None:
            return False
        return self.method in SAFE_METHODS if self.repeatable is None else self.repeatable

    def head(self, first: bytes) -> bytes:
        """Encode the request's head. ``first``: the connection's own header lines (host and key)."""
        lines = [b"%b %b HTTP/1.1\r\n%b" % (self.method.encode(), self.target, first)]
        lines += [b"%b: %b\r\n" % pair for pair in end_to_end(self.headers, NOT_FORWARDED)]
        length = sum(map(len, self.body)) if self.stream is None else self.stream.length
        if length is None:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif length or self.method not in SAFE_METHODS:
            lines.append(b"content-length: %d\r\n" % length)
        lines.append(b"\r\n")
        return b"".join(lines)


@lru_cache(4096)
def _connection_headers(endpoint: Endpoint, engine_key: str) -> bytes:
    host = b"host: %b\r\n" % str(endpoint).encode()
    return host + b"%b: %b\r\n" % (ENGINE_KEY, engine_key.encode()) if engine_key else host


class ResponseSink(Protocol):
    """Receiver of one response: head, body parts, then the end with the last part, or a failure."""

    def on_head(self, status: int, headers: RawHeaders) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_chunk(self, framed: bytes, start: int) -> None:
        """Receive one chunk with its framing. The content, ``framed[start:-2]``, ends with an event."""

    def on_end(self, tail: bytes) -> None: ...

    def on_whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Receive a response that arrived in one piece, instead of ``on_head`` and ``on_end``."""

    def on_failure(self, error: UpstreamError) -> None: ...


class ConnectionOwner(Protocol):
    """Interface of the pool that a connection uses."""

    loop: asyncio.AbstractEventLoop
    limits: UpstreamLimits
    splice_loop: SpliceLoop | None
    engine_key: str

    def connection_free(self, connection: UpstreamConnection) -> None:
        """Take back a connection that can carry another exchange."""

    def connection_gone(self, connection: UpstreamConnection) -> None:
        """Forget a connection whose socket is closed. Called once."""


class UpstreamConnection(asyncio.Protocol):
    """Connection to an engine. The pool owns it, and ``send`` lends it to a sink for one response."""

    def __init__(self, endpoint: Endpoint, owner: ConnectionOwner) -> None:
        self.endpoint = endpoint
        self.exchanges = 0
        """Requests sent on this connection, the current one included."""
        self.closed = False
        self.gone: asyncio.Future[None] = owner.loop.create_future()
        """Done when the socket is closed."""
        self._owner = owner
        self._sink: ResponseSink | None = None
        self._parser = ResponseParser()
        self._timer = AnswerTimer(owner.limits)
        self._paused = False
        self._writable: asyncio.Future[None] | None = None
        self._between_chunks = False
        self._acknowledges_late = False
        self._splice: SpliceStream | None = None

    @property
    def answered(self) -> bool:
        """Return whether the current response has begun to arrive."""
        return self._timer.answered

    def send(self, request: UpstreamRequest, sink: ResponseSink) -> None:
        self._parser.expect(head_only=request.method == "HEAD")
        self._between_chunks = self._acknowledges_late = False
        self.exchanges += 1
        self._sink = sink
        self._timer.start(self._owner.loop.time(), request.first_byte_timeout_s)
        # One system call: uvloop writes at once, so that two writes would be two packets.
        head = request.head(_connection_headers(self.endpoint, self._owner.engine_key))
        body = request.body
        if sum(map(len, body)) <= CHEAPLY_COPIED:
            self._transport.write(b"".join((head, *body)))
        else:
            self._transport.writelines((head, *body))

    async def send_body(self, body: RequestBody, max_bytes: int) -> None:
        """Send the body of the current request as it arrives from the client, as fast as the engine reads.

        Raises the error of a faulty client body. Returns early when the exchange ends before the body does.
        """
        timer = self._timer
        timer.sending = True
        async for piece in body.pieces(max_bytes):
            if self.closed or self._sink is None:
                return
            timer.active = True
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if body.length is None else piece)
            if self._writable is not None:
                await self._writable
        if body.length is None and not self.closed:
            self._transport.write(b"0\r\n\r\n")
        timer.sending = False
        timer.active = True  # the time for the answer begins now

    def _acknowledge_late(self) -> None:
        """Acknowledge only every second packet of the engine, which saves a quarter of the packets we send.

        The kernel resets the option after a pause of 40 ms, so it is set again at every sweep.
        """
        if QUICK_ACKNOWLEDGEMENT is not None and self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACKNOWLEDGEMENT, 0)

    def pause(self) -> None:
        """Stop reading from the engine, because the client does not keep up."""
        self._stop_splicing()
        if not self._paused and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """End exchange and connection. The engine notices it, and the sink is not called again."""
        self._sink = None
        self._stop_splicing()
        if not self.closed:
            self._transport.abort()

    def fail_as_lost(self) -> None:
        """End the exchange, because the engine is known to be gone."""
        self._fail(EngineLost("The engine is gone; try again."))

    def start_idle(self) -> None:
        """Start the timeout of a connection that waits in the pool."""
        self._timer.start_idle(self._owner.loop.time())

    def check_deadlines(self, now: float) -> None:
        timer = self._timer
        if self._paused:
            timer.active = True
        elif timer.active or (self._splice is not None and self._splice.was_active()):
            timer.extend(now)
            if self._acknowledges_late:
                self._acknowledge_late()
        elif now > timer.deadline:
            if self._sink is None:
                self._transport.abort()
                return
            what = "stopped in its answer" if timer.answered else "did not begin to answer in time"
            self._fail(EngineSilent(f"The engine {what}; try again."))

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not inherit it
        self.socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        sink, timer = self._sink, self._timer
        if sink is None:
            self._transport.abort()  # no request is waiting for these bytes
            return
        timer.active = timer.answered = True
        if self._between_chunks:
            line = SIZE_LINES[len(data)] if len(data) <= LARGEST_EVENT else b"-"
            if data.startswith(line) and data.endswith(EVENT_CHUNK_END):
                # Exactly one chunk: the parser stands between two chunks before and after it.
                sink.on_chunk(data, len(line))
                return
        parser = self._parser
        try:
            parser.feed(data)
        except httptools.HttpParserError as error:
            self._deliver(sink)
            self._fail(EngineGarbled(f"The engine's response is not valid HTTP: {error}."))
            return
        except httptools.HttpParserUpgrade:
            self._fail(EngineGarbled("The engine switched protocols unasked."))
            return
        if not parser.head_seen and not self._check_head_size(len(data)):
            return
        if parser.complete:
            self._finish(sink)
            return
        # False when a part of the next size line has arrived as well.
        self._between_chunks = parser.chunk_ended and data.endswith(b"\r\n")
        if self._between_chunks and not self._acknowledges_late:
            self._acknowledges_late = True
            self._acknowledge_late()
        self._deliver(sink)

    def eof_received(self) -> bool:
        if self._parser.until_close and self._sink is not None:
            self._finish(self._sink)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_splicing()
        self.closed = True
        self.resume_writing()
        self.gone.set_result(None)
        self._owner.connection_gone(self)
        sink, self._sink = self._sink, None
        if sink is not None:
            when = "in the middle of its answer" if self.answered else "before it answered"
            sink.on_failure(EngineLost(f"The connection to the engine was lost {when}; try again."))

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._owner.loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # Splicing: the splice loop reads the engine's socket, as long as each read is one whole event

    def splice_to(
        self,
        responder: Responder,
        observer: StreamObserver,
        chunk_bytes: int,
        progress: StreamProgress | None,
    ) -> None:
        """Begin to splice the stream to the client's socket, if no earlier data still waits to be sent."""
        loop = self._owner.splice_loop
        if loop is None or self._splice is not None or self._paused:
            return
        client = responder.splice_socket()
        if client is not None:
            self._transport.pause_reading()
            engine = self.socket.fileno()
            self._splice = SpliceStream(engine, client, self, responder, observer, chunk_bytes, progress)
            loop.add(self._splice)

    def on_diverted(self, data: bytes) -> None:
        """Receive data of the spliced stream that is not one whole event; b"" if it ended or failed."""
        splice = self._splice
        assert splice is not None
        if data:
            try:
                self.data_received(data)
            except Exception:
                log.exception("a stream could not be passed on engine=%s", self.endpoint)
                self._stop_splicing()
                self._transport.abort()
        continues = 0 < len(data) < LARGEST_READ and self._between_chunks and not splice.observer.holds_end
        if self._splice is splice and not (continues and splice.responder.splice_socket() is not None):
            self._stop_splicing()

    def on_unsent(self, rest: bytes) -> None:
        """Receive the bytes of a chunk that the client's socket did not accept."""
        splice = self._splice
        assert splice is not None
        self._stop_splicing()
        splice.responder.write_framed(rest)

    def _stop_splicing(self) -> None:
        splice, self._splice = self._splice, None
        if splice is not None and (loop := self._owner.splice_loop) is not None:
            loop.remove(splice)
            if not self._paused:
                self._transport.resume_reading()

    # Passing on to the sink what the parser recorded

    def _check_head_size(self, size: int) -> bool:
        self._parser.head_bytes += size
        if self._parser.head_bytes > self._owner.limits.max_head_bytes:
            self._fail(EngineGarbled("The engine's response head is too large."))
            return False
        return True

    def _deliver(self, sink: ResponseSink) -> None:
        parser = self._parser
        if parser.head_unreported:
            parser.head_unreported = False
            sink.on_head(parser.status, parser.headers)
        if parser.body_parts and self._sink is sink:
            sink.on_body(parser.take_body())

    def _finish(self, sink: ResponseSink) -> None:
        parser = self._parser
        reusable = parser.keep_alive and not (parser.excess or parser.until_close or self._timer.sending)
        self._sink = None
        self._timer.active = False
        self._stop_splicing()
        if self._paused:
            self.resume()
        if reusable and not self.closed and not self._transport.is_closing():
            self._owner.connection_free(self)
        else:
            self._transport.abort()
        if parser.head_unreported:
            sink.on_whole(parser.status, parser.headers, parser.take_body())
        else:
            sink.on_end(parser.take_body())

    def _fail(self, error: UpstreamError) -> None:
        sink, self._sink = self._sink, None
        self._stop_splicing()
        self._transport.abort()
        if sink is not None:
            sink.on_failure(error)
