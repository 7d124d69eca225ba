"""Response to a client: framing, back-pressure, and notification when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

import orjson

from router.errors import JSON_TYPE, OPENAI, ApiError, ErrorShape
from router.http.request import RawHeaders, Request

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
BODILESS = frozenset({204, 304})


class ResponderHost(Protocol):
    """Interface of the client connection that a responder uses."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def must_close(self) -> bool:
        """Return whether the connection cannot carry another request after this response."""

    def response_finished(self, *, keep_alive: bool) -> None: ...

    def abort(self) -> None: ...


class Framing:
    """Encoding of one response: by length, in chunks, or until the connection ends."""

    __slots__ = ("_http10", "chunked", "keep_alive", "no_body", "remaining")

    def __init__(self, *, head_only: bool, http10: bool, keep_alive: bool) -> None:
        self.no_body = head_only
        """The response has no body whatever its headers say: it answers HEAD, or its status allows none."""
        self._http10 = http10
        self.keep_alive = keep_alive
        self.chunked = False
        self.remaining: int | None = None
        """Bytes of the body to come; None when no length was announced."""

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, must_close: bool) -> bytes:
        """Encode the head, and choose the framing. Raises ValueError for a line break in a header."""
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        length: int | None = None
        for name, value in headers:
            lines.append(b"%b: %b\r\n" % (name, value))
            if len(name) == 14 and name.lower() == b"content-length":
                length = int(value)
        if self.no_body or status in BODILESS:
            self.no_body = True
            self.remaining = 0
        elif length is not None:
            self.remaining = length
        elif self._http10:
            self.keep_alive = False
        else:
            self.chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive or must_close:
            self.keep_alive = False
            lines.append(b"connection: close\r\n")
        elif self._http10:
            lines.append(b"connection: keep-alive\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a response header contains a line break")
        return head + b"\r\n"

    def body(self, data: bytes) -> bytes:
        """Encode a part of the body. Raises ValueError for more than the announced length."""
        if self.chunked:
            return b"%x\r\n%b\r\n" % (len(data), data)
        if self.remaining is None:
            return data
        if self.no_body:
            return b""
        self.remaining -= len(data)
        if self.remaining < 0:
            raise ValueError("more body than Content-Length announced")
        return data

    def end(self, tail: bytes) -> bytes:
        """Encode the last part of the body and its end."""
        if not self.chunked:
            return self.body(tail)
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(tail), tail) if tail else b"0\r\n\r\n"


