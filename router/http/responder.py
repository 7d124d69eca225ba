"""One response on its way to a client: framing, back-pressure, its leaving, and what of a stream it has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol
from uuid import uuid4

from router.errors import OPENAI, ApiError, ErrorShape
from router.http.request import RawHeaders, Request

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
BODILESS = frozenset({204, 304})


class ResponderHost(Protocol):
    """The connection's side of a responder."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def must_close(self) -> bool: ...

    def response_finished(self, *, keep_alive: bool) -> None: ...

    def abort(self) -> None: ...


class Responder:
    """Write ``start``, any number of ``write``, ``finish``; or ``respond`` for all three.

    Writes after the client has left are dropped, so that a producer needs no check of its own. ``write``
    never blocks: a producer that can outrun the client awaits ``drain`` or sets ``on_pause``/``on_resume``.
    """

    __slots__ = (
        "_chunked",
        "_disconnect_callbacks",
        "_extra",
        "_head_only",
        "_host",
        "_http10",
        "_keep_alive",
        "_resumed",
        "_sealed",
        "_to_send",
        "_transport",
        "_unsent",
        "disconnected",
        "error_shape",
        "finished",
        "on_pause",
        "on_resume",
        "paused",
        "started",
        "status",
    )

    def __init__(
        self,
        host: ResponderHost,
        transport: asyncio.Transport,
        *,
        head_only: bool = False,
        http10: bool = False,
        keep_alive: bool = True,
        sealed: bool = False,
    ) -> None:
        """`sealed`: what is written to the transport is not what goes over its socket."""
        self._host = host
        self._sealed = sealed
        self._transport = transport
        self._head_only = head_only
        self._http10 = http10
        self._keep_alive = keep_alive
        self._chunked = False
        self._to_send: int | None = None
        self._unsent = b""
        self._extra: RawHeaders = []
        self.error_shape: ErrorShape = OPENAI
        self._disconnect_callbacks: list[Callable[[], None]] = []
        self._resumed: asyncio.Future[None] | None = None
        self.status: int | None = None
        self.started = False
        self.finished = False
        self.disconnected = False
        self.paused = False
        """The client does not keep up: more than the high-water mark waits for it."""
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    def add_header(self, name: bytes, value: bytes) -> None:
        """Goes out with the response's own headers, also with a refusal. Only before ``start``."""
        self._extra.append((name, value))

    def added(self, name: bytes) -> bytes:
        """The value of a header added above; empty without it."""
        return next((value for given, value in self._extra if given == name), b"")

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` once when the client leaves before ``finish``; at once if it has left already.

        Returns a function that takes the callback back.
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
        """Do not keep the connection alive after this response."""
        self._keep_alive = False

    @property
    def open_ended(self) -> bool:
        """The framing lets the response end at any point: no Content-Length was announced."""
        return self._to_send is None

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head. A Content-Length in ``headers`` sets the framing; without one it is chunked."""
        self._unsent = self._head(status, headers)
        self._host.loop.call_soon(self._send_head)

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """``start`` and ``finish`` in one write."""
        self._unsent = self._head(status, headers)
        self.finish(body)

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        if self.started:
            raise RuntimeError("the response has already started")
        self.started = True
        self.status = status
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        length: int | None = None
        for name, value in (*headers, *self._extra):
            lines.append(b"%b: %b\r\n" % (name, value))
            if len(name) == 14 and name.lower() == b"content-length":
                length = int(value)
        if self._head_only or status in BODILESS:
            self._to_send = 0
        elif length is not None:
            self._to_send = length
        elif self._http10:
            self._keep_alive = False
        else:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self._keep_alive or self._host.must_close:
            self._keep_alive = False
            lines.append(b"connection: close\r\n")
        elif self._http10:
            lines.append(b"connection: keep-alive\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            self._host.abort()
            raise ValueError("a response header contains a line break")
        return head + b"\r\n"

    def _send_head(self) -> None:
        """The head goes out with what follows it at once; alone only when nothing does."""
        head, self._unsent = self._unsent, b""
        if head and not self.disconnected:
            self._transport.write(head)

    def write(self, data: bytes) -> None:
        if self.disconnected or not data:
            return
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else self._counted(data)
        if self._unsent:
            framed = self._unsent + framed
            self._unsent = b""
        self._transport.write(framed)

    def write_chunk(self, framed: bytes, start: int) -> None:
        """``framed[start:-2]``, which comes in chunk framing already; it may leave just so."""
        if self._chunked and not self._unsent and not self.disconnected:
            self._transport.write(framed)
        else:
            self.write(framed[start:-2])

    def free_socket(self) -> int | None:
        """The client's socket, if chunks may be written to it past the transport, where nothing waits."""
        if self._sealed or not self._chunked or self._unsent:
            return None
        if self.disconnected or self._transport.is_closing():
            return None
        if self._transport.get_write_buffer_size():
            return None
        descriptor: int = self._transport.get_extra_info("socket").fileno()
        return descriptor

    def write_rest(self, framed: bytes) -> None:
        """What ``free_socket`` did not take, in its chunk framing."""
        if not self.disconnected:
            self._transport.write(framed)

    def finish(self, tail: bytes = b"") -> None:
        """The response is complete with ``tail``. The connection goes on to its next request."""
        if self.finished:
            return
        self.finished = True
        self._disconnect_callbacks.clear()
        self.on_pause = self.on_resume = None
        if self.disconnected:
            return
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(tail), tail) if tail else b"0\r\n\r\n"
        else:
            last = self._counted(tail)
        if self._to_send:
            # Fewer bytes than announced: only a cut connection tells the client that the body is not whole.
            self._host.abort()
            return
        last, self._unsent = self._unsent + last, b""
        self._transport.write(last)
        self._host.response_finished(keep_alive=self._keep_alive)

    def _counted(self, data: bytes) -> bytes:
        """``data`` of a response whose end is told by a length, or by the connection's end."""
        if self._to_send is None:
            return data
        if self._head_only or self.status in BODILESS:
            return b""
        self._to_send -= len(data)
        if self._to_send < 0:
            self._host.abort()
            raise ValueError("more body than Content-Length announced")
        return data

    def respond(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A whole response of our own."""
        head = [*headers, (b"date", formatdate(usegmt=True).encode())]
        if status not in BODILESS:
            head.append((b"content-length", b"%d" % len(body)))
        self.answer(status, head, body)

    def refuse(self, error: ApiError) -> None:
        """Answer with ``error`` in the shape of the API that was called. Only before ``start``."""
        self.respond(error.status, self.error_shape.body(error), error.headers())

    def abort(self) -> None:
        """Cut the connection: the client sees that the response is not whole."""
        self._host.abort()

    async def drain(self) -> None:
        """Wait until the client has taken enough; returns at once when it keeps up or has left."""
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


# What engines are asked and say.
PIECES = b"x-stream-pieces"
SEED = b"x-stream-seed"
CREATED = b"x-stream-created"
COUNTED = b"x-stream-counts"

LINE = re.compile(rb"^:(?:=[0-9]+(?:/[0-9]+)?=)?[0-9,;-]*\n", re.MULTILINE)
TOKEN = re.compile(rb"[0-9]+")
COUNTS = re.compile(rb"=([0-9]+)(?:/([0-9]+))?=")
CREATED_AT = re.compile(rb'"created(?:_at)?": ?([0-9.]+)')
NOT_TO_BE_CONTINUED = b"-"
MOST_LINES_BYTES = 256 * 1024  # of a stream's lines, some 30,000 tokens: they are held, and read in one go


class SentPieces:
    """What of a stream its client has, in the engine's words: enough for another engine to go on with it.

    Asked to, an engine writes a line in front of each piece of a stream: the tokens of its outputs since the
    last one, as in `:12,13;14;` (workers/answer_middleware.py), in the first also how long the prompt is and
    how much of it was cached. The line is kept and not passed on. Most pieces are one event in one chunk,
    which loses its line in one cut; all else takes the long way.
    """

    __slots__ = ("_created", "_seed", "comment", "lined", "lines", "torn")

    def __init__(self) -> None:
        self.lines = bytearray()
        self.lined = False
        """The engine writes lines."""
        self.torn = False
        """The client has a part of an event."""
        self.comment = b""
        """For the client, in front of what the next engine says."""
        self._seed = uuid4().hex.encode()
        self._created = b""

    @property
    def headers(self) -> RawHeaders:
        """For the engine that begins, and for one that goes on."""
        said = [(PIECES, b"%d" % self.pieces), (SEED, self._seed), (COUNTED, b"1")]
        return [*said, (CREATED, self._created)] if self._created else said

    @property
    def pieces(self) -> int:
        return self.lines.count(b"\n")

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of each of the engine's outputs."""
        each = COUNTS.sub(b"", self.lines).replace(b":", b"").replace(b"\n", b"").split(b";")[:-1]
        return [[int(token) for token in one.split(b",")] if one else [] for one in each]

    @property
    def prompt(self) -> tuple[int, int | None] | None:
        """Its tokens, and how many of them were cached, as the engine that began has said."""
        found = COUNTS.search(self.lines)
        return (int(found[1]), int(found[2]) if found[2] else None) if found else None

    @property
    def generated(self) -> int | None:
        """Tokens; None where the lines do not have them all."""
        whole = len(self.lines) < MOST_LINES_BYTES and NOT_TO_BE_CONTINUED not in self.lines
        return len(TOKEN.findall(COUNTS.sub(b"", self.lines))) if whole else None

    @property
    def why_not(self) -> str | None:
        """Why another engine cannot go on with it."""
        if not self.lined:
            return "not_lined"
        if len(self.lines) >= MOST_LINES_BYTES:
            return "too_long"
        if self.torn:
            return "torn"
        return "not_exact" if NOT_TO_BE_CONTINUED in self.lines else None

    @property
    def can_go_on(self) -> bool:
        return self.why_not is None

    def cut(self, data: bytes) -> bytes:
        """Whole events without their lines."""
        if not self._created and (found := CREATED_AT.search(data)):
            self._created = found[1]
        if len(self.lines) < MOST_LINES_BYTES:
            for line in LINE.findall(data):
                self.lines += line
        return LINE.sub(b"", data)

    def cut_chunk(self, framed: bytes, start: int) -> bytes | None:
        """One piece, in its framing; None: it is not simply that."""
        end = framed.find(b"\n", start) + 1
        if framed[start : start + 1] != b":" or framed[start + 1 : start + 2] == b" ":
            return None
        if len(self.lines) < MOST_LINES_BYTES:
            self.lines += framed[start:end]
        return b"%x\r\n" % (len(framed) - end - 2) + framed[end:]
