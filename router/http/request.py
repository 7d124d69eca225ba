"""A request as it arrives: bytes parsed under limits, a head, a body that is paused when nobody reads it.

llhttp in its strict mode refuses bare LF, obsolete folding, Content-Length with Transfer-Encoding, duplicate
or malformed Content-Length, and control characters. Here: sizes, HTTP versions, one Host, `chunked` as the
only transfer coding (a proxy that reads another one differently from the engine is how requests are
smuggled), and upgrades, which are ignored as RFC 9110 (7.8) allows. The result does not depend on how the
bytes were split.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NamedTuple, Protocol
from urllib.parse import unquote

import httptools

from router.errors import ApiError, BadRequest, HeadersTooLarge, PayloadTooLarge, UriTooLong
from router.http.limits import ServerLimits

RawHeaders = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade http2-settings".split()
)


class Headers:
    """Header fields in the order received (``raw``), looked up by lower-case name."""

    __slots__ = ("_first", "raw")

    def __init__(self, raw: RawHeaders) -> None:
        self.raw = raw
        self._first: dict[bytes, bytes] | None = None

    def get(self, name: bytes) -> bytes | None:
        """The first value of ``name`` (lower case)."""
        first = self._first
        if first is None:
            first = self._first = {field.lower(): value for field, value in reversed(self.raw)}
        return first.get(name)

    def text(self, name: bytes) -> str | None:
        value = self.get(name)
        return None if value is None else value.decode("latin-1")

    def __contains__(self, name: bytes) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self.raw)


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes] = HOP_BY_HOP) -> RawHeaders:
    """``headers`` without the ones that belong to one connection (RFC 9110, 7.6.1), or are ``dropped``."""
    kept: RawHeaders = []
    named: set[bytes] = set()
    for pair in headers:
        name = pair[0].lower()
        if name not in dropped:
            kept.append(pair)
        elif name == b"connection":
            named |= {token.strip().lower() for token in pair[1].split(b",")}
    # `close` and `keep-alive` are options, not fields; anything else named there must not travel on.
    named -= {b"close", b"keep-alive", b""}
    return [pair for pair in kept if pair[0].lower() not in named] if named else kept


class RequestBody:
    """Read by one handler, fed by one connection. Reading raises the 408, 413 or 400 that ended the body."""

    __slots__ = (
        "_demand",
        "_error",
        "_held",
        "_high",
        "_max_bytes",
        "_pause",
        "_paused",
        "_pieces",
        "_resume",
        "_waiter",
        "complete",
        "keep",
        "length",
        "received",
    )

    def __init__(
        self,
        *,
        length: int | None,
        max_bytes: int,
        high_bytes: int,
        demand: Callable[[], None] | None,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self.length = length
        """From Content-Length; None when chunked."""
        self.received = 0
        self.complete = False
        self.keep: Callable[[int], None] | None = None
        """Told of the bytes of a body that is read whole, as they come; may refuse them."""
        self._max_bytes = max_bytes
        self._high = high_bytes
        self._held = 0
        self._pieces: list[bytes] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._demand = demand
        self._pause = pause
        self._resume = resume

    @property
    def awaited(self) -> bool:
        """A handler is waiting for bytes that have not come."""
        return self._waiter is not None

    @property
    def exhausted(self) -> bool:
        """All of it has been read."""
        return self.complete and not self._pieces

    async def read(self, max_bytes: int | None = None) -> bytes:
        """The whole body; 413 as soon as it is known to exceed ``max_bytes`` (default: the server's)."""
        pieces = await self.read_pieces(max_bytes)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read_pieces(self, max_bytes: int | None = None) -> tuple[bytes, ...]:
        """The whole body in pieces: one of 32 MiB is too long to copy at once. Crumbs are put together."""
        bound = self._max_bytes if max_bytes is None else max_bytes
        pieces: list[bytes] = []
        crumbs: list[bytes] = []
        size = 0
        async for piece in self.pieces(bound):
            if self.keep is not None:
                self.keep(len(piece))
            crumbs.append(piece)
            size += len(piece)
            if size >= _PIECE_BYTES:
                pieces.append(b"".join(crumbs))
                crumbs, size = [], 0
        return (*pieces, b"".join(crumbs)) if crumbs else tuple(pieces)

    async def pieces(self, max_bytes: int) -> AsyncIterator[bytes]:
        """The body piece by piece, whatever the server's own bound for those that are read whole."""
        self.check_length(max_bytes)
        total = 0
        while piece := await self.next_piece():
            total += len(piece)
            if total > max_bytes:
                raise _too_large(max_bytes)
            yield piece

    def check_length(self, max_bytes: int) -> None:
        """413 where the head already announces more."""
        if self.length is not None and self.length > max_bytes:
            raise _too_large(max_bytes)

    async def next_piece(self) -> bytes:
        """What has arrived since the last call, or waits for it; empty at the end."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            self._announce_demand()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        if self._paused:
            self._paused = False
            self._resume()
        return piece

    def _announce_demand(self) -> None:
        demand, self._demand = self._demand, None
        if demand is not None:
            demand()

    def feed(self, data: bytes) -> None:
        self.received += len(data)
        self._held += len(data)
        self._pieces.append(data)
        if self._held > self._high and not self._paused:
            self._paused = True
            self._pause()
        self._wake()

    def end(self) -> None:
        self.complete = True
        self._wake()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._wake()

    def drop(self) -> None:
        """The handler is done: what it left unread is worth no memory."""
        self._pieces.clear()
        self._held = 0
        if self._paused:
            self._paused = False
            self._resume()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _too_large(bound: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than {bound} bytes; send a smaller one.")


class Request(NamedTuple):
    """One request whose head is complete; the body may still be on its way."""

    method: str
    path: str
    """Percent-decoded."""
    raw_path: bytes
    query: bytes
    headers: Headers
    http_version: str
    keep_alive: bool
    body: RequestBody
    """``await body.read()`` for all of it, ``async for piece in body.pieces(bound)`` to stream it."""
    peer: tuple[str, int] | None


# Chunk sizes, extensions and trailers: how many bytes of them a body may carry beside its content.
_PIECE_BYTES = 64 * 1024
FRAMING_ALLOWANCE = 16 * 1024
FRAMING_PER_BODY_BYTE = 8
# llhttp shows a header only when it is complete: a head is fed in slices, so that an endless one is noticed.
HEAD_SLICE = 4096
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")  # routers may disagree on what such a path is


class RequestHead(NamedTuple):
    """The fields of a ``Request`` that its head says, and how its body is framed."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    http_version: str
    keep_alive: bool
    content_length: int | None
    has_body: bool
    expects_continue: bool


class ParserEvents(Protocol):
    def head_complete(self, head: RequestHead) -> None: ...

    def body_received(self, data: bytes) -> None: ...

    def request_complete(self) -> None: ...


class RequestParser:
    """One connection's parser. After ``feed`` has raised, nothing more may be fed."""

    def __init__(self, limits: ServerLimits, events: ParserEvents) -> None:
        self._limits = limits
        self._max_headers, self._max_head_bytes = limits.max_headers, limits.max_head_bytes
        self._events = events
        self._llhttp = httptools.HttpRequestParser(self)
        self._refusal: ApiError | None = None
        self._replaying = False
        self._ignored_upgrade: RequestHead | None = None
        self._head: RequestHead | None = None
        self.in_head = False
        """Part of a head has arrived, not all of it."""
        self._raw_bytes = 0
        self._body_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: RawHeaders = []
        self._head_bytes = 0
        self._raw_bytes = 0
        self._body_bytes = 0
        self._head = None

    def close(self) -> None:
        """Nothing more is fed. llhttp, this and the connection refer to each other until then."""
        del self._llhttp, self._events

    def feed(self, data: bytes) -> None:
        """Parse ``data``, calling the events in order; raise the refusal that ends this connection."""
        at = 0
        while at < len(data):
            end = len(data) if self._head is not None else at + HEAD_SLICE
            at += self._feed(data if at == 0 and end >= len(data) else data[at:end])

    def _feed(self, data: bytes) -> int:
        """Returns how much of ``data`` was taken: all, but for an upgrade."""
        self._raw_bytes += len(data)
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._resume_without_upgrade()
            return int(upgrade.args[0])
        except httptools.HttpParserCallbackError as error:
            if self._refusal is not None:
                raise self._refusal from None
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise BadRequest(f"This is not a valid HTTP/1.1 request: {error}.", code="bad_http") from None
        self._check_unfinished()
        return len(data)

    def _check_unfinished(self) -> None:
        """Bounds on what llhttp holds without telling: an endless header, chunks that carry nothing."""
        if self.in_head:
            if self._raw_bytes > self._limits.max_head_bytes + self._limits.max_url_bytes:
                raise self._headers_too_large()
        elif self._head is not None:
            framing = self._raw_bytes - self._head_bytes - self._body_bytes
            if framing > FRAMING_ALLOWANCE + FRAMING_PER_BODY_BYTE * self._body_bytes:
                raise BadRequest("The request's chunks carry more framing than content.", code="bad_http")

    def _refuse(self, error: ApiError) -> ApiError:
        self._refusal = error
        return error

    def _bad_http(self, message: str) -> ApiError:
        return self._refuse(BadRequest(message, code="bad_http"))

    def _headers_too_large(self) -> ApiError:
        return self._refuse(
            HeadersTooLarge(
                f"The request's head has more than {self._limits.max_headers} headers or"
                f" {self._limits.max_head_bytes} bytes."
            )
        )

    # Callbacks of llhttp

    def on_message_begin(self) -> None:
        if not self._replaying:
            self._begin()
            self.in_head = True

    def on_url(self, part: bytes) -> None:
        if self._replaying:
            return
        self._url += part
        if len(self._url) > self._limits.max_url_bytes:
            raise self._refuse(UriTooLong(f"The URL is longer than {self._limits.max_url_bytes} bytes."))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is not None:
            return  # a trailer, or a replay: nothing here needs one
        self._head_bytes += len(name) + len(value) + 4
        self._headers.append((name, value.rstrip(b" \t")))
        if len(self._headers) > self._max_headers or self._head_bytes > self._max_head_bytes:
            raise self._headers_too_large()

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self.in_head = False
        head = self._head = self._complete_head()
        if self._llhttp.should_upgrade():
            self._ignored_upgrade = head
        self._events.head_complete(head)

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        self._events.body_received(data)

    def on_message_complete(self) -> None:
        if self._ignored_upgrade is not None and self._ignored_upgrade.has_body:
            return  # llhttp takes an upgrade for the end of the message; the body comes after it
        self._head = None
        self._events.request_complete()

    def _resume_without_upgrade(self) -> None:
        """Go on behind a head that asked for an upgrade: show a fresh parser the head without that wish."""
        head, self._ignored_upgrade = self._ignored_upgrade, None
        self._llhttp = httptools.HttpRequestParser(self)
        if head is None or not head.has_body:
            return
        framing = (
            b"transfer-encoding: chunked"
            if head.content_length is None
            else b"content-length: %d" % head.content_length
        )
        self._replaying = True
        self._llhttp.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        self._replaying = False

    def _complete_head(self) -> RequestHead:
        method = self._llhttp.get_method().decode()
        version = self._llhttp.get_http_version()
        if version not in ("1.1", "1.0"):
            raise self._bad_http(f"HTTP/{version} is not spoken here; use HTTP/1.1.")
        if method == "CONNECT":
            raise self._bad_http("This server is not a tunnel: CONNECT is refused.")
        length: int | None = None
        chunked = expects = False
        hosts = 0
        for field, value in self._headers:
            name = field.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = True
                if value.lower() != b"chunked" or version == "1.0":
                    raise self._bad_http("`chunked` over HTTP/1.1 is the only Transfer-Encoding accepted.")
            elif name == b"host":
                hosts += 1
            elif name == b"expect":
                expects = version == "1.1"
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise self._bad_http("A request has exactly one Host header.")
        raw_path, query = self._split_target(self._url)
        path = unquote(raw_path.decode("ascii"))
        if _CONTROL.search(path):
            raise self._bad_http("The path has a control character; leave it out.")
        return RequestHead(
            method=method,
            path=path,
            raw_path=raw_path,
            query=query,
            headers=Headers(self._headers),
            http_version=version,
            keep_alive=self._llhttp.should_keep_alive(),
            content_length=length,
            has_body=chunked or bool(length),
            expects_continue=expects,
        )

    def _split_target(self, target: bytes) -> tuple[bytes, bytes]:
        if not target.startswith((b"/", b"*")):
            scheme, separator, rest = target.partition(b"://")
            slash = rest.find(b"/")
            if not separator or scheme.lower() not in (b"http", b"https"):
                raise self._bad_http("The request target is not a path.")
            target = rest[slash:] if slash >= 0 else b"/"
        path, _, query = target.partition(b"?")
        return path, query
