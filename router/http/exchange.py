"""Exchanges with engines: a request, and a receiver that relays the response to a client or collects it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import NamedTuple

from router.errors import ApiError, EngineGarbled, EngineLost, UpstreamError
from router.http.request import HOP_BY_HOP, Headers, RawHeaders, end_to_end
from router.http.response import Responder
from router.http.streams.resume import EVENTS_HEADER, StreamProgress
from router.http.streams.sse_observer import EventBoundary, StreamObserver
from router.http.upstream import ResponseSink, UpstreamConnection, UpstreamRequest

NOT_FOR_CLIENTS = HOP_BY_HOP | {EVENTS_HEADER}
MAX_HELD_BYTES = 1024 * 1024


class RelayEnd(enum.StrEnum):
    """Way in which a relayed exchange ended."""

    COMPLETE = "complete"
    """The whole response went to the client, whatever its status."""
    NOT_STARTED = "not_started"
    """The engine failed before its response began. Nothing was written: the caller may try another engine, or
    raise ``outcome.error``."""
    HELD = "held"
    """The engine's status was in ``hold``. Nothing was written; ``outcome.response`` has the answer."""
    BROKEN = "broken"
    """The engine failed after its response began. The client has an error event, or a cut connection."""
    RESUMABLE = "resumable"
    """The engine was lost in the middle of a stream, and another engine can continue it from ``progress``.
    The client was told nothing and waits."""
    CLIENT_GONE = "client_gone"
    """The client left; the engine's request was aborted."""


class UpstreamResponse(NamedTuple):
    """A whole response of an engine."""

    status: int
    headers: Headers
    body: bytes


class RelayOutcome(NamedTuple):
    """End of a relayed exchange, with its error or with the response that was held back."""

    end: RelayEnd
    status: int | None = None
    error: ApiError | None = None
    """An ``UpstreamError``, or the error of a client whose streamed body is faulty."""
    response: UpstreamResponse | None = None


class Exchange(ResponseSink):
    """One request to an engine, and its outcome: what ``relay`` and ``fetch`` have in common."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connection: UpstreamConnection | None = None
        self.ended: asyncio.Future[RelayOutcome] = loop.create_future()

    def end(self, outcome: RelayOutcome) -> None:
        self.connection = None
        if not self.ended.done():
            self.ended.set_result(outcome)

    def on_whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        self.on_head(status, headers)
        self.on_end(body)

    def on_failure(self, error: UpstreamError) -> None:
        self.end(RelayOutcome(RelayEnd.NOT_STARTED, error=error))

    async def send_body(self, connection: UpstreamConnection, request: UpstreamRequest) -> None:
        """Send the client's body as it arrives. A faulty body ends the exchange if no answer has begun."""
        assert request.stream is not None
        try:
            await connection.send_body(request.stream, request.max_bytes)
        except ApiError as error:
            if not connection.answered:
                connection.abort()
                self.end(RelayOutcome(RelayEnd.NOT_STARTED, error=error))


