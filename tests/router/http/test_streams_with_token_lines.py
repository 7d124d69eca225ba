"""Tests of the comments with token ids in an engine's stream: the gateway stores and removes them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from router.http import RelayEnd, Request, Responder, StreamProgress
from router.http.streams.resume import MAX_LINES_BYTES
from router.http.streams.socket_splice import SpliceStream
from tests.router.http.client import Client, eventually
from tests.router.http.engine import EngineConnection
from tests.router.http.gateway import RelayingGateway

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-stream-pieces: 0\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def token(text: str) -> bytes:
    return b'data: {"delta":{"content":"%b"},"finish_reason":null}\n\n' % text.encode()


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def lined(number: int) -> bytes:
    return b":%d;\n%b" % (1000 + number, token(f"t{number}"))


async def test_the_splice_loop_stores_token_lines_and_removes_them_from_the_stream(
    serve: Any, pool_of: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverted: list[bytes] = []
    monkeypatch.setattr(
        SpliceStream, "divert", lambda self, data: (diverted.append(data), self.connection.on_diverted(data))
    )
    taken = asyncio.Semaphore(0)

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(HEAD)
        for number in range(30):
            await engine.chunk(lined(number))
            await taken.acquire()
        engine.reset()

    _, endpoint = await engine_of(script)
    progress = StreamProgress()
    gateway = RelayingGateway(pool_of(), endpoint, progress=progress)
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        _, headers = await client.head()
        assert "x-stream-pieces" not in headers
        for number in range(30):
            assert await client.chunk() == token(f"t{number}")
            taken.release()
        await eventually(lambda: gateway.outcomes)
        assert gateway.outcomes[0].end is RelayEnd.RESUMABLE
        assert progress.outputs == [[1000 + number] for number in range(30)]
        assert (progress.events, progress.obstacle) == (30, None)
        assert [data for data in diverted if data] == [], "no token was diverted"


@pytest.mark.parametrize("seed", range(8))
async def test_token_lines_are_removed_however_the_bytes_are_split(
    serve: Any, pool_of: Any, engine_of: Any, seed: int
) -> None:
    """Events have 0, 1 or 3 tokens, some with comments between. The stream is cut at a random byte."""
    rng = random.Random(seed)
    pieces, tokens, bare = [], [], []
    for number in range(40):
        ids = [rng.randrange(200_000) for _ in range(rng.choice([0, 1, 1, 1, 3]))]
        events = rng.choice([token(f"t{number}"), b"event: x\n" + token("\\n: no line")])
        tokens.append(ids)
        bare.append(events)
        pieces.append(b":" + b"".join(b"%d;" % one for one in ids) + b"\n" + events)
        if rng.random() < 0.1:
            pieces.append(b": keep-alive\n\n")
            bare.append(b": keep-alive\n\n")
            tokens.append([])
    raw = b"".join(map(chunked, pieces))
    end = rng.randrange(len(raw) // 2, len(raw))

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(HEAD)
        at = 0
        while at < end:
            size = rng.choice([1, 7, 100, 1000])
            await engine.write(raw[at : min(end, at + size)])
            at += size
            await asyncio.sleep(0.001)
        engine.writer.close()

    _, endpoint = await engine_of(script)
    progress = StreamProgress()
    gateway = RelayingGateway(pool_of(), endpoint, progress=progress)

    async def handle(request: Request, responder: Responder) -> None:
        await gateway(request, responder)
        responder.finish()

    _, port = await serve(handle)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        await client.head()
        await eventually(lambda: gateway.outcomes)
        got = b"".join(await client.chunks())
        assert gateway.outcomes[0].end is RelayEnd.RESUMABLE
        whole = [b"".join(bare[:n]) for n in range(len(bare) + 1)]
        upto = whole.index(got)
        assert progress.obstacle is None
        assert progress.events == upto - got.count(b": keep-alive\n\n")
        assert [t for one in progress.outputs for t in one] == [t for ids in tokens[:upto] for t in ids]


async def test_a_stream_of_which_the_client_has_a_part_of_an_event_cannot_resume(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(HEAD + chunked(lined(0)))
        await engine.write(b"%x\r\n:7;\ndata: " % 200_000 + b"x" * 100_000)
        await asyncio.sleep(0.2)
        engine.reset()

    _, endpoint = await engine_of(script)
    progress = StreamProgress()
    gateway = RelayingGateway(pool_of(), endpoint, progress=progress)
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        answer = await client.answer()
        assert b"engine_lost" in answer.body
        assert gateway.outcomes[0].end is RelayEnd.BROKEN and progress.obstacle == "torn"


async def test_token_lines_of_one_stream_are_stored_up_to_a_limit(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    taken = asyncio.Semaphore(0)
    tokens = b":" + b"123456;" * 1200 + b"\n"
    number = MAX_LINES_BYTES // len(tokens) + 10

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(HEAD)
        for _ in range(number):
            await engine.chunk(tokens + token("t"))
            await taken.acquire()
        engine.reset()

    _, endpoint = await engine_of(script)
    progress = StreamProgress()
    gateway = RelayingGateway(pool_of(), endpoint, progress=progress)
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        await client.head()
        for _ in range(number):
            assert await client.chunk() == token("t")
            taken.release()
        await eventually(lambda: gateway.outcomes)
    assert gateway.outcomes[0].end is RelayEnd.BROKEN and progress.obstacle == "too_long"
    assert len(progress.lines) < MAX_LINES_BYTES + len(tokens)
