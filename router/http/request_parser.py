"""Bytes to requests: llhttp in its strict mode, plus the limits and the refusals it leaves to us.

llhttp itself refuses bare LF, obsolete folding, Content-Length with Transfer-Encoding, duplicate or malformed
Content-Length, and control characters. Here: sizes, HTTP versions, one Host, `chunked` as the only transfer
coding (a proxy that reads another one differently from the engine is how requests are smuggled), and
upgrades, which are ignored as RFC 9110 (7.8) allows. The result does not depend on how the bytes were split.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from urllib.parse import unquote

import httptools

from router.errors import ApiError, BadRequest, HeadersTooLarge, UriTooLong
from router.http.limits import ServerLimits
from router.http.message import Headers, RawHeaders

# Chunk sizes, extensions and trailers: how many bytes of them a body may carry beside its content.
FRAMING_ALLOWANCE = 16 * 1024
FRAMING_PER_BODY_BYTE = 8
# llhttp shows a header only when it is complete: a head is fed in slices, so that an endless one is noticed.
HEAD_SLICE = 4096


class Head(NamedTuple):
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
    def head_complete(self, head: Head) -> None: ...

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
        self._ignored_upgrade: Head | None = None
        self._head: Head | None = None
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

    def _complete_head(self) -> Head:
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
        path = raw_path.decode("ascii")
        return Head(
            method=method,
            path=unquote(path) if "%" in path else path,
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