class RelayExchange(Exchange):
    """Exchange whose response is passed on to a client."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        responder: Responder,
        observer: StreamObserver | None = None,
        hold: frozenset[int] = frozenset(),
        progress: StreamProgress | None = None,
    ) -> None:
        super().__init__(loop)
        self._responder = responder
        self._observer = observer
        self._hold = hold
        self._progress = progress
        self._continues = responder.started
        self._held: FetchExchange | None = None
        self._events: EventBoundary | None = None
        self._withheld: list[bytes] = []  # the answer's end, until the observer has stored the answer

    def client_left(self) -> None:
        connection = self.connection
        self.end(RelayOutcome(RelayEnd.CLIENT_GONE, self._responder.status))
        if connection is not None:
            connection.abort()

    def on_head(self, status: int, headers: RawHeaders) -> None:
        progress, connection = self._progress, self.connection
        if progress is not None:
            progress.response_started(status, headers)
        no_continuation = self._continues and (progress is None or not progress.reported)
        if no_continuation and status < 400 and connection is not None:
            super().on_failure(UpstreamError("The next engine cannot continue this answer; try again."))
            connection.abort()  # it would generate the whole answer again
            return
        if status in self._hold or no_continuation:
            self._held = FetchExchange(self.loop, MAX_HELD_BYTES)
            self._held.on_head(status, headers)
            return
        content_type = _content_type(headers)
        if content_type.startswith(b"text/event-stream"):
            self._events = EventBoundary()
        responder = self._responder
        if not self._continues:
            if self._observer is not None:
                self._observer.start(status, content_type)
            responder.start(status, end_to_end(headers, NOT_FOR_CLIENTS))
        elif progress is not None:
            responder.write(progress.resume_comment)
        if connection is not None:
            responder.on_pause, responder.on_resume = connection.pause, connection.resume
            if responder.paused:
                connection.pause()

    def on_body(self, data: bytes) -> None:
        if self._held is not None:
            self._held.on_body(data)
            return
        if self._events is not None:
            data = self._events.complete(data)
            if not data:
                return
            if self._progress is not None:
                data = self._progress.strip(data)
        observer = self._observer
        if observer is not None:
            observer.feed(data)
            if observer.holds_end:
                self._withheld.append(data)
                return
        self._responder.write(self._with_withheld(data))

    def on_chunk(self, framed: bytes, start: int) -> None:
        events = self._events
        if events is None or events.partial or self._withheld:
            self.on_body(framed[start:-2])
            return
        size = len(framed)
        if self._progress is not None and self._progress.reported:
            stripped = self._progress.strip_chunk(framed, start)
            if stripped is None:
                self.on_body(framed[start:-2])
                return
            framed, start = stripped, stripped.find(b"\n") + 1
        observer = self._observer
        if observer is None:
            self._responder.write_chunk(framed, start)
            return
        observer.feed_chunk(framed)
        if observer.holds_end:
            self._withheld.append(framed[start:-2])
            return
        self._responder.write_chunk(framed, start)
        if observer.first_content_seen and self.connection is not None:
            self.connection.splice_to(self._responder, observer, size, self._progress)

    def on_whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        if status in self._hold or self._progress is not None:
            self.connection = None  # the pool has it already
            super().on_whole(status, headers, body)
            return
        if self._observer is not None:
            self._observer.start(status, _content_type(headers))
            if body:
                self._observer.feed(body)

        def answer() -> None:
            self.end(RelayOutcome(RelayEnd.COMPLETE, status))
            self._responder.answer(status, end_to_end(headers), body)

        self._when_stored(answer)

    def on_end(self, tail: bytes) -> None:
        if self._held is not None:
            self._held.on_body(tail)
            try:
                response = self._held.result()
            except UpstreamError as error:
                super().on_failure(error)
                return
            self.end(RelayOutcome(RelayEnd.HELD, response.status, response=response))
            return
        if self._events is not None:
            tail = self._events.flush(tail)
            if self._progress is not None:
                tail = self._progress.strip(tail)
        if self._observer is not None and tail:
            self._observer.feed(tail)
        last = self._with_withheld(tail)

        def finish() -> None:
            self.end(RelayOutcome(RelayEnd.COMPLETE, self._responder.status))
            self._responder.finish(last)

        self._when_stored(finish)

    def _with_withheld(self, data: bytes) -> bytes:
        """Return the withheld data followed by ``data``; nothing is withheld any more."""
        if self._withheld:
            data = b"".join((*self._withheld, data))
            self._withheld.clear()
        return data

    def _when_stored(self, finish: Callable[[], None]) -> None:
        """Run ``finish`` when the observer has stored the answer, or now if the answer will not be stored.

        As soon as a client has the end of an answer, it may fetch the stored answer. While ``finish`` waits,
        the engine's connection is already back in the pool.
        """
        stored = self._observer.at_end() if self._observer is not None else None
        if stored is None:
            finish()
            return
        self.connection = self._responder.on_pause = self._responder.on_resume = None

        def finish_unless_left(_: object) -> None:
            if not self.ended.done():
                finish()

        stored.add_done_callback(finish_unless_left)

    def on_failure(self, error: UpstreamError) -> None:
        responder = self._responder
        if not responder.started or (self._continues and self._events is None):
            super().on_failure(error)
            return
        if self._withheld:
            responder.write(self._with_withheld(b""))
        resumable = (
            self._events is not None and self._progress is not None and self._progress.obstacle is None
        )
        if resumable and isinstance(error, EngineLost):  # an engine that is only silent may come back
            responder.on_pause = responder.on_resume = None
            self.end(RelayOutcome(RelayEnd.RESUMABLE, responder.status, error))
            return
        if self._events is not None:
            responder.end_with_error(error)
        else:
            responder.abort()
        self.end(RelayOutcome(RelayEnd.BROKEN, responder.status, error))


class FetchExchange(Exchange):
    """Exchange whose response is collected, up to a limit."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_bytes: int) -> None:
        super().__init__(loop)
        self._max_bytes = max_bytes
        self._status = 0
        self._headers: RawHeaders = []
        self._parts: list[bytes] = []
        self._size = 0
        self._error: UpstreamError | None = None

    def on_head(self, status: int, headers: RawHeaders) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._max_bytes:
            self._parts.append(data)
            return
        connection = self.connection
        self.on_failure(EngineGarbled(f"The engine's answer is larger than {self._max_bytes} bytes."))
        if connection is not None:
            connection.abort()

    def on_chunk(self, framed: bytes, start: int) -> None:
        self.on_body(framed[start:-2])

    def on_end(self, tail: bytes) -> None:
        self.on_body(tail)
        self.end(RelayOutcome(RelayEnd.COMPLETE, self._status))

    def on_failure(self, error: UpstreamError) -> None:
        self._error = error
        super().on_failure(error)

    def result(self) -> UpstreamResponse:
        if self._error is not None:
            raise self._error
        return UpstreamResponse(self._status, Headers(self._headers), b"".join(self._parts))


def _content_type(headers: RawHeaders) -> bytes:
    for name, value in headers:
        if len(name) == 12 and name.lower() == b"content-type":
            return value
    return b""