class Responder:
    """Sends a response: ``start``, any number of ``write``, ``finish``; or ``respond`` for all three.

    Writes after the client has left are dropped, so that a producer needs no check of its own. ``write``
    never blocks: a producer that can outrun the client awaits ``drain`` or sets ``on_pause``/``on_resume``.
    """

    def __init__(
        self,
        host: ResponderHost,
        transport: asyncio.Transport,
        *,
        head_only: bool = False,
        http10: bool = False,
        keep_alive: bool = True,
    ) -> None:
        self._host = host
        self._transport = transport
        self._framing = Framing(head_only=head_only, http10=http10, keep_alive=keep_alive)
        self._unsent_head = b""
        self._extra_headers: RawHeaders = []
        self._disconnect_callbacks: list[Callable[[], None]] = []
        self._resumed: asyncio.Future[None] | None = None
        self.error_shape: ErrorShape = OPENAI
        self.status: int | None = None
        self.started = False
        self.finished = False
        self.disconnected = False
        self.paused = False
        """The client does not keep up: more than the high-water mark waits for it."""
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the response, or to a refusal. Only allowed before ``start``."""
        self._extra_headers.append((name, value))

    def added(self, name: bytes) -> bytes:
        """Return the value of an added header; empty if there is none."""
        return next((value for given, value in self._extra_headers if given == name), b"")

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` once if the client disconnects before ``finish``; now if it already has.

        Returns a function that removes the callback.
        """
        if self.disconnected:
            callback()
            return lambda: None
        self._disconnect_callbacks.append(callback)

        def remove() -> None:
            if callback in self._disconnect_callbacks:
                self._disconnect_callbacks.remove(callback)

        return remove

    def close_after(self) -> None:
        """Close the connection after this response."""
        self._framing.keep_alive = False

    @property
    def open_ended(self) -> bool:
        """Return whether the response can end at any point, because it announced no Content-Length."""
        return self._framing.remaining is None

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head. The body is framed by a Content-Length in ``headers``, or else in chunks.

        The head goes out in one write with data that follows before the event loop's next turn.
        """
        self._unsent_head = self._head(status, headers)
        self._host.loop.call_soon(self._send_head)

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole response in one write: ``start`` and ``finish``."""
        self._unsent_head = self._head(status, headers)
        self.finish(body)

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        if self.started:
            raise RuntimeError("the response has already started")
        self.started = True
        self.status = status
        try:
            return self._framing.head(
                status, (*headers, *self._extra_headers), must_close=self._host.must_close
            )
        except ValueError:
            self._host.abort()
            raise

    def _send_head(self) -> None:
        head, self._unsent_head = self._unsent_head, b""
        if head and not self.disconnected:
            self._transport.write(head)

    def write(self, data: bytes) -> None:
        if self.disconnected or not data:
            return
        try:
            framed = self._framing.body(data)
        except ValueError:
            self._host.abort()
            raise
        if self._unsent_head:
            framed = self._unsent_head + framed
            self._unsent_head = b""
        self._transport.write(framed)

    def write_chunk(self, framed: bytes, start: int) -> None:
        """Write ``framed[start:-2]``, which is already framed as a chunk, without copying if possible."""
        if self._framing.chunked and not self._unsent_head and not self.disconnected:
            self._transport.write(framed)
        else:
            self.write(framed[start:-2])

    def splice_socket(self) -> int | None:
        """Return the client's socket if chunks may be written directly to it; otherwise None.

        Nothing may wait in the transport, and the connection may not be encrypted.
        """
        transport = self._transport
        if not self._framing.chunked or self._unsent_head or self.disconnected or transport.is_closing():
            return None
        if transport.get_write_buffer_size() or transport.get_extra_info("ssl_object") is not None:
            return None
        descriptor: int = transport.get_extra_info("socket").fileno()
        return descriptor

    def write_framed(self, rest: bytes) -> None:
        """Write the rest of a chunk that the socket did not accept."""
        if not self.disconnected:
            self._transport.write(rest)

    def finish(self, tail: bytes = b"") -> None:
        """Complete the response with ``tail``. The connection then handles its next request."""
        if self.finished:
            return
        self.finished = True
        self._disconnect_callbacks.clear()
        self.on_pause = self.on_resume = None
        if self.disconnected:
            return
        try:
            last = self._framing.end(tail)
        except ValueError:
            self._host.abort()
            raise
        if self._framing.remaining:
            # Fewer bytes than announced: only a cut connection tells the client that the body is not whole.
            self._host.abort()
            return
        last, self._unsent_head = self._unsent_head + last, b""
        self._transport.write(last)
        self._host.response_finished(keep_alive=self._framing.keep_alive)

    def respond(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send a whole response of our own, with date and length headers."""
        head = [*headers, (b"date", formatdate(usegmt=True).encode())]
        if status not in BODILESS:
            head.append((b"content-length", b"%d" % len(body)))
        self.answer(status, head, body)

    def respond_json(self, value: object, status: int = 200) -> None:
        self.respond(status, orjson.dumps(value), [JSON_TYPE])

    def refuse(self, error: ApiError) -> None:
        """Answer with ``error`` in the format of the requested API. Only allowed before ``start``."""
        self.respond(error.status, self.error_shape.body(error), error.headers())

    def end_with_error(self, error: ApiError) -> None:
        """End a started stream with an error event, or cut it if its framing allows no event."""
        if self.open_ended:
            self.close_after()
            self.finish(self.error_shape.event(error))
        else:
            self.abort()

    def abort(self) -> None:
        """Cut the connection, so that the client notices that the response is incomplete."""
        self._host.abort()

    async def drain(self) -> None:
        """Wait until the client has read enough, unless it keeps up or has disconnected."""
        if self.paused and not self.disconnected:
            if self._resumed is None:
                self._resumed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._resumed)

    def writing_paused(self) -> None:
        self.paused = True
        if self.on_pause is not None:
            self.on_pause()

    def writing_resumed(self) -> None:
        self.paused = False
        self._release_drain()
        if self.on_resume is not None:
            self.on_resume()

    def client_left(self) -> None:
        self.disconnected = True
        self._release_drain()
        callbacks, self._disconnect_callbacks = self._disconnect_callbacks, []
        for callback in callbacks:
            callback()

    def _release_drain(self) -> None:
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None


Handler = Callable[[Request, Responder], Awaitable[None]]
