"""Tests of Starlette applications behind the HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as AppRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router.batch.asgi import OPENAI_ERRORS, asgi_handler
from router.errors import NotFound
from tests.router.http.client import HOST, Client, eventually


async def count(request: AppRequest) -> Response:
    total = 0
    async for piece in request.stream():
        total += len(piece)
    seen = {"q": request.query_params["q"], "id": request.path_params["id"], "x": request.headers["x"]}
    return JSONResponse({"bytes": total, **seen})


produced: list[int] = []
closed: list[bool] = []


async def produce(request: AppRequest) -> Response:
    async def pieces() -> Any:
        try:
            for _ in range(400):
                produced.append(1)
                yield b"x" * 65_536
        finally:
            closed.append(True)

    return StreamingResponse(pieces(), headers={"connection": "keep-alive"})


async def missing(request: AppRequest) -> Response:
    raise NotFound("There is no such batch.", param="batch_id")


APP = Starlette(
    exception_handlers=OPENAI_ERRORS,
    routes=[
        Route("/count/{id}", count, methods=["POST"]),
        Route("/produce", produce),
        Route("/missing", missing),
    ],
)


async def test_an_application_streams_a_body_larger_than_the_servers_limit(serve: Any) -> None:
    _, port = await serve(asgi_handler(APP))
    size = 50_000_000
    async with await Client.connect(port) as client:
        client.send(b"POST /count/a%20b?q=1 HTTP/1.1\r\n" + HOST + b"X: y\r\n")
        client.send(b"content-length: %d\r\n\r\n" % size)
        piece = b"x" * 1_000_000
        for _ in range(50):
            client.send(piece)
            await client.writer.drain()
        answer = await client.answer()
        assert answer.body == b'{"bytes":50000000,"q":"1","id":"a b","x":"y"}'
        assert answer.headers["content-length"] == str(len(answer.body))
        client.ask(b"/missing")
        assert (await client.answer()).error["param"] == "batch_id"
        client.ask(b"/nowhere")
        assert (await client.answer()).error["code"] == "not_found"
        client.ask(b"/count/a")
        answer = await client.answer()
        assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_a_slow_client_slows_the_application_and_a_disconnect_ends_it(serve: Any) -> None:
    _, port = await serve(asgi_handler(APP))
    client = await Client.connect(port, receive_buffer=32 * 1024)
    client.ask(b"/produce")
    assert (await client.head())[1]["transfer-encoding"] == "chunked"
    await eventually(lambda: produced)
    await asyncio.sleep(0.2)
    assert len(produced) < 400
    client.abort()
    await eventually(lambda: closed)
