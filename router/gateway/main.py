"""A gateway process: `python -m router.gateway.main --config FILE.json`."""

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from router.auth.keyring import Keyring
from router.auth.rate_limits import Meters
from router.batch.forwarding import BatchForwarding
from router.directory.api.client import DirectoryClient
from router.errors import GatewayConfigError
from router.gateway.config import GatewayConfig, load
from router.gateway.responses.stored_answers import Answers
from router.gateway.routes import Routes
from router.gateway.turn.handler import TurnHandler
from router.http import (
    Certificate,
    Endpoint,
    Server,
    UpstreamPool,
    reserve_descriptors,
)
from router.metrics import LOOP_HELD, HttpCounts
from router.process import collect_when_idle, log_to_stderr, settle_heap
from router.requests.parser_pool import ParserPool

if TYPE_CHECKING:
    from router.gateway.tracing import TurnTracer

log = logging.getLogger("conserve.router.gateway")

LOOKS_AT_LOOP_S = 0.02


class Gateway:
    """Wires the parts of one gateway process together. Create it inside the event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.directory = DirectoryClient(config.directory, config.name, secret=config.directory_secret)
        self.pool = UpstreamPool(config.limits.upstream, config.engine_key)
        self.directory.engines.on_gone = lambda http: self.pool.fail_endpoint(Endpoint.parse(http))
        self.tracer = _tracer(config)
        self._parser_pool = ParserPool()
        limits = config.limits.server
        self._answers = Answers(
            config.answers, parser_pool=self._parser_pool, most_bytes=limits.max_body_bytes
        )
        turns = TurnHandler(config, self.directory, self.pool, tracer=self.tracer, answers=self._answers)
        self._turns = turns
        self._batch = batch = BatchForwarding(config.batch, self.pool) if config.batch else None
        self._certificate = Certificate(config.tls.cert, config.tls.key) if config.tls else None
        self._keys = Keyring(config.keys, config.keys_file, config.key_limits)
        self._meters = Meters(self._keys.limits_of)
        self.directory.on_spent = self._meters.apply_spent
        routes = Routes(
            config,
            self.directory,
            self.pool,
            turns,
            self._parser_pool,
            self._keys,
            self._meters,
            self._answers,
            batch,
        )
        self.server = Server(routes, limits)
        self.page = Server(routes.own_page, limits)
        routes.status.http_counts = HttpCounts(self.server, self.pool, self._certificate)

    async def start(self) -> int:
        """Begin to serve, and return the port. New conversations wait until the directory is reachable."""
        reserve_descriptors(self.config.limits.connections)
        await self._answers.start()
        host = self.config.metrics_host
        await self.directory.start(f"{host}:{await self.page.start(host, 0)}")
        self._watching = [
            asyncio.create_task(_watch_loop()),
            asyncio.create_task(collect_when_idle(lambda: self.server.idle)),
            asyncio.create_task(self._keys.watch()),
            asyncio.create_task(self._meters.share(self.directory.tell_spent)),
        ]
        if self._certificate is not None:
            self._watching.append(asyncio.create_task(self._certificate.watch()))
        listens = self.config.host, self.config.port
        shared, certificate = self.config.reuse_port, self._certificate
        port = await self.server.start(*listens, reuse_port=shared, certificate=certificate)
        scheme = "https" if certificate is not None else "http"
        log.info("serving gateway=%s address=%s://%s:%d", self.config.name, scheme, self.config.host, port)
        return port

    async def stop(self, drain_s: float) -> None:
        await self.server.drain(drain_s)
        await self._close()

    async def run(self) -> None:
        await self.start()
        settle_heap()
        await self.server.run_until_signal(self.config.drain_s)
        await self._close()

    async def _close(self) -> None:
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        for task in self._watching:
            task.cancel()
        self._turns.prefetcher.close()
        if self._batch is not None:
            await self._batch.close()
        await self._answers.close()
        self._parser_pool.close()
        await self.pool.close()
        await self.directory.stop()
        await self.page.drain(0.1)


async def _watch_loop() -> None:
    """Measure how long callbacks block the event loop. All streams wait meanwhile."""
    while True:
        due, spent = time.monotonic() + LOOKS_AT_LOOP_S, time.thread_time()
        await asyncio.sleep(LOOKS_AT_LOOP_S)
        late = time.monotonic() - due
        LOOP_HELD.observe(max(0.0, min(late, time.thread_time() - spent)))


def _tracer(config: GatewayConfig) -> "TurnTracer | None":
    if config.tracing is None:
        return None
    from router.gateway.tracing import TurnTracer  # loads OpenTelemetry only where tracing is on

    return TurnTracer(config.tracing, config.fleet, config.name)


async def _run(config: GatewayConfig) -> None:
    await Gateway(config).run()


def run(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let running responses end."""
    uvloop.run(_run(config))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m router.gateway.main", description=__doc__)
    parser.add_argument(
        "--config", type=Path, required=True, help="a JSON file of router.gateway.config.GatewayConfig"
    )
    options = parser.parse_args(arguments)
    log_to_stderr()
    try:
        run(load(options.config))
    except GatewayConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
