"""Tests of the relay: it changes nothing but the framing and the hop-by-hop headers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from router.http import RelayEnd, RelayOutcome, UpstreamRequest, fetch
from tests.router.http.client import Client
from tests.router.http.engine import STREAM_HEAD, EngineConnection, answer
from tests.router.http.gateway import RelayingGateway


async def test_a_whole_answer_is_relayed_unchanged(serve: Any, pool_of: Any, engine_of: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            extra = b"X-Request-Id: r-1\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nKeep-Alive: timeout=5\r\n"
            extra += b"Connection: keep-alive, x-hop\r\nX-Hop: 1\r\n"
            await engine.write(answer(b'{"id": "1"}', b"418 Teapot", extra))

    engine, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        headers = b"X-Session-ID: s\r\nTE: trailers\r\nConnection: keep-alive, X-Mine\r\nX-Mine: 1\r\n"
        headers += b"Upgrade-Insecure-Requests: 1\r\nAccept: */*\r\n"
        client.ask(b"/v1/x?y=%20z", b"{}", headers)
        got = await client.answer()
    assert (got.status, got.body, got.chunked) == (418, b'{"id": "1"}', False)
    assert got.headers["x-request-id"] == "r-1"
    assert not {"keep-alive", "x-hop", "connection"} & set(got.headers)
    sent = engine.requests[0].lower()
    assert sent.startswith(b"post /v1/x?y=%20z http/1.1\r\nhost: 127.0.0.1:")
    assert b"x-session-id: s\r\n" in sent
    assert b"upgrade-insecure-requests: 1\r\n" in sent
    assert sent.count(b"host:") == sent.count(b"content-length: 2\r\n") == 1
    assert not any(name in sent for name in (b"\r\nte:", b"x-mine", b"\r\nconnection:"))
    assert gateway.outcomes == [RelayOutcome(RelayEnd.COMPLETE, 418)]


@pytest.mark.parametrize("together", [True, False])
async def test_the_client_gets_the_head_and_the_first_events_in_order(
    serve: Any, pool_of: Any, engine_of: Any, together: bool
) -> None:
    events = [b"data: %d\n\n" % n for n in range(3)]

    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            pieces = [STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(e), e) for e in events), b"0\r\n\r\n"]
            for piece in [b"".join(pieces)] if together else pieces:
                await engine.write(piece)
                await asyncio.sleep(0.01)

    engine, endpoint = await engine_of(script)
    _, port = await serve(RelayingGateway(pool_of(), endpoint))
    async with await Client.connect(port) as client:
        for _ in range(3):
            client.ask(b"/", b"{}")
            status, headers = await client.head()
            assert (status, headers["content-type"]) == (200, "text/event-stream")
            assert b"".join(await client.chunks()) == b"".join(events)
    assert len(engine.connections) == 1


async def test_a_response_head_is_passed_on_before_its_body_arrives(before: Any) -> None:
    go_on = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(STREAM_HEAD)
        await go_on.wait()
        await engine.event(b"1")
        await engine.write(b"0\r\n\r\n")

    _, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        assert (await client.head())[0] == 200
        go_on.set()
        assert await client.chunks() == [b"data: 1\n\n"]


async def test_split_events_reach_the_client_whole(before: Any) -> None:
    text = b"".join(b'data: {"n": %d}\n\n' % n for n in range(20))

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(STREAM_HEAD)
        for at in range(0, len(text), 7):
            await engine.chunk(text[at : at + 7])
            await asyncio.sleep(0)
        await engine.write(b"0\r\n\r\n")

    _, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask(b"/", b"{}")
        await client.head()
        chunks = await client.chunks()
    assert b"".join(chunks) == text
    assert all(chunk.endswith(b"\n\n") for chunk in chunks)


async def test_the_client_gets_chunks_of_an_answer_that_ends_with_the_engines_connection(before: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    gateway, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask()
        got = await client.answer()
        assert (got.body, got.chunked) == (b"all of it", True)
    assert gateway.pool.stats.connections == 0


async def test_an_engines_interim_response_is_not_passed_on_to_the_client(before: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + answer(b"final"))

    _, port = await before(script)
    async with await Client.connect(port) as client:
        client.ask()
        got = await client.answer()
        assert (got.status, got.body) == (200, b"final")
        assert "link" not in got.headers


async def test_the_answer_to_a_relayed_head_request_has_no_body(before: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")

    _, port = await before(script)
    async with await Client.connect(port) as client:
        client.send(b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await client.answer(head_only=True)).headers["content-length"] == "5"


async def test_a_response_with_a_held_status_is_returned_instead_of_passed_on(
    serve: Any, pool_of: Any, engine_of: Any
) -> None:
    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            await engine.write(answer(b"going down", b"503 Service Unavailable"))

    _, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint, hold=frozenset({503}))
    _, port = await serve(gateway)
    async with await Client.connect(port) as client:
        client.ask()
        assert (await client.answer()).body == b"held: going down"
    assert gateway.outcomes[0].end is RelayEnd.HELD


async def test_fetch_returns_the_whole_answer(pool_of: Any, engine_of: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        while True:
            await engine.request()
            await engine.write(STREAM_HEAD)
            await engine.chunk(b"a")
            await asyncio.sleep(0.01)
            await engine.chunk(b"b")
            await engine.write(b"0\r\n\r\n")

    engine, endpoint = await engine_of(script)
    pool = pool_of()
    for _ in range(3):
        got = await fetch(pool, endpoint, UpstreamRequest("GET", b"/v1/models", []))
        assert (got.status, got.body) == (200, b"ab")
    assert len(engine.connections) == 1
    assert b"content-length" not in engine.requests[0]


async def test_sockets_to_engines_have_tcp_nodelay_set(pool_of: Any, engine_of: Any) -> None:
    async def script(engine: EngineConnection) -> None:
        await engine.gone()

    _, endpoint = await engine_of(script)
    connection = await pool_of().acquire(endpoint)
    assert connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
