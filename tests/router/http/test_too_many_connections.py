"""A server that has reached its maximum of connections closes an idle one for a new one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.http import Request, Responder, ServerLimits
from tests.router.http.client import Client, eventually

LIMITS = ServerLimits(max_connections=8)


async def hello(request: Request, responder: Responder) -> None:
    responder.respond(200, b"hello")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\nslow: "], ids=["silent", "half a head"])
async def test_a_client_that_opens_all_connections_does_not_keep_other_clients_out(
    serve: Any, sent: bytes
) -> None:
    server, port = await serve(hello, LIMITS)
    attacker = [await Client.connect(port) for _ in range(8)]
    for client in attacker:
        client.send(sent)
    for _ in range(3):  # the attack goes on
        async with await Client.connect(port) as other:
            other.ask()
            assert (await other.answer()).status == 200
        attacker += [await Client.connect(port) for _ in range(20)]
    await eventually(lambda: server.stats.connections == LIMITS.max_connections)
    assert server.stats.timeouts.keys() == {"evicted"} and not server.stats.refusals
    for client in attacker:
        client.abort()
    await eventually(lambda: server.stats.connections == 0)
    assert not server.idle_connections


async def test_the_longest_idle_connection_is_closed_for_a_new_one(serve: Any) -> None:
    _, port = await serve(hello, LIMITS)
    clients = [await Client.connect(port) for _ in range(8)]
    for client in (*clients[1:], clients[0]):  # the first client asks last
        client.ask()
        assert (await client.answer()).status == 200
    async with await Client.connect(port) as newcomer:
        assert await clients[1].rest() == b""  # closed in order, so that the client may connect again
        for client in (newcomer, clients[0], *clients[2:]):
            client.ask()
            assert (await client.answer()).status == 200
    for client in clients:
        client.abort()


async def test_a_connection_with_a_running_request_is_not_closed_for_a_new_one(serve: Any) -> None:
    release = asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        await release.wait()
        responder.respond(200, b"late")

    server, port = await serve(slow, LIMITS)
    busy = [await Client.connect(port) for _ in range(8)]
    for client in busy:
        client.ask()
    await eventually(lambda: server.stats.requests == 8)
    async with await Client.connect(port) as refused:
        answer = await refused.answer()
        assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        assert answer.headers["retry-after"] == "1"
        assert await refused.rest() == b""
    release.set()
    for client in busy:
        assert (await client.answer()).body == b"late"
        client.abort()
    await eventually(lambda: not server.stats.connections)
    async with await Client.connect(port) as client:
        client.ask()
        assert (await client.answer()).status == 200


async def test_a_connection_that_still_sends_an_answer_is_not_closed_while_others_are_idle(
    serve: Any,
) -> None:
    async def large(request: Request, responder: Responder) -> None:
        responder.respond(200, b"x" * (8 << 20))

    server, port = await serve(large, LIMITS)
    slow = await Client.connect(port, receive_buffer=4096)  # idle longest, once its request has ended
    slow.ask()
    await eventually(lambda: server.stats.requests == 1 and server.idle)
    others = [await Client.connect(port) for _ in range(20)]
    await eventually(lambda: server.stats.timeouts.get("evicted") == 13)
    assert len((await slow.answer()).body) == 8 << 20
    for client in (slow, *others):
        client.abort()
