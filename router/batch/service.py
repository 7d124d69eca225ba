"""Runs the batch process: `python -m router.batch --config FILE.json`."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvloop
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from router.batch.api import BatchApi
from router.batch.config import BatchConfig, load
from router.batch.dispatch.dispatcher import Dispatcher
from router.batch.dispatch.in_flight import Engines
from router.batch.forwarding import caller_of
from router.batch.metrics import REQUEUED
from router.batch.routes import PREFIXES
from router.batch.store.blobs import Blobs
from router.batch.store.database import reason_of
from router.batch.store.records import OfflineBodyParser
from router.batch.store.store import Store
from router.directory.api.client import DirectoryClient
from router.directory.api.push import BATCH
from router.errors import ANTHROPIC, GatewayConfigError, NotFound, excerpt
from router.http import (
    Endpoint,
    Headers,
    RelayEnd,
    Request,
    Responder,
    Server,
    UpstreamPool,
    UpstreamRequest,
    relay,
)
from router.process import SteadyClock, log_to_stderr
from router.requests.body_parser import Api
from router.requests.fields import OFFLINE_HEADER
from router.requests.parser_pool import ParserPool

log = logging.getLogger("conserve.router.batch")

_NICENESS = 10  # offline work leaves the processor to the relay of interactive turns
_DRAIN_S = 5.0
_TURN_BYTES = 1 << 30  # the gateway has checked its own, lower limit
_OF_THE_HOP = (b"authorization", b"x-conserve-caller")


class BatchService:
    """Serves the Files and Batch APIs and flex turns, and runs the dispatcher. Create it in an event loop."""

    def __init__(self, config: BatchConfig, engines: Callable[[], Engines]) -> None:
        self.config = config
        self._clock = clock = SteadyClock()
        self._store = Store(config.store_url)
        self._pool = UpstreamPool(config.upstream, config.engine_key)
        blobs = Blobs(config.files_url)
        self._dispatcher = Dispatcher(self._store, blobs, engines, self._pool, config, clock)
        changed = self._dispatcher.batches_changed
        self._apis = BatchApi(self._store, blobs, config, self._owner_of, changed, clock)
        self._flex = {api.target.decode(): api for api in Api}
        self._server = Server(self._handle, config.server)
        self._parser_pool = ParserPool()
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Take over the store and serve; return the port."""
        requeued = await asyncio.to_thread(self._store.take_over, self._clock)
        if requeued:
            REQUEUED.inc(requeued)
            log.warning("lines that an earlier process had in flight are queued again requests=%d", requeued)
        self._running = asyncio.create_task(self._dispatcher.run(), name="dispatcher")
        return await self._server.start(self.config.host, self.config.port)

    async def run_until_signal(self) -> bool:
        """Serve until a signal; return False if the dispatcher ended first (store taken over, or error)."""
        assert self._running is not None
        serving = asyncio.create_task(self._server.run_until_signal(_DRAIN_S))
        await asyncio.wait({serving, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            log.critical("the dispatcher ended, and so does this process", exc_info=self._running.exception())
        serving.cancel()
        return not self._running.done()

    async def stop(self) -> None:
        await self._server.drain(0.1)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._parser_pool.close()
        await self._pool.close()
        self._store.close()

    async def _handle(self, request: Request, responder: Responder) -> None:
        if request.path == "/metrics":  # needs no key, like the metrics page of every process
            page = (b"content-type", CONTENT_TYPE_LATEST.encode())
            responder.respond(200, generate_latest(), [page])
        elif request.path.startswith(PREFIXES):
            await self._apis.handle(request, responder)
        elif request.path in self._flex:
            await self._serve_flex(self._flex[request.path], request, responder)
        else:
            raise NotFound(f"There is no {excerpt(request.path)} here.")

    def _owner_of(self, headers: Headers) -> str:
        return caller_of(headers, self.config.key)

    async def _serve_flex(self, api: Api, request: Request, responder: Responder) -> None:
        """Relay a flex turn. If its client disconnects while the turn waits, the turn leaves the queue."""
        if api is Api.MESSAGES:
            responder.error_shape = ANTHROPIC
        space = caller_of(request.headers, self.config.key)
        raw = await request.body.read_pieces(_TURN_BYTES)
        working = asyncio.create_task(self._relay_flex(api, request.headers, space, raw, responder))

        def leave() -> None:
            working.cancel()

        forget = responder.on_disconnect(leave)
        try:
            await working
        except asyncio.CancelledError:
            if not responder.disconnected:
                raise
        finally:
            forget()
            working.cancel()

    async def _relay_flex(
        self, api: Api, headers: Headers, space: str, raw: tuple[bytes, ...], responder: Responder
    ) -> None:
        asked = await self._parser_pool.parse(OfflineBodyParser(space), raw)
        async with self._dispatcher.flex.slot(space, asked) as slot:
            passed = [pair for pair in headers if pair[0].lower() not in _OF_THE_HOP]
            request = UpstreamRequest(
                method="POST",
                target=api.target,
                headers=[*passed, OFFLINE_HEADER],
                body=(asked.body,),
                repeatable=True,
                first_byte_timeout_s=slot.timeout_s,
            )
            engine = Endpoint.parse(f"http://{slot.engine.http}")
            outcome = await relay(self._pool, engine, request, responder)
            if outcome.end is RelayEnd.NOT_STARTED and outcome.error is not None:
                raise outcome.error


def engines_of(directory: DirectoryClient) -> Engines:
    """Return the engines that can serve and their states, as the directory last pushed them."""
    loads = [(info, directory.engines.load(info.engine)) for info in directory.engines.infos()]
    known = [(info, load.state) for info, load in loads if not load.suspect]
    return [(info, state if state.seq else None) for info, state in known]  # 0: it has not reported yet


async def serve(config: BatchConfig) -> bool:
    """Serve until SIGTERM, SIGINT or a failure. Lines wait until the directory is reachable."""
    directory = DirectoryClient(config.directory, BATCH, secret=config.secret)
    service = BatchService(config, lambda: engines_of(directory))
    try:
        port = await service.start()
        await directory.start(f"{config.host}:{port}")
        log.info("serving address=%s:%d", config.host, port)
        return await service.run_until_signal()
    finally:
        await service.stop()
        await directory.stop()


def _yield_the_processor() -> None:
    """Lower the CPU priority of this process, and of its session where Linux schedules by session."""
    os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m router.batch", description=__doc__)
    parser.add_argument(
        "--config", type=Path, required=True, help="a JSON file of router.batch.config.BatchConfig"
    )
    options = parser.parse_args(arguments)
    log_to_stderr()
    try:
        config = load(options.config)
        _yield_the_processor()
        return 0 if uvloop.run(serve(config)) else 1
    except GatewayConfigError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    except (SQLAlchemyError, OSError) as error:
        store = make_url(config.store_url).render_as_string()  # without the password
        log.critical("cannot run: %s; the batch store is %s", " ".join(reason_of(error).split()), store)
        return 1
