"""Test gateway that relays every request to one engine."""

from __future__ import annotations

from typing import Any

from router.http import (
    Endpoint,
    RelayEnd,
    RelayOutcome,
    Request,
    Responder,
    StreamObserver,
    UpstreamPool,
    UpstreamRequest,
    relay,
)


class RelayingGateway:
    """Handler that relays every request, and records the outcome of each relay."""

    def __init__(self, pool: UpstreamPool, endpoint: Endpoint, **options: Any) -> None:
        self.pool = pool
        self.endpoint = endpoint
        self.options = options
        self.repeatable: bool | None = None
        self.outcomes: list[RelayOutcome] = []
        self.observers: list[StreamObserver] = []

    async def __call__(self, request: Request, responder: Responder) -> None:
        target = request.raw_path + (b"?" + request.query if request.query else b"")
        upstream = UpstreamRequest(
            request.method, target, request.headers.raw, await request.body.read_pieces(), self.repeatable
        )
        observer = StreamObserver()
        self.observers.append(observer)
        outcome = await relay(self.pool, self.endpoint, upstream, responder, observer, **self.options)
        self.outcomes.append(outcome)
        if outcome.error is not None and outcome.end is RelayEnd.NOT_STARTED:
            raise outcome.error
        if outcome.response is not None:
            responder.respond(503, b"held: " + outcome.response.body)
