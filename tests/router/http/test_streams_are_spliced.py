"""Tests of spliced streams: order, back-pressure, ends and time-outs."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from typing import Any

import pytest

from router.http import RelayEnd, UpstreamLimits
from router.http.streams.socket_splice import SpliceLoop, SpliceStream
from router.http.upstream import UpstreamConnection
from tests.router.http.client import Client, eventually
from tests.router.http.engine import STREAM_HEAD, EngineConnection
from tests.router.http.gateway import RelayingGateway

LAST = b'data: {"delta":{},"finish_reason":"stop"}\n\n'


def token(text: str) -> bytes:
    return b'data: {"delta":{"content":"%b"},"finish_reason":null}\n\n' % text.encode()


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def diverted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the data of spliced streams that is diverted because it is not one whole event."""
    seen: list[bytes] = []
    original = SpliceStream.divert

    def record(stream: SpliceStream, data: bytes) -> None:
        seen.append(data)
        original(stream, data)

    monkeypatch.setattr(SpliceStream, "divert", record)
    return seen


async def test_a_spliced_stream_arrives_unchanged_and_its_tokens_are_counted(
    serve: Any, pool_of: Any, engine_of: Any, diverted: list[bytes]
) -> None:
    tokens = [token(f"t{n}") for n in range(30)]
    taken = asyncio.Semaphore(0)

    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            await engine.write(STREAM_HEAD)
            for each in tokens:
                await engine.chunk(each)
                await taken.acquire()
            await engine.write(chunked(LAST) + b"0\r\n\r\n")

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        for turn in range(2):
            client.ask(b"/", b"{}")
            await client.head()
            for n, each in enumerate(tokens):
                assert await client.chunk() == each
                assert n == 0 or gateway.pool.splice_loop.stream_count == 1
                taken.release()
            assert b"".join(await client.chunks()) == LAST
            await eventually(lambda turn=turn: len(gateway.outcomes) > turn)
            assert gateway.pool.splice_loop.stream_count == 0
            seen = gateway.observers[turn].observation()
            assert (seen.events, seen.gaps, seen.finish_reason) == (31, 30, "stop")
            assert seen.first_token_at is not None and seen.last_at > seen.first_token_at
    assert len(engine.connections) == 1, "the connection was kept alive after it was spliced"
    assert diverted == [chunked(LAST) + b"0\r\n\r\n"] * 2, "no token took the long way"


@pytest.mark.parametrize("seed", range(6))
async def test_split_chunks_reach_the_client_whole(before: Any, seed: int) -> None:
    dice = random.Random(seed)
    events = [token("x" * dice.choice((1, 20, 300, 5000))) for _ in range(80)] + [LAST]

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(STREAM_HEAD)
        whole = b"".join(map(chunked, events)) + b"0\r\n\r\n"
        while whole:
            cut = (
                whole.find(b"\n\n\r\n") + 4
                if dice.random() < 0.7
                else dice.choice((1, 40, 400, 9000, 80_000))
            )
            await engine.write(whole[:cut])
            whole = whole[cut:]
            if dice.random() < 0.8:
                await asyncio.sleep(0.001)

    gateway, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        assert (await client.answer()).body == b"".join(events)
        await eventually(lambda: gateway.outcomes)
    assert gateway.outcomes[0].end is RelayEnd.COMPLETE
    assert gateway.observers[0].observation().events == len(events)
    assert gateway.pool.splice_loop.stream_count == 0


async def test_a_slow_reader_of_a_spliced_stream_pauses_the_engine_and_gets_every_event(before: Any) -> None:
    count, written = 8000, 0

    def block(number: int) -> bytes:
        return token(f"{number:05}" + "x" * 3000)

    async def script(engine: EngineConnection) -> None:
        nonlocal written
        await engine.request()
        await engine.write(STREAM_HEAD)
        for n in range(count):
            await engine.chunk(block(n))
            written += 1
            if n < 20:
                await asyncio.sleep(0.001)
        await engine.write(b"0\r\n\r\n")

    gateway, port = await before(script)
    async with await Client.connect(port, receive_buffer=32 * 1024) as client:
        client.ask(b"/", b"{}")
        await client.head()
        await eventually(lambda: written > 20)
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.3)
        assert written < count, "the engine was stopped"
        assert gateway.pool.splice_loop.stream_count == 0
        assert b"".join(await client.chunks()) == b"".join(map(block, range(count)))


