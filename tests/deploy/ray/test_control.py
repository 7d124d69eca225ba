"""A keeper's reports arrive unchanged over gRPC, but only at callers that have the secret."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from deploy.ray.control import ControlClient, ControlError, ControlServer, DirectorySuperseded
from kvtransfer.control.control_socket import ControlSocketError
from tests.workers.test_status import INFO, STATE
from workers.keeper.engine_status import KeeperPhase, StatusStore
from workers.keeper.idle_moves import KvSender

SECRET = "a-secret-of-16-chars"


@dataclass
class Feed:
    """Stands in for an engine that holds one conversation, `known`."""

    drained: list[bool] = field(default_factory=list)
    shared: list[tuple[object, ...]] = field(default_factory=list)  # arguments of drop and restore commands
    reachable: bool = True

    async def release(self, conversation: str) -> bool:
        if not self.reachable:
            raise ControlSocketError("the engine does not listen at present")
        return conversation == "known"

    async def prefetch(self, conversation: str, due_in_s: float) -> bool:
        return conversation == "known"

    async def drain(self, on: bool) -> None:
        self.drained.append(on)

    async def drop(self, epoch: int, members: tuple[str, ...], part: int) -> None:
        self.shared.append((epoch, members, part))

    async def restore(self, epoch: int) -> None:
        self.shared.append((epoch,))


@dataclass
class ControlRig:
    store: StatusStore
    feed: Feed
    server: ControlServer
    address: str


@pytest.fixture
async def rig() -> AsyncIterator[ControlRig]:
    store, feed = StatusStore("decode-0"), Feed()
    server = ControlServer(store, feed, SECRET, KvSender(feed, store, "small", "key"))
    address = await server.start("127.0.0.1")
    yield ControlRig(store, feed, server, address)
    await server.stop()


async def test_a_watcher_of_a_keeper_receives_its_stored_report_and_then_each_change(rig: ControlRig) -> None:
    rig.store.engine_up(INFO)
    rig.store.engine_state(STATE)
    rig.store.tell(KeeperPhase.SERVING, pid=12, log_lines=("one", "two"))
    async with ControlClient(rig.address, SECRET) as client:
        reports = client.watch()
        first = await anext(reports)
        assert first == rig.store.report
        rig.store.engine_down()
        gone = await anext(reports)
        assert (gone.info, gone.over) == (None, INFO.epoch)
        await reports.aclose()


async def test_keepers_refuse_a_directory_after_a_newer_one_has_called_them(rig: ControlRig) -> None:
    rig.store.engine_up(INFO)
    async with (
        ControlClient(rig.address, SECRET, term=1) as old,
        ControlClient(rig.address, SECRET) as person,
    ):
        reports = old.watch()
        await anext(reports)
        await old.release("a")
        async with ControlClient(rig.address, SECRET, term=2) as new:
            await new.release("b")
        with pytest.raises(ControlError, match="a newer directory has taken over"):
            await old.release("c")
        rig.store.engine_state(STATE)
        with pytest.raises(DirectorySuperseded):  # raised with the next report
            await anext(reports)
        with pytest.raises(DirectorySuperseded):
            await anext(old.watch())
        await person.drain(True)


async def test_commands_to_a_keeper_reach_its_engine(rig: ControlRig) -> None:
    async with ControlClient(rig.address, SECRET) as client:
        assert await client.release("known")
        assert not await client.release("other")
        assert await client.prefetch("known", 2.0)
        assert not await client.prefetch("other", 2.0)
        await client.drain()
        await client.drain(False)
        await client.drop(7, ("10.0.0.1:9", "10.0.0.2:9"), 1)
        await client.restore(7)
    assert rig.feed.drained == [True, False]
    assert rig.feed.shared == [(7, ("10.0.0.1:9", "10.0.0.2:9"), 1), (7,)]


async def test_a_command_to_an_unreachable_engine_fails_with_a_reason(rig: ControlRig) -> None:
    rig.feed.reachable = False
    async with ControlClient(rig.address, SECRET) as client:
        with pytest.raises(ControlError, match="does not listen at present"):
            await client.release("known")


async def test_keepers_refuse_every_call_without_the_secret(rig: ControlRig) -> None:
    async with ControlClient(rig.address, "wrong") as client:
        with pytest.raises(ControlError, match="secret is missing or wrong"):
            await client.release("known")
        with pytest.raises(ControlError, match="secret is missing or wrong"):
            await anext(client.watch())


async def test_the_watch_of_a_keeper_ends_when_the_keeper_ends(rig: ControlRig) -> None:
    async with ControlClient(rig.address, SECRET) as client:
        reports = client.watch()
        await anext(reports)
        await rig.server.stop()
        with pytest.raises(ControlError, match=r"went away|ended the stream"):
            await asyncio.wait_for(anext(reports), 5)


async def test_a_restarted_keeper_listens_at_the_same_address(rig: ControlRig) -> None:
    port = int(rig.address.rsplit(":", 1)[1])
    await rig.server.stop()
    again = ControlServer(rig.store, rig.feed, SECRET, KvSender(rig.feed, rig.store, "small", "key"))
    try:
        assert await again.start("127.0.0.1", port) == rig.address
    finally:
        await again.stop()
