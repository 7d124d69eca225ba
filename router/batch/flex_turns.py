"""A turn of service tier flex, from request to answer. It belongs to no conversation: any engine may do."""

import asyncio

from router.batch.executor import engine_key
from router.batch.flex import FlexDesk
from router.http import Endpoint, RelayEnd, Responder, UpstreamPool, UpstreamRequest, relay
from router.turn import Turn


def is_flex(turn: Turn) -> bool:
    return turn.body.get("service_tier") == "flex"


class FlexTurns:
    def __init__(self, desk: FlexDesk, pool: UpstreamPool, engine_api_key: str = "") -> None:
        self._desk = desk
        self._pool = pool
        self._key = engine_key(engine_api_key)

    async def serve(self, turn: Turn, responder: Responder) -> None:
        """Waits for room; a client that leaves meanwhile gives its place up."""
        working: asyncio.Task[None] = asyncio.create_task(self._serve(turn, responder))
        forget = responder.on_disconnect(lambda: _cancel(working))
        try:
            await working
        except asyncio.CancelledError:
            if not responder.disconnected:
                raise
        finally:
            forget()
            working.cancel()

    async def _serve(self, turn: Turn, responder: Responder) -> None:
        async with self._desk.slot(turn.space, turn.body, len(turn.raw)) as slot:
            request = UpstreamRequest(
                method="POST",
                target=turn.api.target,
                headers=[*turn.headers, *self._key],
                body=slot.body,
                repeatable=True,
                first_byte_timeout_s=slot.timeout_s,
            )
            outcome = await relay(
                self._pool, Endpoint.parse(f"http://{slot.engine.http}"), request, responder
            )
            if outcome.end is RelayEnd.NOT_STARTED and outcome.error is not None:
                raise outcome.error


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
