"""Tests of clients that leave or read slowly: the engine's request is aborted or slowed down."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import psutil
import pytest

from router.http import RelayEnd, Request, Responder, ServerLimits
from tests.router.http.client import HOST, Client, eventually
from tests.router.http.engine import STREAM_HEAD, EngineConnection, answer
from tests.router.http.gateway import RelayingGateway
from tests.support.waiting import let_the_loop_turn


@pytest.mark.parametrize("when", ["before the answer", "in the stream"])
@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_client_that_leaves_aborts_the_engines_request(
    serve: Any, pool_of: Any, engine_of: Any, when: str, how: str
) -> None:
    gone = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        if when == "in the stream":
            await engine.write(STREAM_HEAD)
            await engine.event(b"1")
        try:
            await engine.gone()
        finally:
            gone.set()

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    server, port = await serve(gateway)
    client = await Client.connect(port)
    client.ask(b"/", b"{}")
    if when == "in the stream":
        await client.head()
        await client.chunk()
    else:
        await eventually(lambda: engine.requests)
    if how == "reset":
        client.abort()
    else:
        client.writer.close()
    await eventually(gone.is_set)
    await eventually(lambda: gateway.outcomes)
    assert gateway.outcomes[0].end is RelayEnd.CLIENT_GONE
    await eventually(lambda: gateway.pool.stats.connections == server.stats.connections == 0)


async def test_no_request_is_sent_for_a_client_that_left_while_waiting_for_a_connection(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    from router.http import UpstreamLimits

    release = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            await release.wait()
            await engine.write(answer(b"ok"))

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(UpstreamLimits(max_connections=1)), endpoint)
    _, port = await serve(gateway)
    async with await Client.connect(port) as first:
        first.ask(b"/", b"{}")
        await eventually(lambda: engine.requests)
        second = await Client.connect(port)
        second.ask(b"/", b"{}")
        await let_the_loop_turn()
        second.abort()
        await let_the_loop_turn()
        release.set()
        assert (await first.answer()).body == b"ok"
        first.ask(b"/", b"{}")
        assert (await first.answer()).body == b"ok"
    assert len(engine.requests) == 2


async def test_a_handler_is_notified_when_the_client_leaves(serve: Any) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, responder: Responder) -> None:
        responder.on_disconnect(left.set)
        came.set()
        await left.wait()
        assert responder.disconnected
        responder.respond(200, b"to nobody")

    _, port = await serve(wait)
    client = await Client.connect(port)
    client.ask()
    await eventually(came.is_set)
    client.abort()
    await eventually(left.is_set)


async def test_a_client_that_reads_slowly_pauses_the_engine_and_gets_every_byte(before: Any) -> None:
    block, blocks = b"data: " + b"x" * 65_530 + b"\n\n", 400
    written = 0

    async def script(engine: EngineConnection) -> None:
        nonlocal written
        await engine.request()
        await engine.write(STREAM_HEAD)
        for _ in range(blocks):
            await engine.chunk(block)
            written += 1
        await engine.write(b"0\r\n\r\n")

    gateway, port = await before(script)
    async with await Client.connect(port, receive_buffer=32 * 1024) as client:
        client.ask(b"/", b"{}")
        await client.head()
        before = psutil.Process().memory_info().rss
        await eventually(lambda: written)
        before_that = 0
        while written - before_that > 2:  # until the engine pauses, well before its end
            before_that = written
            await asyncio.sleep(0.2)
        assert written < blocks
        assert psutil.Process().memory_info().rss - before < 20_000_000
        total = 0
        while piece := await client.chunk():
            total += len(piece)
    assert total == blocks * len(block)
    assert gateway.outcomes[0].end is RelayEnd.COMPLETE


async def test_a_client_that_stops_reading_is_cut_off(serve: Any, pool_of: Any, engine_of: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(STREAM_HEAD)
        while True:
            await engine.event(b"x" * 65_536)

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    server, port = await serve(gateway, ServerLimits(write_stall_s=0.3))
    async with await Client.connect(port, receive_buffer=32 * 1024) as client:
        client.ask(b"/", b"{}")
        await client.head()
        await eventually(engine.aborted.is_set)
    await eventually(lambda: gateway.outcomes)
    assert gateway.outcomes[0].end is RelayEnd.CLIENT_GONE
    assert server.stats.timeouts == {"write": 1}


async def test_a_handler_can_wait_until_its_slow_client_has_read_the_answer(serve: Any) -> None:
    produced = 0

    async def produce(request: Request, responder: Responder) -> None:
        nonlocal produced
        responder.start(200, [])
        for _ in range(300):
            responder.write(b"x" * 65_536)
            produced += 1
            await responder.drain()
        responder.finish()

    _, port = await serve(produce)
    async with await Client.connect(port, receive_buffer=32 * 1024) as client:
        client.ask()
        await client.head()
        await asyncio.sleep(0.3)
        assert produced < 300
        assert sum([len(piece) for piece in await client.chunks()]) == 300 * 65_536


def sockets() -> int:
    return len(psutil.Process().net_connections(kind="tcp"))


async def test_no_task_and_no_socket_is_left_when_many_clients_leave_at_once(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            await engine.write(STREAM_HEAD)
            for n in range(50):
                await engine.event(b"%d" % n)
                await asyncio.sleep(0.002)
            await engine.write(b"0\r\n\r\n")

    _, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    server, port = await serve(gateway)
    before_tasks, before_sockets = len(asyncio.all_tasks()), sockets()
    dice = random.Random(7)

    async def come_and_go() -> None:
        client = await Client.connect(port)
        kind = dice.randrange(5)
        if kind == 0:
            client.send(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 100\r\n\r\nhalf")
        elif kind == 1:
            client.send(b"garbage\r\n\r\n")
        else:
            client.ask(b"/", b"{}")
        await asyncio.sleep(dice.random() * 0.08)
        if kind == 4:
            client.writer.write_eof()
            await asyncio.sleep(0.01)
        client.abort()

    for _ in range(6):
        await asyncio.gather(*(come_and_go() for _ in range(50)))
    await eventually(lambda: server.stats.accepted == 300)
    await eventually(lambda: server.stats.connections == 0)
    await gateway.pool.close()
    await eventually(lambda: len(asyncio.all_tasks()) <= before_tasks)
    await eventually(lambda: sockets() <= before_sockets)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Responder)]
