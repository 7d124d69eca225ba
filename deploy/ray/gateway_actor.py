"""Ray actor that keeps the gateways and the batch process running. They outlive it, as engines do."""

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from pathlib import Path

import psutil

import router.batch.config
import router.gateway.config
from deploy.errors import DeployError
from deploy.fleet.components import batch_config, gateway_config
from deploy.home import FleetHome, FleetKeys
from deploy.ray.cluster import common_environment
from deploy.ray.common import Background, SealedFleet, log_to_stderr
from workers import processes
from workers.keeper.launch import FLEET_MARK, ProcessCommand
from workers.keeper.process_lease import LEASE, LeasedProcess
from workers.oom_score import OomScore, set_oom_score
from workers.processes import Backoff

log = logging.getLogger("conserve.deploy.gateways")

LOOK_EVERY_S = 0.5
LEASE_S = 60.0  # where no supervisor of ours runs; this actor may take as long to come back
GRACE_S = 5.0
BATCH = "batch"  # the directory of its process, beside those of the gateways


class PortTaken(DeployError):
    """Another process took the port of the batch process; gateways must get a new one."""


class GatewaysActor:
    def __init__(self, sealed: SealedFleet, home: FleetHome, directory: str) -> None:
        log_to_stderr()
        set_oom_score(OomScore.SERVING)
        home.create()
        self._keys = FleetKeys.here(home.name)
        self._fleet, self._home = sealed.opened(self._keys), home
        self._directory = directory
        self._host = directory.rpartition(":")[0]  # the directory's machine is the gateways'
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
        while True:
            try:
                await self._keep_all()
            except* PortTaken as taken:
                log.warning("the batch process gets another port: %s", taken.exceptions[0])

    async def _keep_all(self) -> None:
        names = [f"gateway-{index}" for index in range(self._fleet.gateway.processes)]
        wanted = {slot for name in names for slot in _slots(name)}
        batch = ""
        async with asyncio.TaskGroup() as group:
            if self._fleet.batch.enabled:
                wanted.add(BATCH)
                port = _port(self._home.gateways / BATCH, self._host)
                batch = f"{self._host}:{port}"
                group.create_task(self._keep_batch(port))
            for name in names:
                group.create_task(self._keep_gateway(name, batch))
            for directory in self._home.gateways.glob("*/"):
                if directory.name not in wanted:  # there were more before
                    group.create_task(asyncio.to_thread(_end, directory))

    async def _keep_batch(self, port: int) -> None:
        """Run the batch process. One with another configuration ends before this one starts."""
        config = batch_config(self._fleet, self._home, self._directory, self._keys, self._host, port)
        text = router.batch.config.dump(config)
        directory = self._home.gateways / BATCH
        directory.mkdir(parents=True, exist_ok=True)
        await self._keep(BATCH, "router.batch", text, directory, port, GRACE_S)

    async def _keep_gateway(self, name: str, batch: str) -> None:
        answers = str(self._home.gateways / "answers.sqlite")
        config = gateway_config(self._fleet, name, self._directory, self._keys, batch, answers)
        text = router.gateway.config.dump(config)
        directory, other = place_of(self._home.gateways, name, _fingerprint(text))
        grace_s = config.drain_s + GRACE_S
        await self._keep(name, "router.gateway.main", text, directory, config.port, grace_s, other)

    async def _keep(
        self,
        name: str,
        module: str,
        config: bytes,
        directory: Path,
        port: int,
        grace_s: float,
        other: LeasedProcess | None = None,
    ) -> None:
        """Keep a process running: adopt or start it, renew its lease. It takes over from `other`."""
        fingerprint = _fingerprint(config)
        file = directory / "config.json"
        processes.write_atomically(file, config, 0o600)  # it holds keys
        env = {**common_environment(os.environ), FLEET_MARK: self._home.mark}
        command = ProcessCommand((sys.executable, "-m", module, "--config", str(file)), env)
        backoff = Backoff(0.2, 10.0, 60.0)
        process = await asyncio.to_thread(LeasedProcess.adopt, directory, fingerprint, grace_s)
        loop = asyncio.get_running_loop()
        while True:
            if process is None:
                process = LeasedProcess.start(
                    directory,
                    command,
                    fingerprint=fingerprint,
                    epoch=0,
                    ports=(port,),
                    lease_s=LEASE_S,
                    grace_s=grace_s,
                    oom_score=OomScore.BATCH if name == BATCH else OomScore.SERVING,
                )
                log.info("process started name=%s pid=%d", name, process.record.pid)
            self._processes[name] = process
            backoff.serving(loop.time())
            while process.alive():
                process.renew()
                if other is not None:
                    other = await asyncio.to_thread(_taken_over, other, process.record.pid, port)
                await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(process.end, GRACE_S)
            if name == BATCH and processes.listen_problem(self._host, port):
                raise PortTaken(f"somebody else listens on {port} now")
            process = None
            wait_s = backoff.next(loop.time())
            log.warning("process ended name=%s next_start_s=%.1f", name, wait_s)
            await asyncio.sleep(wait_s)


def place_of(gateways: Path, name: str, fingerprint: str) -> tuple[Path, LeasedProcess | None]:
    """Return the directory to run in, and a gateway with another configuration to take over from.

    There are two slots: while the old gateway finishes its streams, the new one already takes connections.
    """
    slots = [gateways / slot for slot in _slots(name)]
    live = {slot: process for slot in slots if (process := _running(slot)) is not None}
    same = (slot for slot, process in live.items() if process.record.fingerprint == fingerprint)
    free = (slot for slot in slots if slot not in live)
    chosen = next(same, None) or next(free, slots[0])
    chosen.mkdir(parents=True, exist_ok=True)
    # Also where the actor before this one had begun to hand over: nobody else ends the old one.
    old = (process for slot, process in live.items() if slot != chosen and (slot / LEASE).exists())
    return chosen, next(old, None)


def _fingerprint(config: bytes) -> str:
    return hashlib.sha256(config).hexdigest()[:16]


def _port(directory: Path, host: str) -> int:
    """Return the port of the process or of the one before it, which running gateways know."""
    last = LeasedProcess.recorded(directory)
    if last is not None and (last.alive() or not processes.listen_problem(host, last.record.ports[0])):
        return last.record.ports[0]
    return processes.free_port(host)


def _slots(name: str) -> tuple[str, str]:
    return name, f"{name}-b"


def _running(directory: Path) -> LeasedProcess | None:
    process = LeasedProcess.recorded(directory)
    return process if process is not None and process.alive() else None


def _taken_over(old: LeasedProcess, new: int, port: int) -> LeasedProcess | None:
    """Expire the old gateway once the new one listens: it then only finishes its streams."""
    if not _listens(new, port):
        old.renew()
        return old
    log.info("gateway hands over from=%s", old.directory.name)
    old.expire()
    return None


def _listens(host: int, port: int) -> bool:
    """Tell whether a process below this host listens on the port, which the old gateway shares."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(host).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def _end(directory: Path) -> None:
    process = LeasedProcess.recorded(directory)
    if process is not None:
        process.end(GRACE_S)
