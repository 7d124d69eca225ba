"""Tests of the key that the gateway sends to engines."""

from typing import Any

from router.http import UpstreamPool, UpstreamRequest, fetch
from tests.router.http.client import Client
from tests.router.http.engine import EngineConnection, answer
from tests.router.http.gateway import RelayingGateway


async def test_the_gateway_replaces_an_engine_key_that_a_client_sends(serve: Any, engine_of: Any) -> None:
    async def script(connection: EngineConnection) -> None:
        while True:
            await connection.request()
            await connection.write(answer(b"{}"))

    engine, endpoint = await engine_of(script)
    pool = UpstreamPool(engine_key="of the engines")
    _, port = await serve(RelayingGateway(pool, endpoint))
    async with await Client.connect(port) as client:
        for _ in range(2):
            client.ask(b"/", b"{}", headers=b"X-ConServe-Key: mine\r\nx-conserve-key: mine\r\n")
            assert (await client.answer()).status == 200
    await fetch(pool, endpoint, UpstreamRequest("GET", b"/", []))
    assert len(engine.requests) == 3
    for request in engine.requests:
        said = [line for line in request.lower().split(b"\r\n") if line.startswith(b"x-conserve-key")]
        assert said == [b"x-conserve-key: of the engines"]
    await pool.close()


async def test_without_a_configured_engine_key_no_key_is_sent(
    serve: Any, engine_of: Any, pool_of: Any
) -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.request()
        await connection.write(answer(b"{}"))

    engine, endpoint = await engine_of(script)
    await fetch(pool_of(), endpoint, UpstreamRequest("GET", b"/", []))
    assert b"x-conserve-key" not in engine.requests[0].lower()
