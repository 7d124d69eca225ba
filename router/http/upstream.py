"""Connection to an engine: what is asked, who takes the answer, and the parsing of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol, Self, cast
from urllib.parse import urlsplit

import httptools

from router.errors import EngineGarbled, EngineLost, EngineSilent, UpstreamError
from router.http.limits import UpstreamLimits
from router.http.request import HOP_BY_HOP, RawHeaders, RequestBody, end_to_end
from router.http.responder import BODILESS, Responder, SentPieces
from router.http.stream import LARGEST_EVENT, LARGEST_READ, SIZE_LINES, Passage, Pump, StreamObserver

log = logging.getLogger("conserve.router.http.upstream")

ENGINE_KEY = b"x-conserve-key"
# Besides the hop-by-hop ones: ours to write (host, content-length, key), or met here already (expect).
NOT_PASSED = HOP_BY_HOP | {b"host", b"content-length", b"expect", ENGINE_KEY}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Endpoint(NamedTuple):
    host: str
    port: int

    @classmethod
    @lru_cache(4096)
    def parse(cls, url: str) -> Self:
        """From ``host:port`` or ``http://host:port`` (a path is ignored)."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an engine's address; expected http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UpstreamRequest(NamedTuple):
    """What goes to an engine. ``headers`` may be the client's own: hop-by-hop ones are dropped here."""

    method: str
    target: bytes
    """Path and query as they go on the wire."""
    headers: RawHeaders
    body: tuple[bytes, ...] = ()
    """In pieces: what is large is never copied into one."""
    repeatable: bool | None = None
    """May it be sent twice when a kept-alive connection turns out dead? None: only a safe method may.

    A generation is repeatable as long as nothing of its answer has been seen: the engine aborts a request
    whose connection is gone, and computing one twice changes nothing but time. A leg of a KV transfer is
    not: its transfer id may be used up.
    """
    first_byte_timeout_s: float | None = None
    stream: RequestBody | None = None
    """Instead of ``body``: what a client is still sending. It can go out only once."""
    max_bytes: int = 0
    """Of ``stream``, whatever the server's bound for bodies that are read whole."""

    @property
    def may_repeat(self) -> bool:
        if self.stream is not None:
            return False
        return self.method in SAFE_METHODS if self.repeatable is None else self.repeatable

    def head(self, first: bytes) -> bytes:
        """`first`: lines of headers that are the connection's."""
        lines = [b"%b %b HTTP/1.1\r\n%b" % (self.method.encode(), self.target, first)]
        lines += [b"%b: %b\r\n" % pair for pair in end_to_end(self.headers, NOT_PASSED)]
        length = sum(map(len, self.body)) if self.stream is None else self.stream.length
        if length is None:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif length or self.method not in SAFE_METHODS:
            lines.append(b"content-length: %d\r\n" % length)
        lines.append(b"\r\n")
        return b"".join(lines)


