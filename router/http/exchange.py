"""What an engine is asked, and who takes its answer."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol, Self
from urllib.parse import urlsplit

from router.errors import UpstreamError
from router.http.message import HOP_BY_HOP, RawHeaders, end_to_end

# Besides the hop-by-hop ones: ours to write (host, content-length), or met here already (expect).
NOT_PASSED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Endpoint(NamedTuple):
    host: str
    port: int

    @classmethod
    @lru_cache(4096)
    def parse(cls, url: str) -> Self:
        """From ``http://host:port`` (a path is ignored)."""
        parts = urlsplit(url)
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
    body: bytes = b""
    repeatable: bool | None = None
    """May it be sent twice when a kept-alive connection turns out dead? None: only a safe method may.

    A generation is repeatable as long as nothing of its answer has been seen: the engine aborts a request
    whose connection is gone, and computing one twice changes nothing but time. A leg of a KV transfer is
    not: its transfer id may be used up.
    """
    first_byte_timeout_s: float | None = None
    chunk_timeout_s: float | None = None

    @property
    def may_repeat(self) -> bool:
        return self.method in SAFE_METHODS if self.repeatable is None else self.repeatable

    def head(self, host: bytes) -> bytes:
        lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (self.method.encode(), self.target, host)]
        lines += [b"%b: %b\r\n" % pair for pair in end_to_end(self.headers, NOT_PASSED)]
        if self.body or self.method not in SAFE_METHODS:
            lines.append(b"content-length: %d\r\n" % len(self.body))
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
