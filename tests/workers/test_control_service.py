"""What a keeper says over gRPC is what the other side reads, and only who has the secret may ask."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from tests.workers.test_board import INFO, STATE
from workers.board import Board, Phase
from workers.control.client import ControlClient, ControlError
from workers.control.server import ControlServer
from workers.state_feed import FeedUnavailable

SECRET = "a-secret-of-16-chars"


@dataclass
class Feed:
    """An engine that holds the conversation `known`."""

    drained: list[bool] = field(default_factory=list)
    reachable: bool = True

    async def follow(self, board: Board) -> None:
        await asyncio.Event().wait()

    async def release(self, conversation: str) -> bool:
        if not self.reachable:
            raise FeedUnavailable("the engine does not listen at present")
        return conversation == "known"

    async def park(self, conversation: str) -> bool:
        return await self.release(conversation)

    async def drain(self, on: bool) -> None:
        self.drained.append(on)


@dataclass
class Rig:
    board: Board
    feed: Feed
    server: ControlServer
    address: str


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    board, feed = Board("decode-0"), Feed()
    server = ControlServer(board, feed, SECRET)
    address = await server.start("127.0.0.1")
    yield Rig(board, feed, server, address)
    await server.stop()


async def test_watching_gives_what_the_board_has(rig: Rig) -> None:
    rig.board.engine_up(INFO)
    rig.board.engine_state(STATE)
    rig.board.tell(Phase.SERVING, pid=12, log_lines=("one", "two"))
    async with ControlClient(rig.address, SECRET) as client:
        changes = client.watch()
        first = await anext(changes)
        assert (first.up, first.state, first.status) == (INFO, STATE, rig.board.status)
        rig.board.engine_down()
        assert (await anext(changes)).down == INFO
        await changes.aclose()


async def test_commands_reach_the_engine(rig: Rig) -> None:
    async with ControlClient(rig.address, SECRET) as client:
        assert await client.release("known")
        assert not await client.release("other")
        assert await client.park("known")
        await client.drain()
        await client.drain(False)
    assert rig.feed.drained == [True, False]


async def test_an_engine_out_of_reach_is_an_error_with_its_reason(rig: Rig) -> None:
    rig.feed.reachable = False
    async with ControlClient(rig.address, SECRET) as client:
        with pytest.raises(ControlError, match="does not listen at present"):
            await client.release("known")


async def test_without_the_secret_nothing_is_told_or_done(rig: Rig) -> None:
    async with ControlClient(rig.address, "wrong") as client:
        with pytest.raises(ControlError, match="secret is missing or wrong"):
            await client.release("known")
        with pytest.raises(ControlError, match="secret is missing or wrong"):
            await anext(client.watch())


async def test_a_keeper_that_goes_away_ends_the_watch(rig: Rig) -> None:
    async with ControlClient(rig.address, SECRET) as client:
        changes = client.watch()
        await anext(changes)
        await rig.server.stop()
        with pytest.raises(ControlError, match=r"went away|ended the stream"):
            await asyncio.wait_for(anext(changes), 5)


async def test_a_restarted_keeper_listens_where_it_did(rig: Rig) -> None:
    port = int(rig.address.rsplit(":", 1)[1])
    await rig.server.stop()
    again = ControlServer(rig.board, rig.feed, SECRET)
    try:
        assert await again.start("127.0.0.1", port) == rig.address
    finally:
        await again.stop()