class ResponseSink(Protocol):
    """Receives one response: head, body pieces, then one of end and failure (which may come alone).

    The end brings the last piece along, so that it can leave in one write with the end of the response.
    """

    def on_head(self, status: int, headers: RawHeaders) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_chunk(self, framed: bytes, start: int) -> None:
        """One body piece still in its chunk framing; the content, ``framed[start:-2]``, ends an event."""

    def on_end(self, tail: bytes) -> None: ...

    def on_whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Head and end at once: the response came in one piece."""

    def on_failure(self, error: UpstreamError) -> None: ...


QUICK_ACKNOWLEDGEMENT: int | None = getattr(socket, "TCP_QUICKACK", None)
EVENT_CHUNK_END = b"\n\n\r\n"
CHEAPLY_COPIED = 64 * 1024


class UpstreamConnection(asyncio.Protocol):
    """Carries one exchange at a time. The pool owns it; ``send`` lends it to a sink until end or failure."""

    def __init__(
        self,
        endpoint: Endpoint,
        limits: UpstreamLimits,
        pump: Pump | None,
        free: Callable[[UpstreamConnection], None],
        gone: Callable[[UpstreamConnection], None],
        key: str = "",
    ) -> None:
        """``free`` is told when it can carry another request, ``gone`` once, when it is closed."""
        self.endpoint = endpoint
        self._first = b"host: %b\r\n" % str(endpoint).encode()
        if key:
            self._first += b"%b: %b\r\n" % (ENGINE_KEY, key.encode())
        self.exchanges = 0
        """Requests sent on it, this one included."""
        self.closed = False
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the socket is closed."""
        self._pump, self._tell_free, self._tell_gone = pump, free, gone
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._sink: ResponseSink | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._deadline = self._first_byte_s = 0.0
        self._paused = False
        self._excess = False
        self._sending = False  # a request's body is still on its way
        self._writable: asyncio.Future[None] | None = None
        self._passage: Passage | None = None
        self._pumped_events = 0
        self._reset()

    def _reset(self) -> None:
        self._headers: RawHeaders = []
        self._head_bytes = 0
        self._status = 0
        self._head_due = False
        self._head_seen = False
        self._head_only = False
        self._complete = self._keep_alive = False
        self._until_close = False
        self._chunk_ended = self._between_chunks = self._streaming = False
        self._pieces: list[bytes] = []
        self._heard = False
        self.answered = False
        """Something of this exchange's response has arrived."""

    def send(self, request: UpstreamRequest, sink: ResponseSink) -> None:
        self._reset()
        self._head_only = request.method == "HEAD"
        self.exchanges += 1
        self._sink = sink
        self._first_byte_s = request.first_byte_timeout_s or self._limits.first_byte_timeout_s
        self._deadline = self._loop.time() + self._first_byte_s
        # One system call: uvloop writes at once, so that two writes would be two packets.
        head, body = request.head(self._first), request.body
        if sum(map(len, body)) <= CHEAPLY_COPIED:
            self._transport.write(b"".join((head, *body)))
        else:
            self._transport.writelines((head, *body))

    async def send_body(self, body: RequestBody, max_bytes: int) -> None:
        """The body of the request just sent, as it comes from the client, no faster than the peer takes it.

        Raises what the client did wrong; returns early when the exchange is over before the body is.
        """
        self._sending = True
        async for piece in body.pieces(max_bytes):
            if self.closed or self._sink is None:
                return
            self._heard = True
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if body.length is None else piece)
            if self._writable is not None:
                await self._writable
        if body.length is None and not self.closed:
            self._transport.write(b"0\r\n\r\n")
        self._sending = False
        self._heard = True  # the time for the answer begins

    def _acknowledge_late(self) -> None:
        """Acknowledge every second token instead of each: a quarter less of the packets that we send.

        The system falls back to one each after a pause longer than its own delay (40 ms), so that this is
        said again from time to time. Systems without the option go on as they are.
        """
        if QUICK_ACKNOWLEDGEMENT is not None and self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACKNOWLEDGEMENT, 0)

    def pause(self) -> None:
        """Back-pressure: the client does not keep up."""
        self._leave_pump()
        if not self._paused and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Drop the exchange and the connection; the engine sees it at once. The sink hears nothing more."""
        self._sink = None
        self._leave_pump()
        if not self.closed:
            self._transport.abort()

    def lose(self) -> None:
        """The engine is known to be gone."""
        self._fail(EngineLost("The engine is gone; try again."))

    def park(self, now: float) -> None:
        """In the pool, waiting for its next exchange."""
        self._deadline = now + self._limits.idle_timeout_s

    def check(self, now: float) -> None:
        if self._paused:
            self._heard = True
        elif self._heard or self._heard_by_pump():
            self._heard = False
            limit = self._limits.chunk_timeout_s
            if not (self.answered or self._sending):
                limit = max(limit, self._first_byte_s)
            self._deadline = now + limit
            if self._streaming:
                self._acknowledge_late()
        elif now > self._deadline:
            if self._sink is None:
                self._transport.abort()
                return
            what = "stopped in its answer" if self.answered else "did not begin to answer in time"
            self._fail(EngineSilent(f"The engine {what}; try again."))

    def _heard_by_pump(self) -> bool:
        before = self._pumped_events
        if self._passage is not None:
            self._pumped_events = self._passage.observer.events
        return self._pumped_events != before

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not inherit it
        self.socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._transport.abort()  # bytes nobody asked for
            return
        self._heard = self.answered = True
        if self._between_chunks:
            line = SIZE_LINES[len(data)] if len(data) <= LARGEST_EVENT else b"-"
            if data.startswith(line) and data.endswith(EVENT_CHUNK_END):
                # Exactly one chunk, as every token of a stream: it goes on as it came, past the parser, which
                # stands between two chunks before and after it.
                sink.on_chunk(data, len(line))
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._deliver(sink)
            self._fail(EngineGarbled(f"The engine's response is not valid HTTP: {error}."))
            return
        except httptools.HttpParserUpgrade:
            self._fail(EngineGarbled("The engine switched protocols unasked."))
            return
        if not self._head_seen and not self._check_head_size(len(data)):
            return
        if self._complete:
            self._finish(sink)
        else:
            # Not so when a part of the next size line came along.
            self._between_chunks = self._chunk_ended and data.endswith(b"\r\n")
            if self._between_chunks and not self._streaming:
                self._streaming = True
                self._acknowledge_late()
            self._deliver(sink)

    # The pump: it reads for us while each read is one whole event

    def pump_to(
        self, responder: Responder, observer: StreamObserver, event_bytes: int, sent: SentPieces | None
    ) -> None:
        """Between two chunks: what comes next may go straight to the client."""
        pump = self._pump
        if pump is None or self._passage is not None or self._paused:
            return
        client = responder.free_socket()
        if client is not None:
            self._transport.pause_reading()
            self._passage = Passage(
                client, responder, observer, self.read_aside, self.write_aside, event_bytes, sent
            )
            pump.take(self.socket.fileno(), self._passage)

    def read_aside(self, data: bytes) -> None:
        passage = self._passage
        assert passage is not None
        if data:
            try:
                self.data_received(data)
            except Exception:
                # As a transport would; the pump has other streams to serve.
                log.exception("a stream could not be passed on engine=%s", self.endpoint)
                self._leave_pump()
                self._transport.abort()
        goes_on = 0 < len(data) < LARGEST_READ and self._between_chunks and not passage.observer.holds_end
        if self._passage is passage and not (goes_on and passage.responder.free_socket() is not None):
            self._leave_pump()

    def write_aside(self, rest: bytes) -> None:
        passage = self._passage
        assert passage is not None
        self._leave_pump()
        passage.responder.write_rest(rest)

    def _leave_pump(self) -> None:
        pump = self._pump
        if self._passage is not None and pump is not None:
            self._passage = None
            pump.drop(self.socket.fileno())
            if not self._paused:
                self._transport.resume_reading()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def eof_received(self) -> bool:
        if self._until_close and self._sink is not None:
            self._excess = True
            self._finish(self._sink)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._leave_pump()
        self.closed = True
        self.resume_writing()
        self.gone.set_result(None)
        self._tell_gone(self)
        sink, self._sink = self._sink, None
        if sink is not None:
            when = "in the middle of its answer" if self.answered else "before it answered"
            sink.on_failure(EngineLost(f"The connection to the engine was lost {when}; try again."))

    # Callbacks of llhttp: they only note; data_received hands on, head first

    def on_message_begin(self) -> None:
        if self._complete:
            self._excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_seen:
            self._headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._complete or status < 200:
            self._headers = []
            return
        self._status = status
        self._head_due = self._head_seen = True
        names = {name.lower() for name, _ in self._headers}
        if self._head_only or status in BODILESS:
            self._complete = True
            self._excess = self._excess or self._head_only
        elif b"content-length" not in names and b"transfer-encoding" not in names:
            self._until_close = True

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        if self._head_seen and not self._complete:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()  # llhttp forgets it with the next byte

    def _check_head_size(self, size: int) -> bool:
        self._head_bytes += size
        if self._head_bytes > self._limits.max_head_bytes:
            self._fail(EngineGarbled("The engine's response head is too large."))
            return False
        return True

    def _deliver(self, sink: ResponseSink) -> None:
        if self._head_due:
            self._head_due = False
            sink.on_head(self._status, self._headers)
        if self._pieces and self._sink is sink:
            sink.on_body(self._take_pieces())

    def _take_pieces(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _finish(self, sink: ResponseSink) -> None:
        reusable = not (self._excess or self._until_close or self._sending) and self._keep_alive
        self._sink = None
        self._heard = False
        self._leave_pump()
        if self._paused:
            self.resume()
        if reusable and not self.closed and not self._transport.is_closing():
            self._tell_free(self)
        else:
            self._transport.abort()
        if self._head_due:
            sink.on_whole(self._status, self._headers, self._take_pieces())
        else:
            sink.on_end(self._take_pieces())

    def _fail(self, error: UpstreamError) -> None:
        sink, self._sink = self._sink, None
        self._leave_pump()
        self._transport.abort()
        if sink is not None:
            sink.on_failure(error)
