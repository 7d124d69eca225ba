"""The engine's line to its keeper, over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.feed import EngineFeed, FeedError, FeedServer
from placement.engines import EngineState


class Engine:
    def __init__(self, path: Path) -> None:
        self.released: list[str] = []
        self.seq = 0
        self.confirmed: tuple[str, ...] = ()
        self.server = FeedServer(path, self.snapshot, {"release": self.release})

    def snapshot(self) -> EngineState:
        self.seq += 1
        confirmed, self.confirmed = self.confirmed, ()
        return EngineState("d0", 1, self.seq, 10, 0, 0, 90, 1, 0, confirmed=confirmed)

    def release(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.released.append(message["conversation"])
        return {"done": True}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(tmp_path / "engine.sock")
    yield engine
    engine.server.close()


async def first(feed: EngineFeed) -> EngineState:
    async for state in feed.states():
        return state
    raise AssertionError("no state came")


async def test_a_keeper_is_told_the_state_at_once_and_at_least_every_second(
    engine: Engine, tmp_path: Path
) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        assert (await asyncio.wait_for(first(feed), 1)).live_tokens == 10
        assert (await asyncio.wait_for(first(feed), 1.5)).seq >= 2


async def test_changes_are_told_soon_but_not_one_by_one(engine: Engine, tmp_path: Path) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        await first(feed)
        before = engine.seq
        for _ in range(300):
            engine.server.notify()
            await asyncio.sleep(0.001)
        assert 2 <= engine.seq - before <= 12


async def test_a_command_is_done_and_answered(engine: Engine, tmp_path: Path) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        assert await feed.release("a conversation")
    assert engine.released == ["a conversation"]


async def test_an_unknown_command_is_refused_with_the_known_ones(engine: Engine, tmp_path: Path) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        with pytest.raises(FeedError, match="release"):
            await asyncio.wait_for(feed.park("a"), 7)


async def test_states_end_when_the_engine_does(engine: Engine, tmp_path: Path) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        await first(feed)
        engine.server.close()

        async def drain() -> None:
            async for _ in feed.states():
                pass

        await asyncio.wait_for(drain(), 3)
        with pytest.raises(FeedError):
            await feed.release("a")


async def test_a_restarted_engine_takes_over_the_path_of_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    path.touch()
    engine = Engine(path)
    async with EngineFeed(path) as feed:
        assert (await first(feed)).engine == "d0"
    engine.server.close()


async def test_a_slow_keeper_loses_states_but_no_confirmation(engine: Engine, tmp_path: Path) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        await first(feed)
        feed._states = asyncio.Queue(maxsize=2)
        for name in ("a", "b", "c", "d"):
            feed._keep_newest(EngineState("d0", 1, 1, 0, 0, 0, 0, 0, 0, confirmed=(name,), parked=(name,)))
        seen = [feed._states.get_nowait() for _ in range(2)]
        for news in ("confirmed", "parked"):
            assert {key for state in seen if state for key in getattr(state, news)} == {"a", "b", "c", "d"}
