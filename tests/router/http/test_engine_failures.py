"""Tests of engine failures: the client gets a readable answer or a cut connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.errors import EngineBusy, EngineGarbled, EngineLost, EngineSilent, EngineUnreachable
from router.http import Endpoint, RelayEnd, UpstreamLimits
from tests.router.http.client import Client, eventually
from tests.router.http.engine import STREAM_HEAD, EngineConnection, answer
from tests.router.http.gateway import RelayingGateway
from tests.support.waiting import let_the_loop_turn


async def test_a_stream_whose_engine_dies_ends_in_an_error_event(before: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(STREAM_HEAD)
        await engine.event(b'{"n": 1}')
        await engine.chunk(b'data: {"half')
        await let_the_loop_turn()
        engine.reset()

    gateway, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        await client.head()
        events = b"".join(await client.chunks()).split(b"\n\n")
        assert await client.rest() == b""
    assert events[0] == b'data: {"n": 1}'
    assert set(json.loads(events[1].removeprefix(b"data: "))["error"]) == {"message", "type", "param", "code"}
    assert events[2:] == [b""]
    outcome = gateway.outcomes[0]
    assert (outcome.end, outcome.status) == (RelayEnd.BROKEN, 200)
    assert isinstance(outcome.error, EngineLost)


async def test_a_stream_whose_engine_falls_silent_ends_in_an_error_event(before: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(STREAM_HEAD)
        await engine.event(b"1")
        await engine.gone()

    gateway, port = await before(script, UpstreamLimits(chunk_timeout_s=0.2))
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        await client.head()
        chunks = await client.chunks()
    assert b"engine_timeout" in chunks[-1]
    assert gateway.pool.stats.connections == 0
    assert isinstance(gateway.outcomes[0].error, EngineSilent)


async def test_the_clients_connection_is_cut_if_an_answer_ends_before_its_announced_length(
    before: Any,
) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
        await let_the_loop_turn()
        engine.reset()

    gateway, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.answer()
    assert gateway.outcomes[0].end is RelayEnd.BROKEN


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (b"", EngineLost),
        (b"HTTP/1.1 200 OK\r\ncontent-le", EngineLost),
        (b"SSH-2.0-OpenSSH\r\n", EngineGarbled),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000, EngineGarbled),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", EngineGarbled),
    ],
)
async def test_the_relay_returns_the_error_of_an_engine_that_fails_before_its_answer(
    before: Any, written: bytes, error: type[Exception]
) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(written)

    gateway, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        got = await client.answer()
        assert (got.status, got.error["type"]) == (502, "server_error")
        client.ask(b"/", b"{}")
        assert (await client.answer()).status == 502
    assert gateway.outcomes[0].end is RelayEnd.NOT_STARTED
    assert isinstance(gateway.outcomes[0].error, error)


async def test_a_client_is_told_that_an_absent_engine_is_unreachable(serve: Any, pool_of: Any) -> None:
    gateway = RelayingGateway(pool_of(), Endpoint("127.0.0.1", 1))
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        assert (await client.answer()).error["code"] == "engine_unreachable"
    assert isinstance(gateway.outcomes[0].error, EngineUnreachable)
    assert gateway.pool.stats.connections == 0


async def test_a_client_gets_a_504_if_the_engine_sends_nothing(before: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.gone()

    _, port = await before(script, UpstreamLimits(first_byte_timeout_s=0.2))
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        got = await client.answer()
    assert (got.status, got.error["code"]) == (504, "engine_timeout")


async def test_a_request_on_a_dead_kept_alive_connection_is_sent_again(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    """The engine closes the connection while a request is on its way, which is then sent again."""

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(answer(b"%d" % engine.number))
        await engine.request()
        engine.reset()

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    gateway.repeatable = True
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        for expected in (b"0", b"1"):
            client.ask(b"/", b"{}")
            assert (await client.answer()).body == expected
    assert gateway.pool.stats.stale_retries == 1
    assert [len(connection.requests) for connection in engine.connections] == [2, 1]


async def test_a_request_that_is_not_repeatable_is_sent_once(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(answer(b"first"))
        await engine.request()
        engine.reset()

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        await client.answer()
        client.ask(b"/", b"{}")
        assert (await client.answer()).error["code"] == "engine_lost"
    assert len(engine.connections) == 1


async def test_a_request_whose_answer_began_is_not_repeated(serve: Any, pool_of: Any, engine_of: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(answer(b"first"))
        await engine.request()
        await engine.write(b"HTTP/1.1 2")
        await let_the_loop_turn()
        engine.reset()

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    gateway.repeatable = True
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        for status in (200, 502):
            client.ask(b"/", b"{}")
            assert (await client.answer()).status == status
    assert len(engine.connections) == 1


async def test_a_request_on_a_new_connection_that_dies_is_not_repeated(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        engine.reset()

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    gateway.repeatable = True
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        assert (await client.answer()).status == 502
    assert len(engine.connections) == 1


async def test_surplus_bytes_after_an_engines_answer_are_not_taken_for_the_next_answer(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    """A second client must not get bytes that an engine sent after the first answer (response smuggling)."""

    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            await engine.write(answer(b"mine") + answer(b"not asked for", b"500 Oops"))

    engine, endpoint = await engine_of(script)
    _, port = await serve(RelayingGateway(pool_of(), endpoint))
    async with await Client.connect(port) as client:
        for _ in range(3):
            client.ask(b"/", b"{}")
            got = await client.answer()
            assert (got.status, got.body) == (200, b"mine")
    assert len(engine.connections) == 3


@pytest.mark.parametrize("wait_s", [0.2, 600.0])
async def test_a_request_beyond_the_connection_limit_of_an_engine_waits_or_gets_a_503(
    serve: Any, pool_of: Any, engine_of: Any, wait_s: float
) -> None:
    release = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            await release.wait()
            await engine.write(answer(b"ok"))

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(UpstreamLimits(max_connections=2, acquire_timeout_s=wait_s)), endpoint)
    _, port = await serve(gateway)
    clients = [await Client.connect(port) for _ in range(3)]
    for client in clients[:2]:
        client.ask(b"/", b"{}")
    await eventually(lambda: len(engine.requests) == 2)
    clients[2].ask(b"/", b"{}")
    if wait_s < 1:
        refused = clients.pop()
        got = await refused.answer()
        refused.abort()
        assert (got.status, got.error["code"]) == (503, "engine_busy")
        assert isinstance(gateway.outcomes[0].error, EngineBusy)
    await let_the_loop_turn()
    release.set()
    for client in clients:
        assert (await client.answer()).body == b"ok"
        client.abort()
    assert len(engine.connections) == 2


async def test_a_request_that_waits_for_a_connection_opens_one_when_another_connection_dies(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    both_asked = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await both_asked.wait()
        if engine.number:
            await engine.write(answer(b"second"))
        engine.writer.close()

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(UpstreamLimits(max_connections=1, acquire_timeout_s=600)), endpoint)
    _, port = await serve(gateway)
    async with await Client.connect(port) as first, await Client.connect(port) as second:
        first.ask(b"/", b"{}")
        await eventually(lambda: engine.requests)
        second.ask(b"/", b"{}")
        await let_the_loop_turn()
        both_asked.set()
        assert (await first.answer()).status == 502
        assert (await second.answer()).body == b"second"


async def test_the_pool_closes_a_connection_to_an_engine_after_its_idle_timeout(
    pool_of: Any, engine_of: Any
) -> None:
    closed = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        await engine.gone()
        closed.set()

    _, endpoint = await engine_of(script)
    pool = pool_of(UpstreamLimits(idle_timeout_s=0.1))
    pool.connection_free(await pool.acquire(endpoint))
    await eventually(closed.is_set)
    await eventually(lambda: not pool.stats.connections)
