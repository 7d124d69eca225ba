"""The byte path: one request to an engine, its answer to the client, chunk by chunk as it comes.

Everything between the two sockets runs in transport callbacks: no queue, no task switch, no parsing of
content. ``relay`` itself sleeps until the exchange is over.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import NamedTuple

from router.errors import ApiError, EngineGarbled, EngineLost, Unavailable, UpstreamError
from router.http.pool import UpstreamPool
from router.http.request import HOP_BY_HOP, Headers, RawHeaders, end_to_end
from router.http.responder import PIECES, Responder, SentPieces
from router.http.stream import StreamObserver
from router.http.upstream import Endpoint, ResponseSink, UpstreamConnection, UpstreamRequest

log = logging.getLogger("conserve.router.http.relay")

NOT_FOR_CLIENTS = HOP_BY_HOP | {PIECES}
HELD_BODY_BYTES = 1024 * 1024
FORWARD_RETRY_S = 2.0


class RelayEnd(enum.StrEnum):
    COMPLETE = "complete"
    """The whole response went to the client, whatever its status."""
    NOT_STARTED = "not_started"
    """The engine failed before its response began. Nothing was written: the caller may try another, or raise
    ``outcome.error``."""
    HELD = "held"
    """The engine's status was in ``hold``. Nothing was written; ``outcome.response`` has the answer."""
    BROKEN = "broken"
    """The engine failed after its response began. The client has an error event, or a cut connection."""
    CUT = "cut"
    """So it did, in a stream that another engine can go on with: `sent` says where. The client waits."""
    CLIENT_GONE = "client_gone"
    """The client left; the engine's request was aborted."""


class UpstreamResponse(NamedTuple):
    status: int
    headers: Headers
    body: bytes


class RelayOutcome(NamedTuple):
    end: RelayEnd
    status: int | None = None
    error: ApiError | None = None
    """An ``UpstreamError``; what the client did wrong only where its body was streamed."""
    response: UpstreamResponse | None = None


async def relay(
    pool: UpstreamPool,
    endpoint: Endpoint,
    request: UpstreamRequest,
    responder: Responder,
    observer: StreamObserver | None = None,
    *,
    hold: frozenset[int] = frozenset(),
    sent: SentPieces | None = None,
) -> RelayOutcome:
    """Send ``request`` to ``endpoint`` and pass the response to ``responder``; never raises for the engine.

    ``hold``: statuses that are given back instead of passed on (503 of an engine that is going down, say).
    ``observer`` sees the response's bytes in passing and is finished when this returns.
    ``sent``: of a stream that may go on elsewhere. With a ``responder`` that has started, this is where it
    goes on: what is not the rest of that stream is held.
    """
    passing = Passing(pool.loop, responder, observer, hold, sent)
    remove = responder.on_disconnect(passing.client_left)
    try:
        return await _exchange(pool, endpoint, request, passing)
    finally:
        remove()


async def forward(
    pool: UpstreamPool,
    endpoint: Endpoint,
    request: UpstreamRequest,
    responder: Responder,
    *,
    absent: str,
    observer: StreamObserver | None = None,
) -> None:
    """Pass a request on to another of our processes, and its answer back; what fails is raised.

    ``absent`` is what a 503 says when that process does not answer, for whatever reason.
    """
    if request.stream is not None:
        request.stream.check_length(request.max_bytes)
    outcome = await relay(pool, endpoint, request, responder, observer)
    if outcome.end is RelayEnd.NOT_STARTED and outcome.error is not None:
        if isinstance(outcome.error, UpstreamError):
            raise Unavailable(absent, retry_after_s=FORWARD_RETRY_S)
        raise outcome.error


async def fetch(
    pool: UpstreamPool,
    endpoint: Endpoint,
    request: UpstreamRequest,
    *,
    max_bytes: int = 64 * 1024 * 1024,
) -> UpstreamResponse:
    """Send ``request``, give back the whole response; raises ``UpstreamError``. Cancelling aborts it."""
    collecting = Collecting(pool.loop, max_bytes)
    await _exchange(pool, endpoint, request, collecting)
    return collecting.result()


class Exchange(ResponseSink):
    """One request's way to its end: what ``relay`` and ``fetch`` share."""

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
        """A streamed request body; what is wrong with it ends the exchange, unless the answer has begun."""
        assert request.stream is not None
        try:
            await connection.send_body(request.stream, request.max_bytes)
        except ApiError as error:
            if not connection.answered:
                connection.abort()
                self.end(RelayOutcome(RelayEnd.NOT_STARTED, error=error))


