"""The directory's process outlives its actor, and restarts within seconds when it is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray

from deploy.directory import hosted_directory
from deploy.directory.config import HostedDirectoryConfig
from deploy.fleet.load import parse_fleet
from deploy.home import FleetHome, FleetKeys, Purpose
from deploy.lifecycle.status import directory_status
from deploy.ray.common import SealedFleet
from deploy.ray.control import ControlServer, DirectorySuperseded
from deploy.ray.directory_actor import DirectoryActor
from deploy.ray.hosting import HostedProcess, end, keep, last_port
from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.prefill_curve import PrefillCurve
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import Ask, Placed
from router.directory.directory import DirectorySettings
from tests.deploy.ray.test_control import SECRET, Feed
from tests.support.waiting import until
from tests.workers.test_status import INFO, STATE
from workers.host import SOUND_AFTER_S
from workers.keeper.engine_status import StatusStore
from workers.keeper.idle_moves import KvSender
from workers.keeper.process_lease import LeasedProcess
from workers.processes import listens

pytestmark = pytest.mark.slow

HOST, KEY = "127.0.0.1", "directory-key"


class Rig:
    """Runs a hosted directory process, and a keeper with one engine for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keepers = folder / "directory", folder / "directory" / "keepers.json"
        self.folder.mkdir()
        self.port = last_port(self.folder, HOST)
        self.client = DirectoryClient(f"{HOST}:{self.port}", "g0", secret=KEY)
        self.processes: dict[int, LeasedProcess] = {}

    def hosted(self) -> HostedProcess:
        config = HostedDirectoryConfig(
            settings=DirectorySettings(600.0),
            placer=PlacerSettings(),
            curves={INFO.tier: PrefillCurve(0.1, 0.001, 0.0)},
            alike={},
            journal=str(self.folder / "journal"),
            keepers=str(self.keepers),
            host=HOST,
            port=self.port,
            secret=KEY,
            keepers_key=SECRET,
            lease_s=30.0,
        )
        assert HostedDirectoryConfig.load(config.dump()) == config
        return HostedProcess("directory", "deploy.directory", config.dump(), self.folder, self.port, "a test")

    def keep(self) -> asyncio.Task[None]:
        async def look(process: LeasedProcess) -> None:
            self.processes.setdefault(process.record.pid, process)

        return asyncio.create_task(keep(self.hosted(), look))

    async def place(self, key: str, limit_s: float) -> Placed:
        """Place a new conversation; ask again after each refusal."""
        async with asyncio.timeout(limit_s):
            while True:
                with suppress(Exception):
                    asked = Ask(key, "", 100, 5.0, turn=self.client.next_turn())
                    outcome, _ = await self.client.place(asked)
                    if isinstance(outcome, Placed):
                        return outcome
                await asyncio.sleep(0.1)


def test_a_directory_process_that_a_newer_one_has_replaced_waits_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def superseded(_: hosted_directory.HostedDirectory) -> None:
        raise DirectorySuperseded("a newer directory has taken over")

    slept: list[float] = []
    monkeypatch.setattr(hosted_directory.HostedDirectory, "run", superseded)
    monkeypatch.setattr(hosted_directory.time, "sleep", slept.append)
    config = tmp_path / "config.json"

    async def written() -> None:  # clients of gRPC need a running loop
        config.write_bytes(Rig(tmp_path).hosted().config)

    asyncio.run(written())
    assert hosted_directory.main(["--config", str(config)]) == 2
    assert slept == [hosted_directory.SUPERSEDED_S]
    assert "a newer directory has taken over" in capsys.readouterr().err


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def kill_child(rig: Rig) -> None:
    (child,) = psutil.Process(next(iter(rig.processes))).children()
    os.kill(child.pid, signal.SIGKILL)


