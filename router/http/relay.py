"""Relay: one request to an engine, and its response to the client, chunk by chunk as it arrives.

Everything between the two sockets runs in transport callbacks: no queue, no task switch, no parsing of
content. ``relay`` itself sleeps until the exchange is over.
"""

from __future__ import annotations

import logging

from router.errors import EngineLost, Unavailable, UpstreamError
from router.http.exchange import (
    Exchange,
    FetchExchange,
    RelayEnd,
    RelayExchange,
    RelayOutcome,
    UpstreamResponse,
)
from router.http.pool import UpstreamPool
from router.http.response import Responder
from router.http.streams.resume import StreamProgress
from router.http.streams.sse_observer import StreamObserver
from router.http.upstream import Endpoint, UpstreamConnection, UpstreamRequest

log = logging.getLogger("conserve.router.http.relay")

FORWARD_RETRY_S = 2.0


async def relay(
    pool: UpstreamPool,
    endpoint: Endpoint,
    request: UpstreamRequest,
    responder: Responder,
    observer: StreamObserver | None = None,
    *,
    hold: frozenset[int] = frozenset(),
    progress: StreamProgress | None = None,
) -> RelayOutcome:
    """Send ``request`` and pass the response to ``responder``. An engine's failure is returned, not raised.

    ``hold``: statuses whose response is returned instead of passed on (503 while an engine shuts down).
    ``observer`` sees the response's bytes as they pass, and has seen all of them when this returns.
    ``progress`` records a stream that another engine may continue. If ``responder`` has started already, this
    engine continues the stream, and a response that is not its continuation is returned.
    """
    exchange = RelayExchange(pool.loop, responder, observer, hold, progress)
    remove = responder.on_disconnect(exchange.client_left)
    try:
        return await _run(pool, endpoint, request, exchange)
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
    """Pass a request to another process of the fleet, and its answer to the client. Failures are raised.

    ``absent``: message of the 503 that is raised if the process does not answer.
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
    """Send ``request`` and return the whole response, or raise ``UpstreamError``.

    Cancelling the call aborts the request.
    """
    exchange = FetchExchange(pool.loop, max_bytes)
    await _run(pool, endpoint, request, exchange)
    return exchange.result()


async def _run(
    pool: UpstreamPool, endpoint: Endpoint, request: UpstreamRequest, exchange: Exchange
) -> RelayOutcome:
    fresh = False
    try:
        while True:
            try:
                connection = pool.take_idle(endpoint, fresh=fresh) or await pool.acquire(endpoint)
            except UpstreamError as error:
                exchange.on_failure(error)
                return await exchange.ended
            if exchange.ended.done():  # the client left during the wait for a connection
                pool.connection_free(connection)
                return exchange.ended.result()
            exchange.connection = connection
            connection.send(request, exchange)
            if request.stream is not None:
                return await _send_and_wait(exchange, connection, request)
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


async def _send_and_wait(
    exchange: Exchange, connection: UpstreamConnection, request: UpstreamRequest
) -> RelayOutcome:
    sending = exchange.loop.create_task(exchange.send_body(connection, request))
    try:
        return await exchange.ended
    finally:
        sending.cancel()


def _was_stale(connection: UpstreamConnection, outcome: RelayOutcome) -> bool:
    """Return whether the engine closed a kept-alive connection while the request was on its way."""
    return (
        outcome.end is RelayEnd.NOT_STARTED
        and connection.exchanges > 1
        and not connection.answered
        and isinstance(outcome.error, EngineLost)
    )