async def _exchange(
    pool: UpstreamPool, endpoint: Endpoint, request: UpstreamRequest, exchange: Exchange
) -> RelayOutcome:
    fresh = False
    try:
        while True:
            try:
                connection = pool.idle(endpoint, fresh=fresh) or await pool.acquire(endpoint)
            except UpstreamError as error:
                exchange.on_failure(error)
                return await exchange.ended
            if exchange.ended.done():  # the client left while we were waiting for a connection
                pool.connection_free(connection)
                return exchange.ended.result()
            exchange.connection = connection
            connection.send(request, exchange)
            if request.stream is not None:
                return await _while_sending(exchange, connection, request)
            outcome = await exchange.ended
            if not _was_stale(connection, outcome) or fresh or not request.may_repeat:
                return outcome
            pool.stats.stale_retries += 1
            log.info("kept-alive connection was dead, sending the request again engine=%s", endpoint)
            fresh = True
            exchange.ended = exchange.loop.create_future()
    finally:
        if exchange.connection is not None:
            exchange.connection.abort()
            exchange.connection = None


async def _while_sending(
    exchange: Exchange, connection: UpstreamConnection, request: UpstreamRequest
) -> RelayOutcome:
    sending = exchange.loop.create_task(exchange.send_body(connection, request))
    try:
        return await exchange.ended
    finally:
        sending.cancel()


def _was_stale(connection: UpstreamConnection, outcome: RelayOutcome) -> bool:
    """The engine closed a kept-alive connection while our request was on its way to it."""
    return (
        outcome.end is RelayEnd.NOT_STARTED
        and connection.exchanges > 1
        and not connection.answered
        and isinstance(outcome.error, EngineLost)
    )