async def test_the_directory_process_outlives_its_actor_and_restarts_when_killed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    store = StatusStore("decode-0")
    store.engine_up(replace(INFO, role=Role.DECODE, epoch=5))
    store.engine_state(replace(STATE, epoch=5, seq=5))
    keeper = ControlServer(store, Feed(), SECRET, KvSender(Feed(), store, "small", "key"))
    address = await keeper.start(HOST)
    keeping = rig.keep()
    try:
        await rig.client.start()
        rig.keepers.write_text(json.dumps({"decode-0": address}))
        placed = await rig.place("first", 60.0)
        assert placed.engine == "decode-0"

        await cancelled(keeping)  # as its actor ends with a raylet
        assert (await rig.place("without-an-actor", 5.0)).engine == "decode-0"
        await asyncio.sleep(SOUND_AFTER_S)
        kill_child(rig)
        assert (await rig.place("killed-without-an-actor", 60.0)).engine == "decode-0"
        keeping = rig.keep()
        await asyncio.sleep(1.5)
        assert len(rig.processes) == 1, "adopted, not started again"

        await asyncio.to_thread(lambda: psutil.Process(next(iter(rig.processes))).kill())  # the host itself
        began = asyncio.get_running_loop().time()
        assert (await rig.place("after-a-kill", 60.0)).engine == "decode-0"
        print(f"new conversation after {asyncio.get_running_loop().time() - began:.1f} s")
        assert len(rig.processes) == 2
    finally:
        await cancelled(keeping)
        await asyncio.to_thread(end, rig.folder)
        await rig.client.stop()
        await keeper.stop()
    assert not listens(HOST, rig.port)
    assert not any(process.alive() for process in rig.processes.values())


FLEET = """
policy: collocated
tiers: [{name: decode, role: mixed, replicas: 1}]
gateway: {port: 1, processes: 1}
"""


class OneKeeper:
    """Stands in for Ray's handle of one keeper, which returns the keeper's address."""

    def __init__(self, address: str) -> None:
        self.control_address, self._address = self, address

    def remote(self) -> "OneKeeper":
        return self

    def future(self) -> "Future[str]":
        done: Future[str] = Future()
        done.set_result(self._address)
        return done


def start_actor(root: str, address: str) -> DirectoryActor:
    ray.util.list_named_actors = lambda: ["keeper:decode-0", "gateways"]
    ray.get_actor = lambda _: OneKeeper(address)
    fleet, home = parse_fleet(FLEET, "fleet.yaml"), FleetHome(Path(root))
    return DirectoryActor(SealedFleet.of(fleet, FleetKeys.here(home.name)), home, HOST)


async def address_of(actor: DirectoryActor) -> str:
    await until(actor.address, 60.0)
    return actor.address()


@pytest.fixture
def root() -> Iterator[Path]:
    """Return a directory with a short path, because the length of sockets' paths is limited."""
    with tempfile.TemporaryDirectory(prefix="cs-") as short:
        yield Path(short)


async def test_a_restarted_actor_adopts_the_directory_process(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the token of its cluster")
    monkeypatch.setattr(ray.util, "list_named_actors", ray.util.list_named_actors)  # put back at the end
    monkeypatch.setattr(ray, "get_actor", ray.get_actor)
    home, arguments = FleetHome(root), (str(root), "127.0.0.1:9")
    load = "import time; from tests.deploy.test_hosted_directory import start_actor"
    code = f"{load}; actor = start_actor(*{arguments!r}); time.sleep(300)"
    first = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", code])
    try:
        await until((home.directory / "keepers.json").exists, 60.0)
        assert json.loads((home.directory / "keepers.json").read_text()) == {"decode-0": "127.0.0.1:9"}
        await until(lambda: LeasedProcess.recorded(home.directory) is not None, 60.0)
    finally:
        first.kill()
        await asyncio.to_thread(first.wait, 10)
    process = LeasedProcess.recorded(home.directory)
    assert process is not None
    second = start_actor(*arguments)
    try:
        assert await address_of(second) == f"{HOST}:{process.record.ports[0]}"
        assert process.alive() and LeasedProcess.recorded(home.directory) is not None
        status = await directory_status(second.address(), FleetKeys.here(home.name).of(Purpose.DIRECTORY))
        assert status is not None
    finally:
        second.end()
    assert not process.alive()
