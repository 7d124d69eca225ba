"""Tests of a client's connection: order of its requests, and framing of requests and responses."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest
import uvloop

from router.errors import NotFound, TooManyRequests
from router.http import Request, Responder
from tests.router.http.client import HOST, Client
from tests.support.waiting import let_the_loop_turn


async def describe(request: Request, responder: Responder) -> None:
    """Answer the request in the way that its path names."""
    body = await request.body.read()
    responder.add_header(b"x-extra", b"yes")
    if request.path == "/stream":
        responder.start(200, [(b"content-type", b"text/plain")])
        for piece in (b"one", b"two", body):
            responder.write(piece)
            await asyncio.sleep(0)
        responder.finish()
    elif request.path == "/slow":
        await asyncio.sleep(0.05)
        responder.respond(200, b"slow " + body)
    elif request.path == "/full":
        raise TooManyRequests("No decoder has capacity; try again.", retry_after_s=1.5, param="model")
    elif request.path == "/bug":
        raise KeyError("secret")
    elif request.path == "/forgotten":
        return
    elif request.path == "/nothing":
        responder.respond(204, b"")
    elif request.path == "/short":
        responder.start(200, [(b"content-length", b"10")])
        responder.finish(b"only")
    else:
        text = f"{request.method} {request.path} {request.query.decode()} {request.headers.text(b'x-id')}|"
        responder.respond(200, text.encode() + body)


async def test_the_tests_run_on_uvloop_as_in_production() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


async def test_a_request_is_read_and_answered(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(b"/a%20b?c=d%20e", b"body", b"X-ID: 7\r\nx-id: 8\r\n")
        answer = await client.answer()
        assert answer.body == b"POST /a b c=d%20e 7|body"
        assert answer.headers["x-extra"] == "yes"
        assert "date" in answer.headers


async def test_pipelined_requests_are_answered_in_order(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(b"/slow", b"1")
        client.ask(b"/stream", b"2")
        client.ask(b"/last")
        assert (await client.answer()).body == b"slow 1"
        assert (await client.answer()).body == b"onetwo2"
        assert (await client.answer()).body == b"GET /last  None|"


async def test_pipelined_requests_are_not_read_while_the_first_is_unanswered(serve: Any) -> None:
    answered = asyncio.Event()

    async def held(request: Request, responder: Responder) -> None:
        await answered.wait()
        responder.respond(200, b"at last")

    server, port = await serve(held)
    async with await Client.connect(port) as client:
        for _ in range(3000):
            client.ask()
        await let_the_loop_turn()
        assert server.stats.requests <= 4
        answered.set()
        assert (await client.answer()).body == b"at last"


async def test_a_malformed_pipelined_request_is_refused_after_the_answer_to_the_request_before(
    serve: Any,
) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(b"/slow", b"1")
        client.send(b"nonsense\r\n\r\n")
        assert (await client.answer()).body == b"slow 1"
        assert (await client.answer()).status == 400
        assert await client.rest() == b""


async def test_chunked_request_bodies_are_joined(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.send(b"POST /slow HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n")
        for piece in (b"3\r\nabc\r\n", b"2;x=y\r\nd", b"e\r\n", b"0\r\nt: v\r\n\r\n"):
            client.send(piece)
            await asyncio.sleep(0.01)
        assert (await client.answer()).body == b"slow abcde"


async def test_a_client_that_expects_100_continue_gets_it_when_the_handler_reads_the_body(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.send(b"POST /slow HTTP/1.1\r\n" + HOST + b"content-length: 2\r\nexpect: 100-Continue\r\n\r\n")
        assert await client.head() == (100, {})
        client.send(b"ok")
        assert (await client.answer()).body == b"slow ok"


async def test_a_client_that_expects_100_continue_does_not_get_it_when_its_request_is_refused(
    serve: Any,
) -> None:
    async def refuse(request: Request, responder: Responder) -> None:
        raise NotFound("There is no such path.")

    _, port = await serve(refuse)
    async with await Client.connect(port) as client:
        client.send(b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (404, "close")
        assert await client.rest() == b""


async def test_an_unknown_expectation_is_refused(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(b"/", headers=b"expect: miracles\r\n")
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (417, "expectation_failed")


@pytest.mark.parametrize("path", [b"/", b"/stream"])
async def test_an_answer_to_a_head_request_has_headers_and_no_body(serve: Any, path: bytes) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.send(b"HEAD " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (await client.answer(head_only=True)).status == 200
        client.ask(b"/next")
        assert (await client.answer()).body == b"GET /next  None|"


async def test_a_response_whose_status_allows_no_body_has_no_framing_headers(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(b"/nothing")
        answer = await client.answer()
        assert answer.status == 204
        assert not {"content-length", "transfer-encoding"} & set(answer.headers)
        client.ask(b"/next")
        assert (await client.answer()).status == 200


async def test_an_http_1_0_client_gets_a_streamed_answer_without_chunks(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.send(b"GET /stream HTTP/1.0\r\n\r\n")
        status, headers = await client.head()
        assert (status, headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in headers
        assert await client.rest() == b"onetwo"


async def test_an_http_1_0_client_may_keep_its_connection_after_an_answer_with_a_length(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        for _ in range(2):
            client.send(b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            answer = await client.answer()
            assert answer.headers["connection"] == "keep-alive"
            assert answer.body == b"GET /a  None|"


async def test_the_connection_is_closed_after_a_request_with_connection_close(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(b"/stream", headers=b"connection: close\r\n")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"onetwo", "close")
        assert await client.rest() == b""


async def test_an_api_error_that_a_handler_raises_becomes_the_answer(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(b"/full", b"{}")
        answer = await client.answer()
        assert (answer.status, answer.headers["retry-after"]) == (429, "2")
        assert answer.error == {
            "message": "No decoder has capacity; try again.",
            "type": "rate_limit_error",
            "param": "model",
            "code": "no_capacity",
        }
        assert answer.headers["x-extra"] == "yes"
        client.ask(b"/next")
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("path", [b"/bug", b"/forgotten"])
async def test_an_exception_of_a_handler_becomes_a_500_without_details(serve: Any, path: bytes) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(path)
        answer = await client.answer()
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert b"secret" not in answer.body
        client.ask(b"/next")
        assert (await client.answer()).status == 200


async def test_an_answer_shorter_than_its_announced_length_cuts_the_connection(serve: Any) -> None:
    _, port = await serve(describe)
    async with await Client.connect(port) as client:
        client.ask(b"/short")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.answer()


async def test_a_response_header_with_a_line_break_is_not_sent(serve: Any) -> None:
    async def inject(request: Request, responder: Responder) -> None:
        responder.respond(200, b"", [(b"x", b"a\r\nset-cookie: b")])

    _, port = await serve(inject)
    async with await Client.connect(port) as client:
        client.ask()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.head()


async def test_sockets_of_clients_have_tcp_nodelay_set(serve: Any) -> None:
    seen: list[int] = []

    async def look(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.write(b"x")
        descriptor = responder.splice_socket()
        assert descriptor is not None
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        responder.finish()

    _, port = await serve(look)
    async with await Client.connect(port) as client:
        client.ask()
        await client.answer()
    assert seen[0] != 0


async def test_two_servers_can_listen_on_one_port(serve: Any) -> None:
    from router.http import Server

    first, second = Server(describe), Server(describe)
    port = await first.start("127.0.0.1", 0, reuse_port=True)
    await second.start("127.0.0.1", port, reuse_port=True)
    for _ in range(40):
        async with await Client.connect(port) as client:
            client.ask()
            await client.answer()
    assert first.stats.requests > 0
    assert second.stats.requests > 0
    await first.drain(0.1)
    await second.drain(0.1)
