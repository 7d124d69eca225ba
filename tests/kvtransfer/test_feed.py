"""The engine's line to its keeper, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.feed import (
    NAMED_AT_MOST,
    NAMED_S,
    EngineFeed,
    FeedCommand,
    FeedError,
    FeedServer,
    RecentlyNamed,
    Reply,
)
from placement.engines import EngineState


class Engine:
    def __init__(self, path: Path) -> None:
        self.released: list[str] = []
        self.seq = 0
        self.confirmed = RecentlyNamed()
        self.server = FeedServer(path, self.snapshot, {"release": self.release})

    def snapshot(self) -> EngineState:
        self.seq += 1
        confirmed, after = self.confirmed.all(), self.confirmed.after
        return EngineState("d0", 1, self.seq, 10, 0, 0, 90, 1, 0, confirmed=confirmed, named_after=after)

    def release(self, command: FeedCommand) -> Reply:
        self.released.append(command.conversation)
        return Reply(command.id, True)


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


async def test_a_report_of_the_longest_ids_arrives(engine: Engine, tmp_path: Path) -> None:
    longest = {f"{number:04}".ljust(512, "\x01"): 1 for number in range(NAMED_AT_MOST)}
    state = replace(engine.snapshot(), confirmed=longest, parked=longest)
    server = FeedServer(tmp_path / "long.sock", lambda: state, {})
    try:
        async with EngineFeed(tmp_path / "long.sock") as feed:
            assert len((await asyncio.wait_for(first(feed), 5)).parked) == NAMED_AT_MOST
    finally:
        server.close()


async def test_a_command_is_done_and_answered(engine: Engine, tmp_path: Path) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        assert await feed.release("a conversation")
    assert engine.released == ["a conversation"]


async def test_an_unknown_command_is_refused_with_the_known_ones(engine: Engine, tmp_path: Path) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        with pytest.raises(FeedError, match="release"):
            await asyncio.wait_for(feed.drain(), 7)


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


async def test_a_keeper_that_reads_or_connects_late_is_told_what_it_missed(
    engine: Engine, tmp_path: Path
) -> None:
    async with EngineFeed(tmp_path / "engine.sock") as feed:
        before = await first(feed)
        for name in ("a", "b", "c"):  # nobody reads meanwhile: all but the newest report are skipped
            engine.confirmed.add([name], engine.seq + 1)
            engine.server.notify()
            await asyncio.sleep(0.12)
        late = await first(feed)
        assert late.seq >= before.seq + 3
        assert set(late.confirmed) == {"a", "b", "c"}
        assert all(before.seq < seq <= late.seq for seq in late.confirmed.values())
    async with EngineFeed(tmp_path / "engine.sock") as again:
        assert set((await first(again)).confirmed) == {"a", "b", "c"}


def test_what_is_named_no_more_is_said_to_be_missing() -> None:
    now = 0.0
    named = RecentlyNamed(clock=lambda: now)
    named.add(["a", "b"], 1)
    now = NAMED_S / 2
    named.add(["a"], 2)  # once more: with its newest report
    assert (named.all(), named.after) == ({"b": 1, "a": 2}, 0)
    now = NAMED_S + 1
    named.add([], 3)
    assert (named.all(), named.after) == ({"a": 2}, 1)
    named.add([f"c{number}" for number in range(2 * NAMED_AT_MOST)], 4)
    assert len(named.all()) == NAMED_AT_MOST
    assert named.after == 4


async def test_a_line_that_is_no_command_is_answered_and_ends_nothing(engine: Engine, tmp_path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "engine.sock"))
    for line in (b"not JSON\n", b"[1]\n", b'{"command": 5, "id": 1}\n'):
        writer.write(line)
        while b'"reply":{' not in (answer := await reader.readline()):
            pass
        assert b"not a command" in answer
    writer.write(b'{"command": "release", "id": 9, "conversation": "c", "unknown": 1}\n')
    while b'"id":9' not in await reader.readline():
        pass
    assert engine.released == ["c"]
    writer.close()
