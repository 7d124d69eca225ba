"""The engine's control socket works over a real Unix socket."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.control.control_socket import (
    NAMED_AT_MOST,
    NAMED_S,
    ControlSocketClient,
    ControlSocketError,
    ControlSocketServer,
    EngineCommand,
    RecentChanges,
    Reply,
)
from placement.engines import EngineState


class ReportingEngine:
    def __init__(self, path: Path) -> None:
        self.released: list[str] = []
        self.seq = 0
        self.confirmed = RecentChanges()
        self.server = ControlSocketServer(path, self.snapshot, {"release": self.release})

    def snapshot(self) -> EngineState:
        self.seq += 1
        confirmed, after = self.confirmed.all(), self.confirmed.after
        return EngineState("d0", 1, self.seq, 10, 0, 0, 90, 1, 0, confirmed=confirmed, named_after=after)

    def release(self, command: EngineCommand) -> Reply:
        self.released.append(command.conversation)
        return Reply(True)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ReportingEngine]:
    engine = ReportingEngine(tmp_path / "engine.sock")
    yield engine
    engine.server.close()


async def first(client: ControlSocketClient) -> EngineState:
    async with aclosing(client.states()) as states:
        return await anext(states)


async def test_a_keeper_receives_the_state_immediately_and_at_least_every_second(
    engine: ReportingEngine, tmp_path: Path
) -> None:
    client = ControlSocketClient(tmp_path / "engine.sock")
    assert (await asyncio.wait_for(first(client), 1)).live_tokens == 10
    assert (await asyncio.wait_for(first(client), 1.5)).seq >= 2


async def test_many_changes_are_reported_together_in_few_reports(
    engine: ReportingEngine, tmp_path: Path
) -> None:
    async with aclosing(ControlSocketClient(tmp_path / "engine.sock").states()) as states:
        await anext(states)
        before = engine.seq
        for _ in range(300):
            engine.server.notify()
            await asyncio.sleep(0.001)
        assert 2 <= engine.seq - before <= 12


async def test_a_report_with_the_longest_possible_ids_arrives(
    engine: ReportingEngine, tmp_path: Path
) -> None:
    longest = {f"{number:04}".ljust(512, "\x01"): 1 for number in range(NAMED_AT_MOST)}
    state = replace(engine.snapshot(), confirmed=longest, parked=longest, unparked=longest)
    server = ControlSocketServer(tmp_path / "long.sock", lambda: state, {})
    try:
        client = ControlSocketClient(tmp_path / "long.sock")
        assert len((await asyncio.wait_for(first(client), 5)).parked) == NAMED_AT_MOST
    finally:
        server.close()


async def test_a_command_is_executed_and_answered(engine: ReportingEngine, tmp_path: Path) -> None:
    client = ControlSocketClient(tmp_path / "engine.sock")
    assert await client.release("a conversation")
    assert engine.released == ["a conversation"]


async def test_an_unknown_command_is_refused_with_the_known_commands(
    engine: ReportingEngine, tmp_path: Path
) -> None:
    client = ControlSocketClient(tmp_path / "engine.sock")
    with pytest.raises(ControlSocketError, match="release"):
        await asyncio.wait_for(client.drain(), 7)


async def test_the_stream_of_states_ends_when_the_engine_ends(
    engine: ReportingEngine, tmp_path: Path
) -> None:
    client = ControlSocketClient(tmp_path / "engine.sock")
    async with asyncio.timeout(5), aclosing(client.states()) as states:
        await anext(states)
        engine.server.close()
        assert [state async for state in states if state.epoch != 1] == []
    with pytest.raises(ControlSocketError):
        await client.release("a")


async def test_a_restarted_engine_takes_over_the_path_of_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    path.touch()
    engine = ReportingEngine(path)
    assert (await first(ControlSocketClient(path))).engine == "d0"
    engine.server.close()


async def test_a_keeper_that_reads_late_receives_the_changes_that_it_missed(
    engine: ReportingEngine, tmp_path: Path
) -> None:
    client = ControlSocketClient(tmp_path / "engine.sock")
    async with asyncio.timeout(5), aclosing(client.states()) as states:
        before = await anext(states)
        for name in ("a", "b", "c"):  # nobody reads meanwhile
            engine.confirmed.add([name], engine.seq + 1)
            engine.server.notify()
            await asyncio.sleep(0.12)
        while set((late := await anext(states)).confirmed) != {"a", "b", "c"}:
            pass
        assert all(before.seq < seq <= late.seq for seq in late.confirmed.values())
    assert set((await first(client)).confirmed) == {"a", "b", "c"}


def test_recent_changes_name_the_last_report_of_which_changes_may_be_missing() -> None:
    now = 0.0
    named = RecentChanges(clock=lambda: now)
    named.add(["a", "b"], 1)
    now = NAMED_S / 2
    named.add(["a"], 2)  # named again: only the newest report counts
    assert (named.all(), named.after) == ({"b": 1, "a": 2}, 0)
    now = NAMED_S + 1
    named.add([], 3)
    assert (named.all(), named.after) == ({"a": 2}, 1)
    named.add([f"c{number}" for number in range(2 * NAMED_AT_MOST)], 4)
    assert len(named.all()) == NAMED_AT_MOST
    assert named.after == 4


async def test_an_invalid_command_line_is_answered_and_the_connection_continues(
    engine: ReportingEngine, tmp_path: Path
) -> None:
    async def answer(line: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "engine.sock"))
        writer.write(line)
        said = await reader.readline()
        writer.close()
        return said

    for line in (b"not JSON\n", b"[1]\n", b'{"command": 5}\n'):
        assert b"not a command" in await answer(line)
    assert b'"done":true' in await answer(b'{"command": "release", "conversation": "c", "unknown": 1}\n')
    assert engine.released == ["c"]


async def test_a_failed_command_is_reported_and_the_connection_continues(tmp_path: Path) -> None:
    def release(command: EngineCommand) -> Reply:
        if command.conversation == "bad":
            raise KeyError("no such block")
        return Reply(True)

    server = ControlSocketServer(tmp_path / "engine.sock", lambda: None, {"release": release})  # type: ignore[arg-type]
    client = ControlSocketClient(tmp_path / "engine.sock")
    try:
        with pytest.raises(ControlSocketError, match="no such block"):
            await client.release("bad")
        assert await client.release("good")
    finally:
        server.close()


async def test_many_changes_before_a_report_wake_the_socket_once(
    engine: ReportingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step signals a change, and an engine runs hundreds of steps a second."""
    client = ControlSocketClient(tmp_path / "engine.sock")
    async with aclosing(client.states()) as states:
        await anext(states)
        woken: list[str] = []
        waking = asyncio.BaseEventLoop.call_soon_threadsafe

        def noted(loop: asyncio.BaseEventLoop, *args: Any, **options: Any) -> Any:
            if threading.current_thread().name == "engine":
                woken.append("socket")
            return waking(loop, *args, **options)

        def steps() -> None:
            for _ in range(1000):
                engine.server.notify()

        monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", noted)
        thread = threading.Thread(target=steps, name="engine")
        thread.start()
        thread.join()
        assert 1 <= len(woken) <= 5
        told = await asyncio.wait_for(anext(states), 0.5)  # before the report that is sent each second
        engine.server.notify()
        assert (await asyncio.wait_for(anext(states), 0.5)).seq > told.seq
