"""Fixtures: servers and engines on real sockets, with uvloop as in production."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import uvloop

from router.http import Endpoint, Handler, Server, ServerLimits, UpstreamLimits, UpstreamPool
from tests.router.http.engine import Script, ScriptedEngine
from tests.router.http.gateway import RelayingGateway


@pytest.fixture
def event_loop_policy() -> Iterator[asyncio.AbstractEventLoopPolicy]:
    yield uvloop.EventLoopPolicy()


Serve = Callable[..., Awaitable[tuple[Server, int]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Yield a function that starts servers: ``server, port = await serve(handler, limits)``."""
    servers: list[Server] = []

    async def start(handler: Handler, limits: ServerLimits | None = None) -> tuple[Server, int]:
        server = Server(handler, limits)
        servers.append(server)
        return server, await server.start("127.0.0.1", 0)

    yield start
    for server in servers:
        await server.drain(0.2)


@pytest.fixture
async def pool_of() -> AsyncIterator[Callable[..., UpstreamPool]]:
    pools: list[UpstreamPool] = []

    def make(limits: UpstreamLimits | None = None) -> UpstreamPool:
        pools.append(UpstreamPool(limits))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


EngineOf = Callable[[Script], Awaitable[tuple[ScriptedEngine, Endpoint]]]
Before = Callable[..., Awaitable[tuple[RelayingGateway, int]]]


@pytest.fixture
async def engine_of() -> AsyncIterator[EngineOf]:
    """Yield a function that starts engines: ``engine, endpoint = await engine_of(script)``.

    The engine runs the script once for each connection.
    """
    engines: list[ScriptedEngine] = []

    async def start(script: Script) -> tuple[ScriptedEngine, Endpoint]:
        engine = ScriptedEngine(script)
        engines.append(engine)
        return engine, Endpoint("127.0.0.1", await engine.start())

    yield start
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def before(serve: Serve, pool_of: Callable[..., UpstreamPool], engine_of: EngineOf) -> Before:
    """Return a function that starts an engine behind a gateway: ``gateway, port = await before(script)``."""

    async def start(script: Script, limits: UpstreamLimits | None = None) -> tuple[RelayingGateway, int]:
        _, endpoint = await engine_of(script)
        gateway = RelayingGateway(pool_of(limits), endpoint)
        _, port = await serve(gateway)
        return gateway, port

    return start
