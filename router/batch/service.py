"""Everything of `router/batch`, put together for a gateway: the app to mount, the dispatcher to run."""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from starlette.applications import Starlette
from starlette.requests import Request

from router.batch.api.app import make_app
from router.batch.blobs import Blobs
from router.batch.config import BatchConfig
from router.batch.dispatcher import Dispatcher
from router.batch.fleet import Fleet
from router.batch.flex import FlexDesk
from router.batch.store.store import Store
from router.http import Handler, UpstreamPool
from router.http.asgi import asgi_handler

# Threads of offline work share the interpreter with the token path, which would wait 5 ms for each of them.
_SWITCH_S = 0.0005


class BatchService:
    """Make it inside the event loop; `start` and `stop` once. `owner_of` names the caller, or refuses."""

    def __init__(
        self,
        config: BatchConfig,
        fleet: Fleet,
        pool: UpstreamPool,
        owner_of: Callable[[Request], str],
        engine_api_key: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = Store(config.store_url)
        blobs = Blobs(config.files_url)
        self._dispatcher = Dispatcher(self._store, blobs, fleet, pool, config, engine_api_key, clock)
        self.app: Starlette = make_app(
            self._store, blobs, config, owner_of, self._dispatcher.batches_changed, clock
        )
        self._running: asyncio.Task[None] | None = None

    def mounts(self) -> dict[str, Handler]:
        """Handlers by path prefix, for the gateway's routes."""
        handler = asgi_handler(self.app)
        return {"/v1/files": handler, "/v1/batches": handler}

    @property
    def flex(self) -> FlexDesk:
        return self._dispatcher.flex

    def start(self) -> asyncio.Task[None]:
        """The task ends only by `stop` or by a fault: whoever runs the gateway watches it."""
        sys.setswitchinterval(_SWITCH_S)
        self._running = asyncio.create_task(self._dispatcher.run(), name="batch dispatcher")
        return self._running

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        self._store.close()
