"""Observer of an answer of the Responses API that will be stored."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

from router.http import StreamObserver

MOST_BYTES = 16 << 20  # of one answer, or of the items of a request that is stored with it
_END = re.compile(rb"(?:\A|[\r\n])event: response\.(?:completed|incomplete)\r?\ndata:")
_ENDS = (b"response.completed", b"response.incomplete")


class AnswerObserver(StreamObserver):
    """Collects an answer's response object. The client gets the answer's end when the answer is stored."""

    __slots__ = ("_ends", "_kept", "_kept_bytes", "_store")

    def __init__(self, store: Callable[[bytes], asyncio.Future[None] | None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._store = store
        self._ends = False  # the event that has the response object has begun
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if self.streamed and any(end in data for end in _ENDS):
            found = [*_END.finditer(data)]  # JSON has no line breaks: no text is mistaken for an event
            if found:
                data, self._ends, self._kept, self._kept_bytes = data[found[-1].end() :], True, [], 0
        if self._ends or not self.streamed:
            self._kept_bytes += len(data)
            self._kept.append(data if self._kept_bytes <= MOST_BYTES else b"")

    @property
    def holds_end(self) -> bool:
        return self._ends and self._kept_bytes <= MOST_BYTES

    def at_end(self) -> asyncio.Future[None] | None:
        return self._store(self.response) if self._status == 200 else None

    @property
    def response(self) -> bytes:
        """Return the JSON that contains the response object; empty if there was none or it was too large."""
        kept = b"".join(self._kept) if self._kept_bytes <= MOST_BYTES else b""
        return kept[: kept.find(b"\n")] if self.streamed else kept
