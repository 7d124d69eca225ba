"""The directory follows a keeper through restarts, and drops an engine only when it is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from deploy.directory.engine_watch import EngineWatch
from deploy.ray.common import Background
from deploy.ray.control import ControlServer
from deploy.ray.keepers import shut_down_cleanly
from placement.engines import EngineInfo, EngineState
from placement.routing.placer import MissingCurve
from tests.deploy.ray.test_control import SECRET, Feed
from tests.workers.test_status import INFO, STATE
from workers.keeper.engine_status import KeeperPhase, StatusStore
from workers.keeper.idle_moves import KvSender

pytestmark = pytest.mark.slow


@dataclass
class ToldDirectory:
    """Stands in for the directory, and records the calls that it receives."""

    events: list[tuple[str, int]] = field(default_factory=list)
    confirmed: dict[str, int] = field(default_factory=dict)
    curves: set[str] = field(default_factory=lambda: {INFO.tier})
    term: int = 0

    def engine_up(self, info: EngineInfo) -> None:
        if info.tier not in self.curves:
            raise MissingCurve(info.tier)
        self.events.append(("up", info.epoch))

    def engine_state(self, state: EngineState) -> None:
        self.events.append(("state", state.seq))
        self.confirmed |= state.confirmed

    def engine_down(self, engine: str) -> None:
        self.events.append(("down", 0))


@dataclass
class WatchRig:
    told: ToldDirectory = field(default_factory=ToldDirectory)
    address: str = ""
    asked: int = 0
    now: float = 0.0

    def address_of(self, engine: str) -> str:
        self.asked += 1
        return self.address

    async def keeper(self, store: StatusStore, port: int = 0) -> ControlServer:
        server = ControlServer(store, Feed(), SECRET, KvSender(Feed(), store, "small", "key"))
        self.address = await server.start("127.0.0.1", port)
        return server

    async def hears(self, *events: tuple[str, int]) -> None:
        await until(lambda: self.told.events[-len(events) :] == list(events), self.told.events)


async def until(true: Callable[[], bool], seen: object) -> None:
    for _ in range(200):
        if true():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited too long; seen: {seen}")


@pytest.fixture
async def rig() -> AsyncIterator[WatchRig]:
    rig = WatchRig()
    watch = EngineWatch("decode-0", rig.told, rig.address_of, SECRET, 30.0, lambda: rig.now)
    task = asyncio.create_task(watch.run())
    yield rig
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def store(epoch: int) -> StatusStore:
    made = StatusStore("decode-0")
    made.engine_up(replace(INFO, epoch=epoch))
    made.engine_state(replace(STATE, epoch=epoch, seq=epoch))
    return made


async def test_the_directory_keeps_an_engine_while_its_keeper_restarts(rig: WatchRig) -> None:
    first = await rig.keeper(store(5))
    await rig.hears(("up", 5), ("state", 5))
    await first.stop()
    second = await rig.keeper(store(5), int(rig.address.rsplit(":", 1)[1]))
    await rig.hears(("up", 5), ("state", 5), ("state", 5))
    assert ("down", 0) not in rig.told.events
    await second.stop()


async def test_an_engine_that_ended_unobserved_is_reported_down_before_its_successor_is_up(
    rig: WatchRig,
) -> None:
    first = await rig.keeper(store(5))
    await rig.hears(("up", 5), ("state", 5))
    await first.stop()
    later = store(6)
    later.tell(later.status.phase, epoch=6)
    second = await rig.keeper(later)
    await rig.hears(("down", 0), ("up", 6), ("state", 6))
    await second.stop()


async def test_a_reconnected_watch_receives_missed_reports_and_the_end_of_an_engine(rig: WatchRig) -> None:
    """Reports are cumulative, so the newest one includes all that the watch has missed."""
    serving = store(5)
    first = await rig.keeper(serving)
    await rig.hears(("up", 5), ("state", 5))
    port = int(rig.address.rsplit(":", 1)[1])
    await first.stop()
    serving.engine_state(replace(STATE, epoch=5, seq=6, confirmed={"b": 6}))
    serving.engine_state(replace(STATE, epoch=5, seq=7, confirmed={"b": 6, "c": 7}))
    second = await rig.keeper(serving, port)
    await rig.hears(("state", 7))
    assert rig.told.confirmed == {"a": 1, "b": 6, "c": 7}
    await second.stop()
    serving.engine_down()
    third = await rig.keeper(serving, port)
    await rig.hears(("down", 0))
    await third.stop()


async def test_an_engine_counts_as_lost_when_its_keeper_is_gone_for_longer_than_the_lease(
    rig: WatchRig,
) -> None:
    server = await rig.keeper(store(5))
    await rig.hears(("up", 5), ("state", 5))
    await server.stop()
    await asyncio.sleep(1.2)
    assert ("down", 0) not in rig.told.events
    rig.now = 31.0
    await rig.hears(("down", 0))


async def test_a_restarted_keeper_at_its_old_address_is_found_without_ray(rig: WatchRig) -> None:
    first = await rig.keeper(store(5))
    await rig.hears(("up", 5), ("state", 5))
    where = rig.address
    await first.stop()
    rig.address = ""  # Ray does not know
    again = ControlServer(store(5), Feed(), SECRET, KvSender(Feed(), store(5), "small", "key"))
    assert await again.start("127.0.0.1", int(where.rsplit(":", 1)[1])) == where
    await rig.hears(("up", 5), ("state", 5), ("state", 5))
    await again.stop()


@asynccontextmanager
async def remembered(rig: WatchRig, control: str, http: str = "127.0.0.1:9") -> AsyncIterator[None]:
    """Run a watch as after a restart: the journal has epoch 5 of the engine, and its keeper's address."""
    known = replace(INFO, epoch=5, control=control, http=http)
    watch = EngineWatch("decode-0", rig.told, rig.address_of, SECRET, 30.0, lambda: rig.now, known)
    assert watch.up
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def quiet() -> WatchRig:
    """Return a keeper that no watch follows yet and that Ray does not know."""
    return WatchRig()