class Passing(Exchange):
    """Passes a response on to a client."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        responder: Responder,
        observer: StreamObserver | None,
        hold: frozenset[int],
        sent: SentPieces | None = None,
    ) -> None:
        super().__init__(loop)
        self._sent = sent
        self._continues = responder.started
        self._responder = responder
        self._observer = observer
        self._hold = hold
        self._held: Collecting | None = None
        self._events: EventBoundary | None = None
        self._last: list[bytes] = []  # from where the observer holds the end

    def client_left(self) -> None:
        connection = self.connection
        self.end(RelayOutcome(RelayEnd.CLIENT_GONE, self._responder.status))
        if connection is not None:
            connection.abort()

    def on_head(self, status: int, headers: RawHeaders) -> None:
        sent = self._sent
        if sent is not None:
            sent.lined = status == 200 and any(name.lower() == PIECES for name, _ in headers)
        not_the_rest = self._continues and not (sent is not None and sent.lined)
        running = self.connection
        if not_the_rest and status < 400 and running is not None:
            super().on_failure(UpstreamError("The next engine cannot go on with this answer; try again."))
            running.abort()  # it would generate the whole answer again
            return
        if status in self._hold or not_the_rest:
            self._held = Collecting(self.loop, HELD_BODY_BYTES)
            self._held.on_head(status, headers)
            return
        content_type = _content_type(headers)
        if content_type.startswith(b"text/event-stream"):
            self._events = EventBoundary()
        responder, connection = self._responder, self.connection
        if not self._continues:
            if self._observer is not None:
                self._observer.start(status, content_type)
            responder.start(status, end_to_end(headers, NOT_FOR_CLIENTS))
        elif sent is not None:
            responder.write(sent.comment)
        if connection is not None:
            responder.on_pause, responder.on_resume = connection.pause, connection.resume
            if responder.paused:
                connection.pause()

    def on_body(self, data: bytes) -> None:
        if self._held is not None:
            self._held.on_body(data)
            return
        if self._events is not None:
            data = self._events.whole(data)
            if not data:
                return
            if self._sent is not None:
                self._sent.torn = not data.endswith(ENDS)
                data = self._sent.cut(data)
        if self._observer is not None:
            self._observer.feed(data)
            if self._observer.holds_end:
                self._last.append(data)
                return
        self._responder.write(self._after_last(data))

    def _after_last(self, data: bytes) -> bytes:
        """Behind what was held for longer than an answer may be that is kept."""
        if self._last:
            data = b"".join((*self._last, data))
            self._last.clear()
        return data

    def on_chunk(self, framed: bytes, start: int) -> None:
        events = self._events
        if events is None or events.holding:
            self.on_body(framed[start:-2])
            return
        size = len(framed)
        if self._sent is not None and self._sent.lined:
            without = self._sent.cut_chunk(framed, start)
            if without is None:
                self.on_body(framed[start:-2])
                return
            framed, start = without, without.find(b"\n") + 1
        if self._observer is not None:
            self._observer.feed_chunk(framed)
            if self._observer.holds_end:
                self._last.append(framed[start:-2])
                return
        if self._last:
            self._responder.write(self._after_last(framed[start:-2]))
            return
        self._responder.write_chunk(framed, start)
        if self._observer is not None and self._observer.settled and self.connection is not None:
            self.connection.pump_to(self._responder, self._observer, size, self._sent)

    def on_whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        if status in self._hold or self._sent is not None:
            self.connection = None  # free already
            super().on_whole(status, headers, body)
            return
        if self._observer is not None:
            self._observer.start(status, _content_type(headers))
            if body:
                self._observer.feed(body)

        def answer() -> None:
            self.end(RelayOutcome(RelayEnd.COMPLETE, status))
            self._responder.answer(status, end_to_end(headers), body)

        self._when_kept(answer)

    def on_end(self, tail: bytes) -> None:
        if self._held is not None:
            self._held.on_body(tail)
            try:
                response = self._held.result()
            except UpstreamError as wrong:
                super().on_failure(wrong)
                return
            self.end(RelayOutcome(RelayEnd.HELD, response.status, response=response))
            return
        if self._events is not None:
            tail = self._events.rest(tail)
            if self._sent is not None:
                tail = self._sent.cut(tail)
        if self._observer is not None and tail:
            self._observer.feed(tail)
        last = self._after_last(tail)

        def finish() -> None:
            self.end(RelayOutcome(RelayEnd.COMPLETE, self._responder.status))
            self._responder.finish(last)

        self._when_kept(finish)

    def _when_kept(self, finish: Callable[[], None]) -> None:
        """At once, unless the observer keeps the answer: what a client has the end of is there when it asks
        for it. The connection is free already."""
        kept = self._observer.at_end() if self._observer is not None else None
        if kept is None:
            finish()
            return
        self.connection = self._responder.on_pause = self._responder.on_resume = None

        def go_on(_: object) -> None:
            if not self.ended.done():  # by a client that left meanwhile
                finish()

        kept.add_done_callback(go_on)

    def on_failure(self, error: UpstreamError) -> None:
        responder = self._responder
        if not responder.started or (self._continues and self._events is None):
            super().on_failure(error)
            return
        if self._last:
            responder.write(self._after_last(b""))
        goes_on = self._events is not None and self._sent is not None and self._sent.can_go_on
        if goes_on and isinstance(error, EngineLost):  # one that is silent may come back
            responder.on_pause = responder.on_resume = None
            self.end(RelayOutcome(RelayEnd.CUT, responder.status, error))
            return
        if self._events is not None:
            break_off(responder, error)
        else:
            responder.abort()
        self.end(RelayOutcome(RelayEnd.BROKEN, responder.status, error))


def break_off(responder: Responder, error: ApiError) -> None:
    """The end of a stream that has begun: an error event, where its framing lets one be added."""
    if responder.open_ended:
        responder.close_after()
        responder.finish(responder.error_shape.event(error))
    else:
        responder.abort()


class Collecting(Exchange):
    """Gathers a response, up to a bound."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_bytes: int) -> None:
        super().__init__(loop)
        self._max_bytes = max_bytes
        self._status = 0
        self._headers: RawHeaders = []
        self._pieces: list[bytes] = []
        self._size = 0
        self._error: UpstreamError | None = None

    def on_head(self, status: int, headers: RawHeaders) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._max_bytes:
            self._pieces.append(data)
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
        return UpstreamResponse(self._status, Headers(self._headers), b"".join(self._pieces))


def _content_type(headers: RawHeaders) -> bytes:
    for name, value in headers:
        if len(name) == 12 and name.lower() == b"content-type":
            return value
    return b""


ENDS = (b"\n\n", b"\r\n\r\n")
LARGEST_HELD = 64 * 1024


class EventBoundary:
    """Passes whole events on; keeps the beginning of the next until its end has come.

    An engine writes an event at a time, so that nearly every piece passes as it is. Should the engine die
    inside an event, the error event we add still stands alone. An event longer than ``LARGEST_HELD`` is
    passed in parts.
    """

    __slots__ = ("holding",)

    def __init__(self) -> None:
        self.holding = b""
        """The beginning of an event whose end has not come."""

    def whole(self, data: bytes) -> bytes:
        """What can go to the client now; may be empty."""
        if self.holding:
            data = self.holding + data
            self.holding = b""
        if data.endswith(ENDS):
            return data
        end = max((data.rfind(mark) + len(mark) for mark in ENDS if mark in data), default=0)
        if len(data) - end > LARGEST_HELD:
            return data
        self.holding = data[end:]
        return data[:end]

    def rest(self, tail: bytes) -> bytes:
        """The stream has ended with ``tail``: what is left of it, as it came."""
        held, self.holding = self.holding, b""
        return held + tail
