"""The Ray actor of a node's gateways: keeps their processes running. They outlive it, as engines do."""

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from pathlib import Path

import psutil

from deploy.fleet import Fleet
from deploy.fleet.rooms import gateway_config
from deploy.home import FleetHome
from deploy.ray.background import Background
from deploy.ray.logs import log_to_stderr
from deploy.ray.settings import common_environment
from router import config as router_config
from workers import process_tree
from workers.backoff import Backoff
from workers.command import FLEET_MARK, Command
from workers.leased import LEASE, RECORD, LeasedProcess, Record

log = logging.getLogger("conserve.deploy.gateways")

LOOK_EVERY_S = 0.5
LEASE_S = 30.0
GRACE_S = 5.0


class GatewaysActor:
    def __init__(self, fleet: Fleet, home: FleetHome, directory: str, secret: str) -> None:
        log_to_stderr()
        home.create()
        self._fleet, self._home = fleet, home
        self._directory, self._secret = directory, secret
        self._processes: dict[str, LeasedProcess] = {}
        self._background = Background(self._work)

    def pids(self) -> dict[str, int]:
        return {name: process.record.pid for name, process in self._processes.items()}

    def end(self) -> bool:
        self._background.call(self._background.stop(), 10.0)
        for directory in self._home.gateways.glob("*/"):
            _end(directory)
        return True

    async def _work(self) -> None:
        names = [f"gateway-{index}" for index in range(self._fleet.gateway.processes)]
        wanted = {slot for name in names for slot in _slots(name)}
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(self._keep(name))
            for directory in self._home.gateways.glob("*/"):
                if directory.name not in wanted:  # there were more before
                    group.create_task(asyncio.to_thread(_end, directory))

    async def _keep(self, name: str) -> None:
        config = gateway_config(self._fleet, self._home, name, self._directory, self._secret)
        text = router_config.dump(config)
        fingerprint = hashlib.sha256(text).hexdigest()[:16]
        directory, other = self._place(name, fingerprint)
        file = directory / "config.json"
        _write_privately(file, text)
        env = {**common_environment(os.environ), FLEET_MARK: self._home.mark}
        command = Command((sys.executable, "-m", "router.gateway", "--config", str(file)), env)
        backoff = Backoff(0.2, 10.0, 60.0)
        grace_s = config.drain_s + GRACE_S
        process = await asyncio.to_thread(LeasedProcess.adopt, directory, fingerprint, grace_s)
        loop = asyncio.get_running_loop()
        while True:
            if process is None:
                process = LeasedProcess.start(
                    directory,
                    command,
                    fingerprint=fingerprint,
                    epoch=0,
                    ports=(config.port,),
                    lease_s=LEASE_S,
                    grace_s=grace_s,
                )
                log.info("gateway started gateway=%s pid=%d", name, process.record.pid)
            self._processes[name] = process
            backoff.serving(loop.time())
            while process.alive():
                process.renew()
                if other is not None:
                    other = await asyncio.to_thread(_taken_over, other, process.record.pid, config.port)
                await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(process.end, GRACE_S)
            process = None
            wait_s = backoff.next(loop.time())
            log.warning("gateway ended gateway=%s next_start_s=%.1f", name, wait_s)
            await asyncio.sleep(wait_s)

    def _place(self, name: str, fingerprint: str) -> tuple[Path, LeasedProcess | None]:
        """The directory to run in, and that of a gateway with another configuration to take over from.

        Two slots: while the old one finishes its streams the new one already takes connections."""
        slots = [self._home.gateways / slot for slot in _slots(name)]
        live = {slot: record for slot in slots if (record := _running(slot)) is not None}
        for slot, record in live.items():
            if record.fingerprint == fingerprint:
                return slot, None
        free = next((slot for slot in slots if slot not in live), slots[0])
        free.mkdir(parents=True, exist_ok=True)
        old = next((slot for slot in live if slot != free), None)
        return free, LeasedProcess(old, live[old]) if old is not None else None


def _slots(name: str) -> tuple[str, str]:
    return name, f"{name}-b"


def _running(directory: Path) -> Record | None:
    record = Record.read(directory / RECORD)
    return record if record and process_tree.find(record.pid, record.started) else None


def _taken_over(old: LeasedProcess, new: int, port: int) -> LeasedProcess | None:
    """Without a lease the old gateway takes no connections any more, and ends when its streams have."""
    if not _listens(new, port):
        old.renew()
        return old
    log.info("gateway hands over from=%s", old.directory.name)
    (old.directory / LEASE).unlink(missing_ok=True)
    return None


def _listens(host: int, port: int) -> bool:
    """Whether it is below this host that the port is listened on: the old gateway has the same."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(host).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def _end(directory: Path) -> None:
    record = Record.read(directory / RECORD)
    if record is not None:
        LeasedProcess(directory, record).end(GRACE_S)


def _write_privately(file: Path, content: bytes) -> None:
    """It holds keys."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(content)