async def test_a_restarted_directory_finds_the_keepers_of_its_journal_without_ray(quiet: WatchRig) -> None:
    server = await quiet.keeper(store(5))
    control, quiet.address = quiet.address, ""
    async with remembered(quiet, control):
        await quiet.hears(("up", 5), ("state", 5))
    assert quiet.asked == 0
    await server.stop()


async def test_a_restarted_directory_reports_an_engine_down_whose_epoch_has_ended_meanwhile(
    quiet: WatchRig,
) -> None:
    starting = StatusStore("decode-0")
    starting.tell(KeeperPhase.STARTING, epoch=6)
    server = await quiet.keeper(starting)
    async with remembered(quiet, quiet.address):
        await quiet.hears(("down", 0))
        starting.engine_up(replace(INFO, epoch=6))
        await quiet.hears(("down", 0), ("up", 6))
    await server.stop()


async def test_a_restarted_directory_drops_an_engine_without_keeper_after_the_lease(quiet: WatchRig) -> None:
    async with remembered(quiet, "127.0.0.1:9"):
        await until(lambda: quiet.asked > 0, quiet.asked)
        assert quiet.told.events == []
        quiet.now = 31.0
        await quiet.hears(("down", 0))


async def test_an_engine_without_keeper_is_kept_after_the_lease_while_it_listens(quiet: WatchRig) -> None:
    engine = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    where = "127.0.0.1:{1}".format(*engine.sockets[0].getsockname())
    async with remembered(quiet, "127.0.0.1:9", where):
        await until(lambda: quiet.asked > 0, quiet.asked)
        quiet.now = 31.0
        await asyncio.sleep(1.5)
        assert quiet.told.events == []
        engine.close()
        await quiet.hears(("down", 0))


async def test_a_keeper_of_another_engine_at_the_journals_address_is_not_followed(quiet: WatchRig) -> None:
    """Another process may listen at the former address of a keeper."""
    other = StatusStore("decode-1")
    other.engine_up(replace(INFO, engine="decode-1", epoch=7))
    wrong = await quiet.keeper(other)
    control = quiet.address
    right = await quiet.keeper(store(5))
    async with remembered(quiet, control):
        await quiet.hears(("up", 5), ("state", 5))
    assert quiet.told.events == [("up", 5), ("state", 5)]
    await wrong.stop()
    await right.stop()


async def test_the_directory_follows_the_other_engines_after_a_tier_is_removed(rig: WatchRig) -> None:
    """An upgrade restarts the directory before it removes engines that the new file does not name."""
    rig.told.curves.clear()
    server = await rig.keeper(store(5))
    await until(lambda: rig.asked > 1, rig.told.events)
    rig.told.curves.add(INFO.tier)
    await rig.hears(("up", 5), ("state", 5))
    await server.stop()


async def test_a_keeper_that_shuts_down_cleanly_reports_the_end_of_its_engine(rig: WatchRig) -> None:
    serving = store(5)

    async def work() -> None:
        server = await rig.keeper(serving)
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop()

    background = Background(work)
    await rig.hears(("up", 5), ("state", 5))
    await asyncio.to_thread(shut_down_cleanly, background, serving, None)
    await rig.hears(("down", 0))
