"""Connections that ask for nothing keep nobody out: who has most of them gives way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.http import Request, Responder, ServerLimits
from router.http.limits import Crowd, address_of
from tests.router.http.client import Client, eventually

LIMITS = ServerLimits(max_connections=8)


async def hello(request: Request, responder: Responder) -> None:
    responder.respond(200, b"hello")


async def connect(address: str, port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\nslow: "], ids=["silent", "half a head"])
async def test_one_address_cannot_hold_all_connections(serve: Any, sent: bytes) -> None:
    server, port = await serve(hello, LIMITS)
    held = [await connect("127.0.0.2", port) for _ in range(8)]
    for one in held:
        one.send(sent)
    few = await connect("127.0.0.3", port)
    few.ask()
    assert (await few.answer()).status == 200
    many = [await connect("127.0.0.2", port) for _ in range(20)]  # it goes on: among itself
    few.ask()
    assert (await few.answer()).status == 200
    await eventually(lambda: server.stats.connections == LIMITS.max_connections)
    assert server.stats.timeouts == {"gave_way": 21} and not server.stats.refusals
    for one in (*held, *many, few):
        one.abort()
    await eventually(lambda: server.stats.connections == 0)
    assert len(server.idle_ones) == 0


async def test_the_one_that_was_idle_longest_gives_way(serve: Any) -> None:
    _, port = await serve(hello, LIMITS)
    clients = [await Client.connect(port) for _ in range(8)]
    for one in (*clients[1:], clients[0]):  # the first asked last
        one.ask()
        assert (await one.answer()).status == 200
    async with await Client.connect(port) as more:
        assert await clients[1].rest() == b""  # an end in order: it may ask again elsewhere
        for one in (more, clients[0], *clients[2:]):
            one.ask()
            assert (await one.answer()).status == 200
    for one in clients:
        one.abort()


async def test_a_request_under_way_is_never_cut(serve: Any) -> None:
    release = asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        await release.wait()
        responder.respond(200, b"late")

    server, port = await serve(slow, LIMITS)
    busy = [await Client.connect(port) for _ in range(8)]
    for one in busy:
        one.ask()
    await eventually(lambda: server.stats.requests == 8)
    async with await Client.connect(port) as refused:
        answer = await refused.answer()
        assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        assert answer.headers["retry-after"] == "1"
        assert await refused.rest() == b""
    release.set()
    for one in busy:
        assert (await one.answer()).body == b"late"
        one.abort()
    await eventually(lambda: not server.stats.connections)
    async with await Client.connect(port) as client:
        client.ask()
        assert (await client.answer()).status == 200


async def test_an_answer_that_is_on_its_way_is_not_cut_where_others_ask_for_nothing(serve: Any) -> None:
    async def large(request: Request, responder: Responder) -> None:
        responder.respond(200, b"x" * (8 << 20))

    server, port = await serve(large, LIMITS)
    slow = await Client.connect(port, receive_buffer=4096)  # the first, and idle longest when it is served
    slow.ask()
    await eventually(lambda: server.stats.requests == 1 and server.idle)
    held = [await Client.connect(port) for _ in range(20)]
    await eventually(lambda: server.stats.timeouts.get("gave_way") == 13)
    assert len((await slow.answer()).body) == 8 << 20
    for one in (slow, *held):
        one.abort()


class HeldConnection:
    """A connection of which only its turn is asked."""

    sending = False

    def __init__(self) -> None:
        self.ended = False

    def give_way(self) -> None:
        self.ended = True


def test_among_equals_whose_number_has_stood_longest_goes_first() -> None:
    """Whoever asks for something now and then begins anew each time."""
    crowd, steady, others = Crowd(), HeldConnection(), [HeldConnection() for _ in range(3)]
    crowd.add("steady", steady)
    for number, other in enumerate(others):
        crowd.add(f"a{number}", other)
    crowd.discard("steady", steady)
    crowd.add("steady", steady)
    for other in others:
        assert crowd.make_way() and other.ended
    assert not steady.ended and crowd.make_way() and steady.ended
    assert not crowd.make_way() and len(crowd) == 0


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.1", 1), "10.0.0.1"),
        (("::ffff:10.0.0.1", 1, 0, 0), "10.0.0.1"),
        (("2001:db8::1:2:3:4", 1, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_host_of_ipv6_has_one_address(peer: Any, address: str) -> None:
    assert address_of(peer) == address
