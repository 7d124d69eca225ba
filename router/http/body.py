"""A request's body while it arrives: bounded, paused when nobody reads, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from router.errors import ApiError, PayloadTooLarge


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
        "length",
        "received",
    )

    def __init__(
        self,
        *,
        length: int | None,
        max_bytes: int,
        high_bytes: int,
        demand: Callable[[], None],
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self.length = length
        """From Content-Length; None when chunked."""
        self.received = 0
        self.complete = False
        self._max_bytes = max_bytes
        self._high = high_bytes
        self._held = 0
        self._pieces: list[bytes] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._demand: Callable[[], None] | None = demand
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
        bound = self._max_bytes if max_bytes is None else max_bytes
        if self.length is not None and self.length > bound:
            raise _too_large(bound)
        pieces: list[bytes] = []
        total = 0
        while piece := await self.next_piece():
            total += len(piece)
            if total > bound:
                raise _too_large(bound)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The body piece by piece, without a bound on its size: the reader keeps its own count."""
        while piece := await self.next_piece():
            yield piece

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
