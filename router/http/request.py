"""Request of a client: its head, and a body that pauses the client while its handler does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NamedTuple

from router.errors import ApiError, PayloadTooLarge

RawHeaders = list[tuple[bytes, bytes]]

PIECE_BYTES = 64 * 1024
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
        """Return the first value of the header ``name``, which is in lower case; None if there is none."""
        return self._first_values().get(name)

    def as_text(self) -> dict[str, str]:
        """Return headers as text by lower-case name. If a header is repeated, its first value counts."""
        values = self._first_values().items()
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in values}

    def _first_values(self) -> dict[bytes, bytes]:
        if self._first is None:
            self._first = {field.lower(): value for field, value in reversed(self.raw)}
        return self._first

    def text(self, name: bytes) -> str | None:
        value = self.get(name)
        return None if value is None else value.decode("latin-1")

    def __contains__(self, name: bytes) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self.raw)


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes] = HOP_BY_HOP) -> RawHeaders:
    """Return ``headers`` without those that ``dropped`` or a header Connection names (RFC 9110, 7.6.1)."""
    kept: RawHeaders = []
    named: set[bytes] = set()
    for pair in headers:
        name = pair[0].lower()
        if name not in dropped:
            kept.append(pair)
        elif name == b"connection":
            named |= {token.strip().lower() for token in pair[1].split(b",")}
    # `close` and `keep-alive` are options, not fields; any other name there is a header of this connection.
    named -= {b"close", b"keep-alive", b""}
    return [pair for pair in kept if pair[0].lower() not in named] if named else kept


class RequestBody:
    """Body of a request, fed by its connection and read by its handler.

    Reading raises the 408, 413 or 400 that ended the body.
    """

    def __init__(
        self,
        *,
        length: int | None,
        max_bytes: int,
        high_bytes: int,
        on_demand: Callable[[], None] | None,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self.length = length
        """Content-Length; None when the body is chunked."""
        self.received = 0
        self.complete = False
        self.account: Callable[[int], None] | None = None
        """Called with the size of each piece of a body that is read whole; may raise to refuse it."""
        self._max_bytes = max_bytes
        self._high = high_bytes
        self._held = 0
        self._pieces: list[bytes] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._on_demand = on_demand
        self._pause = pause
        self._resume = resume

    @property
    def awaited(self) -> bool:
        """Return whether the handler is waiting for bytes that have not arrived."""
        return self._waiter is not None

    async def read(self, max_bytes: int | None = None) -> bytes:
        """Return the whole body; raises 413 once it exceeds ``max_bytes`` (default: the server's limit)."""
        pieces = await self.read_pieces(max_bytes)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read_pieces(self, max_bytes: int | None = None) -> tuple[bytes, ...]:
        """Return the whole body in pieces of 64 KiB or more.

        Smaller pieces are joined. Joining a whole body of 32 MiB would block the event loop for too long.
        """
        bound = self._max_bytes if max_bytes is None else max_bytes
        pieces: list[bytes] = []
        small: list[bytes] = []
        size = total = 0
        self.check_length(bound)
        while piece := await self.next_piece():
            total += len(piece)
            if total > bound:
                raise _too_large(bound)
            if self.account is not None:
                self.account(len(piece))
            small.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES:
                pieces.append(b"".join(small))
                small, size = [], 0
        return (*pieces, b"".join(small)) if small else tuple(pieces)

    async def pieces(self, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises 413 beyond ``max_bytes`` instead of the server's limit."""
        self.check_length(max_bytes)
        total = 0
        while piece := await self.next_piece():
            total += len(piece)
            if total > max_bytes:
                raise _too_large(max_bytes)
            yield piece

    def check_length(self, max_bytes: int) -> None:
        """Raise 413 if the head announces more than ``max_bytes``."""
        if self.length is not None and self.length > max_bytes:
            raise _too_large(max_bytes)

    async def next_piece(self) -> bytes:
        """Return the bytes that arrived since the last call, or wait for some; empty at the body's end."""
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
        on_demand, self._on_demand = self._on_demand, None
        if on_demand is not None:
            on_demand()

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
        """Discard the part of the body that the handler left unread."""
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
    """Request with a complete head; its body may still be arriving."""

    method: str
    path: str
    """Path after percent-decoding."""
    raw_path: bytes
    query: bytes
    headers: Headers
    http_version: str
    keep_alive: bool
    body: RequestBody
    """``await body.read()`` for all of it, ``async for piece in body.pieces(bound)`` to stream it."""
    peer: tuple[str, int] | None


class RequestHead(NamedTuple):
    """Head of a request, and the framing of its body."""

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
