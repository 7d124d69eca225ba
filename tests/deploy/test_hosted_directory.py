"""The directory's process outlives whoever keeps it, and is back within seconds when it is killed."""

import asyncio
import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deploy.directory.config import HostedDirectoryConfig
from deploy.ray.control import ControlServer
from deploy.ray.hosting import HostedProcess, end, keep, last_port
from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.prefill_curve import PrefillCurve
from router.directory.client import DirectoryClient
from router.directory.directory import DirectorySettings
from router.directory.messages import Ask, Placed
from tests.deploy.ray.test_control import SECRET, Feed
from tests.workers.test_status import INFO, STATE
from workers.keeper.engine_status import StatusStore
from workers.keeper.process_lease import LeasedProcess
from workers.processes import listens

pytestmark = pytest.mark.slow

HOST, KEY = "127.0.0.1", "directory-key"


class Rig:
    """A keeper that announces one engine, and a directory's process that somebody keeps."""

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
        """Place a new conversation; whoever is refused asks again."""
        async with asyncio.timeout(limit_s):
            while True:
                with suppress(Exception):
                    asked = Ask(key, "", 100, 5.0, turn=self.client.next_turn())
                    outcome, _ = await self.client.place(asked)
                    if isinstance(outcome, Placed):
                        return outcome
                await asyncio.sleep(0.1)


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_it_outlives_its_keeper_and_comes_back_when_it_is_killed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    store = StatusStore("decode-0")
    store.engine_up(replace(INFO, role=Role.DECODE, epoch=5))
    store.engine_state(replace(STATE, epoch=5, seq=5))
    keeper = ControlServer(store, Feed(), SECRET)
    address = await keeper.start(HOST)
    keeping = rig.keep()
    try:
        await rig.client.start()
        rig.keepers.write_text(json.dumps({"decode-0": address}))
        placed = await rig.place("first", 60.0)
        assert placed.engine == "decode-0"

        await cancelled(keeping)  # as its actor ends with a raylet
        assert (await rig.place("without-an-actor", 5.0)).engine == "decode-0"
        keeping = rig.keep()
        await asyncio.sleep(1.5)
        assert len(rig.processes) == 1, "adopted, not started again"

        (child,) = psutil.Process(next(iter(rig.processes))).children()
        os.kill(child.pid, signal.SIGKILL)
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
