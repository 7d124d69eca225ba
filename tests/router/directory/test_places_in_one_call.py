"""Concurrent turns share a call to the directory; each gets its own answer or leaves no reservation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from placement.engines import EngineInfo
from placement.routing.receipts import Refusal
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import PLACE, Ask, Placed
from router.directory.api.rpc import Stub
from router.directory.directory import DirectorySettings
from router.directory.server import DirectoryServer
from tests.support.engines import info, placer, state
from tests.support.fake_fleet import FakeFleet, fleet
from tests.support.waiting import until


@asynccontextmanager
async def client(made: FakeFleet) -> AsyncIterator[DirectoryClient]:
    one = DirectoryClient(made.address, "g", secret="s3cret")
    await one.start()
    try:
        await until(lambda: len(one.engines))
        yield one
    finally:
        await one.stop()


async def place(one: DirectoryClient, key: str, tokens: int = 10, wait_s: float = 0.0) -> Placed | Refusal:
    outcome, _ = await one.place(Ask(key, "", tokens, wait_s, turn=one.next_turn()))
    return outcome


async def test_each_request_for_placement_in_a_shared_call_gets_its_own_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path, gateways=0, decoders=3) as made, client(made) as one:
        keys = [f"s:{number}" for number in range(300)]
        outcomes = await asyncio.gather(*(place(one, key) for key in keys))
        for key, outcome in zip(keys, outcomes, strict=True):
            binding = made.directory.table.binding(key)
            assert isinstance(outcome, Placed) and binding is not None
            assert (outcome.key, outcome.engine) == (key, binding.engine)
        assert {outcome.engine for outcome in outcomes if isinstance(outcome, Placed)} == {"d0", "d1", "d2"}


async def test_a_waiting_placement_does_not_delay_the_others_of_its_call(tmp_path: Path) -> None:
    roomy = {"max_context": 100_000}
    async with fleet(tmp_path, gateways=0, decoders=1, engine=roomy) as made, client(made) as one:
        assert isinstance(await place(one, "s:large", 70_000), Placed)
        waiting = asyncio.create_task(place(one, "s:too", 60_000, wait_s=600.0))
        refused, known = await asyncio.gather(place(one, "s:no", 60_000), place(one, "s:large"))
        assert isinstance(refused, Refusal)
        assert isinstance(known, Placed) and known.known
        assert not waiting.done()
        await one.end("s:large", "deleted")
        assert isinstance(await waiting, Placed)


async def test_a_turn_whose_client_disconnected_leaves_the_placement_queue(tmp_path: Path) -> None:
    async with fleet(tmp_path, gateways=0, decoders=1, engine={"max_context": 100_000}) as made:
        async with client(made) as one:
            assert isinstance(await place(one, "s:large", 70_000), Placed)
            waiting = [asyncio.create_task(place(one, f"s:{n}", 60_000, wait_s=600.0)) for n in range(5)]
            await until(lambda: made.directory.table.waiting == 5)
        await until(lambda: made.directory.table.waiting == 0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert made.directory.table.binding("s:0") is None


async def test_a_restarted_directory_reserves_no_kv_for_a_turn_whose_client_left_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, connected, stream = asyncio.Event(), asyncio.Event(), Stub.stream

    async def connect_late(stub: Stub, method: Any, *args: Any, **named: Any) -> AsyncIterator[Any]:
        """Send a request for placement late, as in gRPC's pause between two attempts to connect."""
        if method is PLACE:
            asked.set()
            await connected.wait()
        async for answer in stream(stub, method, *args, **named):
            yield answer

    monkeypatch.setattr(Stub, "stream", connect_late)

    async def release(engine: EngineInfo, key: str) -> None:
        pass

    async def serve(port: int) -> tuple[DirectoryServer, int]:
        made = DirectoryServer(
            DirectorySettings(ttl_s=600.0), placer(), tmp_path / "journal", release, secret="s3cret"
        )
        port = await made.start("127.0.0.1", port)
        made.engine_up(info("d0"))
        made.engine_state(state("d0", 1))
        return made, port

    first, port = await serve(0)
    one = DirectoryClient(f"127.0.0.1:{port}", "g", secret="s3cret")
    await one.start()
    await until(lambda: len(one.engines))
    asking = asyncio.create_task(place(one, "s:left", wait_s=5.0))
    await asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    one.abandon("s:left", 1)
    await until(lambda: first.table.conversations.is_over(one.gateway, 1))
    await first.stop(0.1)
    second, _ = await serve(port)
    try:
        connected.set()
        await until(lambda: second.table.conversations.is_over(one.gateway, 1))
        assert not len(second.table.conversations) and not second.table.kv_in_use("d0")
    finally:
        await one.stop()
        await second.stop(0.1)
