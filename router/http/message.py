"""What a handler receives: a request, its headers, and the handler's signature.

    async def handler(request: Request, responder: Responder) -> None

A handler answers through the responder (``respond`` for a whole answer, ``start``/``write``/``finish`` for a
streamed one, or ``relay``). It may raise any ``router.errors.ApiError``: before the response has started it
becomes that error's answer; later it cuts the connection. A client that leaves does not cancel the handler:
use ``responder.on_disconnect``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from router.http.body import RequestBody
    from router.http.responder import Responder

RawHeaders = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
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

    def all(self, name: bytes) -> list[bytes]:
        return [value for field, value in self.raw if field.lower() == name]

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


class Request(NamedTuple):
    """One request whose head is complete; the body may still be on its way."""

    method: str
    path: str
    """Percent-decoded."""
    raw_path: bytes
    query: bytes
    headers: Headers
    body: RequestBody
    """``await request.body.read()`` for all of it, ``async for chunk in request.body`` to stream it."""
    peer: tuple[str, int] | None
    http_version: str
    keep_alive: bool


Handler = Callable[["Request", "Responder"], Awaitable[None]]
