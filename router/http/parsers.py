"""HTTP parsers: llhttp, with the limits and checks that it leaves to its users.

llhttp in its strict mode refuses bare LF, obsolete folding, Content-Length with Transfer-Encoding, duplicate
or malformed Content-Length, and control characters. `RequestParser` also limits sizes, checks the HTTP
version, requires exactly one Host, and accepts only the transfer coding `chunked`: requests can be smuggled
where proxy and engine read a coding differently. It ignores upgrades, as RFC 9110 (7.8) allows. The result
does not depend on how the bytes were split.
"""

from __future__ import annotations

import re
from typing import Protocol
from urllib.parse import unquote

import httptools

from router.errors import ApiError, BadRequest, HeadersTooLarge, UriTooLong
from router.http.limits import ServerLimits
from router.http.request import Headers, RawHeaders, RequestHead
from router.http.response import BODILESS

# Bytes of chunk sizes, extensions and trailers that a body may have besides its content.
FRAMING_ALLOWANCE = 16 * 1024
FRAMING_PER_BODY_BYTE = 8
# llhttp reports only complete headers: a head is fed in slices, so that an endless header is noticed.
HEAD_SLICE = 4096
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")  # engines may disagree on the meaning of such a path


class RequestEvents(Protocol):
    """Interface that receives the events of a request parser."""

    def head_complete(self, head: RequestHead) -> None: ...

    def body_received(self, data: bytes) -> None: ...

    def request_complete(self) -> None: ...


class RequestParser:
    """Parser of a connection's requests. It must not be fed again after ``feed`` has raised an error."""

    def __init__(self, limits: ServerLimits, events: RequestEvents) -> None:
        self._limits = limits
        self._max_headers, self._max_head_bytes = limits.max_headers, limits.max_head_bytes
        self._events = events
        self._llhttp = httptools.HttpRequestParser(self)
        self._refusal: ApiError | None = None
        self._replaying = False
        self._ignored_upgrade: RequestHead | None = None
        self._head: RequestHead | None = None
        self.in_head = False
        """A part of a head has arrived, but not all of it."""
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
        """Break the reference cycle between llhttp's parser, this object and the connection."""
        del self._llhttp, self._events

    def feed(self, data: bytes) -> None:
        """Parse ``data``, and call the events in order. Raises the refusal that ends the connection."""
        at = 0
        while at < len(data):
            end = len(data) if self._head is not None else at + HEAD_SLICE
            at += self._feed(data if at == 0 and end >= len(data) else data[at:end])

    def _feed(self, data: bytes) -> int:
        """Parse ``data``; return how many of its bytes were consumed: all, unless it asks for an upgrade."""
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
        """Limit data that llhttp holds without reporting it, such as an endless header."""
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

    # llhttp's callbacks

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
            return  # ignore trailers and replayed headers
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
            return  # to llhttp an upgrade ends the message; the body follows
        self._head = None
        self._events.request_complete()

    def _resume_without_upgrade(self) -> None:
        """Ignore a request to upgrade: replace llhttp's parser by one that expects the request's body."""
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
            raise self._bad_http(f"HTTP/{version} is not supported; use HTTP/1.1.")
        if method == "CONNECT":
            raise self._bad_http("This server is not a tunnel: CONNECT is refused.")
        length: int | None = None
        chunked = expects = False
        hosts = 0
        for field, value in self._headers:
            name = field.lower()
            if name == b"content-length":
                if len(value) > 20:  # llhttp bounds the value, but not the zeros before it
                    raise self._bad_http("The Content-Length has more than 20 digits.")
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
            raise self._bad_http("A request must have exactly one Host header.")
        raw_path, query = self._split_target(self._url)
        path = raw_path.decode("ascii")
        if "%" in path:
            path = unquote(path)
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


class ResponseParser:
    """Parser of a connection's responses. The callbacks of llhttp only record what arrived."""

    def __init__(self) -> None:
        self._llhttp = httptools.HttpResponseParser(self)
        self.excess = False
        """Whether the engine sent bytes after the end of a response."""
        self.expect(head_only=False)

    def expect(self, *, head_only: bool) -> None:
        """Prepare for the next response. ``head_only`` says that it has no body, whatever its headers say."""
        self._head_only = head_only
        self.status = 0
        self.headers: RawHeaders = []
        self.head_bytes = 0
        self.head_seen = False
        self.head_unreported = False
        """The head is complete, and the connection has not passed it on yet."""
        self.body_parts: list[bytes] = []
        self.chunk_ended = False
        self.complete = False
        self.keep_alive = False
        self.until_close = False
        """The end of the connection ends the body."""

    def feed(self, data: bytes) -> None:
        self._llhttp.feed_data(data)

    def take_body(self) -> bytes:
        parts, self.body_parts = self.body_parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def on_message_begin(self) -> None:
        if self.complete:
            self.excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_seen:
            self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._llhttp.get_status_code()
        if self.complete or status < 200:
            self.headers = []
            return
        self.status = status
        self.head_unreported = self.head_seen = True
        names = {name.lower() for name, _ in self.headers}
        if self._head_only or status in BODILESS:
            self.complete = True
            self.excess = self.excess or self._head_only
        elif b"content-length" not in names and b"transfer-encoding" not in names:
            self.until_close = True

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.body_parts.append(data)

    def on_chunk_header(self) -> None:
        self.chunk_ended = False

    def on_chunk_complete(self) -> None:
        self.chunk_ended = True

    def on_message_complete(self) -> None:
        if self.head_seen and not self.complete:
            self.complete = True
            self.keep_alive = self._llhttp.should_keep_alive()  # llhttp forgets it with the next byte