async def spliced_script(engine: EngineConnection) -> None:
    await engine.request()
    await engine.write(STREAM_HEAD)
    for n in range(5):
        await engine.chunk(token(str(n)))
        await asyncio.sleep(0.005)


async def test_events_stay_in_order_when_a_client_socket_takes_only_parts_of_chunks(
    before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: original(descriptor, data[:7]))

    async def script(engine: EngineConnection) -> None:
        await spliced_script(engine)
        await engine.write(b"0\r\n\r\n")

    _, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        assert (await client.answer()).body == b"".join(map(token, "01234"))


@pytest.mark.parametrize("how", ["reset", "close", "close at once", "inside an event", "garbage"])
async def test_a_spliced_stream_whose_engine_dies_ends_in_an_error_event(before: Any, how: str) -> None:
    async def script(engine: EngineConnection) -> None:
        await spliced_script(engine)
        if how == "close at once":
            with socket.socket(fileno=os.dup(engine.writer.get_extra_info("socket").fileno())) as own:
                own.send(chunked(token("5")))
                own.shutdown(socket.SHUT_WR)
            await engine.gone()
        elif how == "inside an event":
            await engine.write(chunked(token("half"))[:30])
        elif how == "garbage":
            await engine.write(b"zz\r\n" + token("5") + b"\r\n")
            await engine.gone()
        if how == "reset":
            engine.reset()

    gateway, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        await client.head()
        *whole, last = await client.chunks()
    assert whole == [token(str(n)) for n in range(6 if how == "close at once" else 5)]
    assert last.startswith(b'data: {"error":')
    assert gateway.outcomes[0].end is RelayEnd.BROKEN
    assert gateway.pool.splice_loop.stream_count == 0


async def test_a_client_that_leaves_a_spliced_stream_aborts_the_engines_request(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    gone = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        await spliced_script(engine)
        await engine.gone()
        gone.set()

    _, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    server, port = await serve(gateway)
    client = await Client.connect(port)
    client.ask(b"/", b"{}")
    await client.head()
    for _ in range(5):
        await client.chunk()
    assert gateway.pool.splice_loop.stream_count == 1
    client.abort()
    await eventually(gone.is_set)
    await eventually(lambda: gateway.outcomes)
    assert gateway.outcomes[0].end is RelayEnd.CLIENT_GONE
    assert gateway.pool.splice_loop.stream_count == 0
    await eventually(lambda: gateway.pool.stats.connections == server.stats.connections == 0)


async def test_a_silent_spliced_stream_times_out_and_an_active_one_does_not(before: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await spliced_script(engine)
        for n in range(5, 25):
            await engine.chunk(token(str(n)))
            await asyncio.sleep(0.1)
        await engine.gone()

    _, port = await before(script, UpstreamLimits(chunk_timeout_s=1.0))
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        await client.head()
        *whole, last = await client.chunks()
    assert len(whole) == 25
    assert b"engine_timeout" in last


async def test_an_exception_in_one_spliced_stream_does_not_affect_other_streams(
    before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        await spliced_script(engine)
        await go_on.wait()
        await engine.write(chunked(LAST) + b"0\r\n\r\n")

    def fail_once(connection: UpstreamConnection, data: bytes) -> None:
        monkeypatch.undo()
        raise RuntimeError("a defect")

    gateway, port = await before(script)
    clients = [await Client.connect(port) for _ in range(2)]
    for client in clients:
        client.ask(b"/", b"{}")
        await client.head()
        for _ in range(5):
            await client.chunk()
    assert gateway.pool.splice_loop.stream_count == 2
    monkeypatch.setattr(UpstreamConnection, "data_received", fail_once)
    go_on.set()
    ends = [b"".join(await client.chunks()) for client in clients]
    assert LAST in ends
    assert any(end.startswith(b'data: {"error":') for end in ends)
    for client in clients:
        client.abort()


def test_closing_a_splice_loop_closes_its_file_descriptor() -> None:
    async def open_and_close() -> None:
        loop = SpliceLoop(asyncio.get_running_loop())
        loop.close()
        loop.close()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(open_and_close())
    assert len(os.listdir("/proc/self/fd")) == before
