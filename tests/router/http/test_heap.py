"""Tests of garbage collection: full collections wait for an idle moment, and connections leave no cycles."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from router.http import Request, Responder, Server
from router.http.parsers import RequestParser
from router.process import collect_when_idle, settle_heap
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cycle:
    """Object that refers to itself, so that only a garbage collection frees it."""

    ended = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cycle.ended += 1


def old_cycle() -> None:
    one = Cycle()
    gc.collect(1)  # moves the cycle to an older generation
    del one


@pytest.mark.usefixtures("collector")
async def test_a_full_garbage_collection_waits_for_an_idle_moment() -> None:
    settle_heap()
    busy, before = True, Cycle.ended
    collecting = asyncio.create_task(collect_when_idle(lambda: not busy, looks_s=0.01))
    old_cycle()
    await asyncio.sleep(0.2)
    assert Cycle.ended == before
    busy = False
    await until(lambda: Cycle.ended == before + 1)
    collecting.cancel()


@pytest.mark.usefixtures("collector")
async def test_a_full_garbage_collection_runs_at_its_time_limit_if_no_moment_is_idle() -> None:
    settle_heap()
    before = Cycle.ended
    collecting = asyncio.create_task(collect_when_idle(lambda: False, looks_s=0.01, at_latest_s=0.3))
    old_cycle()
    await asyncio.sleep(0.1)
    assert Cycle.ended == before
    await until(lambda: Cycle.ended == before + 1)
    collecting.cancel()


async def test_a_closed_connection_leaves_no_reference_cycles() -> None:
    async def handle(request: Request, responder: Responder) -> None:
        await request.body.read()
        responder.respond(200, b"{}", [])

    def parsers() -> int:
        return sum(isinstance(one, RequestParser) for one in gc.get_objects())

    server = Server(handle)
    port = await server.start("127.0.0.1", 0)
    gc.collect()
    gc.disable()
    try:
        before = parsers()
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
            await writer.wait_closed()
        await until(lambda: server.stats.connections == 0)
        assert parsers() == before
    finally:
        gc.enable()
        await server.drain(1.0)
