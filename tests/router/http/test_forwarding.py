"""Tests of `forward`: bodies streamed both ways to another process of the fleet."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import orjson
import pytest

from router.http import (
    Endpoint,
    Request,
    Responder,
    Server,
    ServerLimits,
    UpstreamLimits,
    UpstreamPool,
    UpstreamRequest,
    forward,
)
from tests.router.http.client import HOST, Client, eventually
from tests.router.http.engine import EngineConnection, answer

MAX_BYTES = 60_000_000


def forwarding(pool: UpstreamPool, endpoint: Endpoint, max_bytes: int = MAX_BYTES) -> Any:
    async def handle(request: Request, responder: Responder) -> None:
        headers = [pair for pair in request.headers if pair[0].lower() == b"content-type"]
        headers.append((b"x-owner", b"me"))
        passed = UpstreamRequest(
            method=request.method,
            target=request.raw_path + (b"?" + request.query if request.query else b""),
            headers=headers,
            stream=request.body if request.body.length != 0 else None,
            max_bytes=max_bytes,
        )
        await forward(pool, endpoint, passed, responder, absent="no batches now; try again")

    return handle


async def behind_it(request: Request, responder: Responder) -> None:
    """Answer with the number of bytes in the body, or send 26 MB as fast as the client reads."""
    if request.path == "/count":
        total = 0
        async for piece in request.body.pieces(sys.maxsize):
            total += len(piece)
        seen = {"bytes": total, "owner": request.headers.text(b"x-owner"), "q": request.query.decode()}
        responder.respond(200, orjson.dumps(seen))
        return
    responder.start(200, [])
    for _ in range(400):
        responder.write(b"x" * 65_536)
        await responder.drain()
    responder.finish()


@pytest.fixture
async def in_front(serve: Any, pool_of: Any) -> Any:
    async def start(**limits: Any) -> tuple[Server, int, UpstreamPool]:
        _, behind = await serve(behind_it)
        pool = pool_of()
        server, port = await serve(forwarding(pool, Endpoint("127.0.0.1", behind), **limits))
        return server, port, pool

    return start


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_forwarded_body_may_be_larger_than_the_servers_limit(in_front: Any, framing: str) -> None:
    _, port, pool = await in_front()
    piece, pieces = b"x" * 1_000_000, 50
    assert piece * pieces > b"x" * ServerLimits().max_body_bytes
    async with await Client.connect(port) as client:
        for _ in range(2):
            client.send(b"POST /count?a=b HTTP/1.1\r\n" + HOST)
            if framing == "length":
                client.send(b"content-length: %d\r\n\r\n" % (len(piece) * pieces))
            else:
                client.send(b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(pieces):
                client.send(piece if framing == "length" else b"%x\r\n%b\r\n" % (len(piece), piece))
                await client.writer.drain()
            if framing == "chunked":
                client.send(b"0\r\n\r\n")
            answered = await client.answer()
            assert answered.body == b'{"bytes":50000000,"owner":"me","q":"a=b"}'
    assert pool.stats.connected == 1


async def test_a_forwarded_request_without_a_body_gets_its_streamed_answer(in_front: Any) -> None:
    _, port, _ = await in_front()
    async with await Client.connect(port) as client:
        client.ask(b"/produce")
        assert len((await client.answer()).body) == 400 * 65_536


@pytest.mark.parametrize(
    "framing", [b"content-length: 2000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n7d0\r\n"]
)
async def test_a_forwarded_body_over_the_limit_is_refused(in_front: Any, framing: bytes) -> None:
    _, port, pool = await in_front(max_bytes=1000)
    async with await Client.connect(port) as client:
        client.send(b"POST /count HTTP/1.1\r\n" + HOST + framing + b"x" * 2000)
        answered = await client.answer()
        assert (answered.status, answered.error["code"]) == (413, "request_too_large")
    await eventually(lambda: pool.stats.connections == 0)


async def test_a_request_to_an_absent_process_gets_a_503_with_retry_after(serve: Any, pool_of: Any) -> None:
    _, port = await serve(forwarding(pool_of(), Endpoint("127.0.0.1", 9)))
    async with await Client.connect(port) as client:
        for body in (None, b"{}"):
            client.ask(b"/count", body)
            answered = await client.answer()
            assert (answered.status, answered.error["message"]) == (503, "no batches now; try again")
            assert int(answered.headers["retry-after"]) > 0


async def test_the_forwarded_connection_is_closed_if_the_answer_comes_before_the_upload_ends(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.reader.readuntil(b"\r\n\r\n")
        await connection.write(answer(b'"too much"', b"413 Too Large"))
        await connection.gone()

    engine, endpoint = await engine_of(script)
    pool = pool_of()
    _, port = await serve(forwarding(pool, endpoint))
    async with await Client.connect(port) as client:
        client.send(b"POST /count HTTP/1.1\r\n" + HOST + b"content-length: 100000\r\n\r\nbegin")
        answered = await client.answer()
        assert (answered.status, answered.body) == (413, b'"too much"')
    await eventually(lambda: pool.stats.connections == 0)
    assert len(engine.connections) == 1


async def test_a_client_that_leaves_during_its_upload_aborts_the_forwarded_request(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def script(connection: EngineConnection) -> None:
        await connection.reader.readuntil(b"\r\n\r\n")
        begun.set()
        await connection.gone()
        gone.set()

    _, endpoint = await engine_of(script)
    _, port = await serve(forwarding(pool_of(), endpoint))
    client = await Client.connect(port)
    client.send(b"POST /count HTTP/1.1\r\n" + HOST + b"content-length: 100000\r\n\r\nbegin")
    await asyncio.wait_for(begun.wait(), 10)
    client.abort()
    await asyncio.wait_for(gone.wait(), 10)


async def test_a_process_that_reads_a_forwarded_body_slowly_slows_the_uploading_client(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    go_on = asyncio.Event()

    async def script(connection: EngineConnection) -> None:
        await connection.reader.readuntil(b"\r\n\r\n")
        await go_on.wait()
        await connection.reader.readexactly(40_000_000)
        await connection.write(answer(b"{}"))
        await connection.gone()

    _, endpoint = await engine_of(script)
    _, port = await serve(forwarding(pool_of(), endpoint))
    async with await Client.connect(port) as client:
        client.send(b"POST /count HTTP/1.1\r\n" + HOST + b"content-length: 40000000\r\n\r\n")

        async def send_all() -> None:
            for _ in range(40):
                client.send(b"x" * 1_000_000)
                await client.writer.drain()

        sending = asyncio.create_task(send_all())
        await asyncio.sleep(0.5)
        assert not sending.done()
        go_on.set()
        assert (await client.answer()).status == 200
        await sending


@pytest.mark.parametrize("limit_s", [5.0, 0.2])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_the_first_byte_timeout_begins_after_the_upload(
    serve: Any, pool_of: Any, engine_of: Any, framing: str, limit_s: float
) -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.reader.readuntil(b"0\r\n\r\n" if framing == "chunked" else b"end")
        await asyncio.sleep(0.8)  # a process that stores what it was sent
        await connection.write(answer(b"{}"))
        await connection.gone()

    _, endpoint = await engine_of(script)
    pool = pool_of(UpstreamLimits(first_byte_timeout_s=limit_s, chunk_timeout_s=0.2))
    _, port = await serve(forwarding(pool, endpoint))
    async with await Client.connect(port) as client:
        head = b"POST /count HTTP/1.1\r\n" + HOST
        if framing == "chunked":
            client.send(head + b"transfer-encoding: chunked\r\n\r\n3\r\nend\r\n0\r\n\r\n")
        else:
            client.send(head + b"content-length: 3\r\n\r\nend")
        answered = await client.answer()
        if limit_s > 1:
            assert (answered.status, answered.body) == (200, b"{}")
        else:
            assert (answered.status, answered.error["message"]) == (503, "no batches now; try again")


async def test_a_request_that_finds_no_free_connection_gets_the_same_503_as_for_an_absent_process(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    async def script(connection: EngineConnection) -> None:
        await connection.gone()

    _, endpoint = await engine_of(script)
    pool = pool_of(UpstreamLimits(max_connections=1, acquire_timeout_s=0.1))
    _, port = await serve(forwarding(pool, endpoint))
    async with await Client.connect(port) as first, await Client.connect(port) as second:
        first.ask(b"/count")
        await eventually(lambda: pool.stats.connected == 1)
        second.ask(b"/count")
        answered = await second.answer()
        assert (answered.status, answered.error["message"]) == (503, "no batches now; try again")
        assert int(answered.headers["retry-after"]) > 0
