"""Tests of limits on requests: a request that exceeds one is refused or times out."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from router.http import Request, Responder, ServerLimits
from tests.router.http.client import HOST, Client

LIMITS = ServerLimits(
    max_connections=8,
    max_url_bytes=256,
    max_headers=20,
    max_head_bytes=2048,
    max_body_bytes=10_000,
    head_timeout_s=0.2,
    body_timeout_s=0.2,
    idle_timeout_s=0.3,
    linger_s=0.2,
)


async def echo(request: Request, responder: Responder) -> None:
    responder.respond(200, await request.body.read())


async def refusal(serve: Any, sent: bytes) -> tuple[int, str]:
    """Return status and error code of the answer to ``sent``; check that the server closes after it."""
    _, port = await serve(echo, LIMITS)
    async with await Client.connect(port) as client:
        client.send(sent)
        answer = await client.answer()
        assert answer.headers["connection"] == "close"
        assert answer.headers["content-type"] == "application/json"
        assert await client.rest() == b""
        return answer.status, answer.error["code"]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\n" + HOST + b"\r\n", (414, "uri_too_long")),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 1000 + b"\r\n", (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 3000 + b"\r\n\r\n", (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 100_000, (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a" * 100_000, (431, "headers_too_large")),
        (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 10001\r\n\r\n", (413, "request_too_large")),
        (
            b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n4000\r\n" + b"x" * 0x4000,
            (413, "request_too_large"),
        ),
        (
            b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n1;" + b"e" * 50_000,
            (400, "bad_http"),
        ),
        (
            b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n0\r\nt: " + b"e" * 50_000,
            (400, "bad_http"),
        ),
        (
            b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"t: e\r\n" * 20_000,
            (400, "bad_http"),
        ),
    ],
    ids=[
        *("url", "headers", "head", "endless value", "endless name", "length", "chunked", "ext"),
        *("trailer", "trailers"),
    ],
)
async def test_a_request_over_a_limit_is_refused(serve: Any, sent: bytes, expected: tuple[int, str]) -> None:
    assert await refusal(serve, sent) == expected


async def test_a_client_that_keeps_sending_still_gets_the_refusal(serve: Any) -> None:
    """The client sends 100 MB. If the server reset the connection, the client would lose the answer."""
    _, port = await serve(echo, LIMITS)
    async with await Client.connect(port) as client:
        client.send(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 100000000\r\n\r\n")
        for _ in range(20):
            client.send(b"x" * 100_000)
            await asyncio.sleep(0.001)
        assert (await client.answer()).status == 413


@pytest.mark.parametrize(
    "part",
    [
        b"GET / HT",
        b"GET / HTTP/1.1\r\nhost: x\r\nacc",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
    ],
)
async def test_a_request_that_stops_arriving_is_refused_with_a_408(serve: Any, part: bytes) -> None:
    begin = time.monotonic()
    assert await refusal(serve, part) == (408, "request_timeout")
    assert time.monotonic() - begin < 8.0  # by the limits of this server, not by the defaults


async def test_a_request_head_that_trickles_in_is_refused_at_its_deadline(serve: Any) -> None:
    _, port = await serve(echo, LIMITS)
    async with await Client.connect(port) as client:
        client.send(b"GET / HTTP/1.1\r\n")
        answer = asyncio.ensure_future(client.answer())
        async with asyncio.timeout(60):
            while not answer.done():
                client.send(b"a: b\r\n")
                await asyncio.sleep(0.05)
        assert (await answer).status == 408


async def test_a_request_body_that_keeps_arriving_is_not_timed_out(serve: Any) -> None:
    _, port = await serve(echo, replace(LIMITS, body_timeout_s=1.5))
    async with await Client.connect(port) as client:
        client.send(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 8\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.25)
            client.send(b"x")
        assert (await client.answer()).body == b"x" * 8


async def test_a_request_body_below_the_minimum_rate_is_timed_out(serve: Any) -> None:
    limits = replace(LIMITS, body_timeout_s=1.5, body_grace_s=0.5, body_bytes_per_s=1000.0)
    server, port = await serve(echo, limits)
    async with await Client.connect(port) as slow, await Client.connect(port) as steady:
        slow.send(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 100\r\n\r\n")
        steady.send(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 8000\r\n\r\n")
        for sent in range(8):
            await asyncio.sleep(0.2)
            if sent < 2:  # cut off for its rate; the limit on silence is longer
                slow.send(b"x")
            steady.send(b"x" * 1000)
        late = await slow.answer()
        assert late.status == 408 and b"too slowly" in late.body
        assert (await steady.answer()).status == 200
    assert server.stats.timeouts["body"] == 1


async def test_an_idle_connection_is_closed(serve: Any) -> None:
    server, port = await serve(echo, LIMITS)
    async with await Client.connect(port) as fresh, await Client.connect(port) as used:
        used.ask()
        await used.answer()
        assert await asyncio.gather(fresh.rest(), used.rest()) == [b"", b""]
    assert server.stats.timeouts["idle"] == 2


async def test_a_connection_that_waits_for_its_answer_is_not_closed_as_idle(serve: Any) -> None:
    async def slow(request: Request, responder: Responder) -> None:
        await asyncio.sleep(0.8)
        responder.respond(200, b"late")

    _, port = await serve(slow, LIMITS)
    async with await Client.connect(port) as client:
        client.ask()
        assert (await client.answer()).body == b"late"


async def test_a_body_that_the_handler_does_not_read_is_discarded(serve: Any) -> None:
    """While the handler does not read, the client is paused at the high-water mark."""
    release = asyncio.Event()

    async def busy(request: Request, responder: Responder) -> None:
        await release.wait()
        total = 0
        async for piece in request.body.pieces(1 << 40):
            total += len(piece)
        responder.respond(200, b"%d" % total)

    limits = ServerLimits(read_high_bytes=64 * 1024)
    _, port = await serve(busy, limits)
    async with await Client.connect(port) as client:
        size = 20_000_000
        client.send(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: %d\r\n\r\n" % size)
        client.send(b"x" * size)
        await asyncio.sleep(0.2)
        assert client.writer.transport.get_write_buffer_size() > 1_000_000
        release.set()
        assert (await client.answer()).body == b"%d" % size
