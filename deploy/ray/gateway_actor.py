"""Ray actor that keeps the gateways and the batch process running, and adopts them after its own restart."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

import router.batch.config
import router.gateway.config
from deploy.errors import DeployError
from deploy.fleet.components import batch_config, gateway_config
from deploy.home import FleetHome, FleetKeys
from deploy.ray.common import Background, SealedFleet, log_to_stderr
from deploy.ray.hosting import GRACE_S, HostedProcess, end, fingerprint, keep, last_port
from workers import processes
from workers.keeper.process_lease import LEASE, LeasedProcess
from workers.oom_score import OomScore, set_oom_score

log = logging.getLogger("conserve.deploy.gateways")

BATCH = "batch"  # folder of the batch process, beside the folders of gateways


class PortTaken(DeployError):
    """Raised when another process takes the batch process's port: gateways must then learn a new port."""


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
            end(directory)
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
                port = last_port(self._home.gateways / BATCH, self._host)
                batch = f"{self._host}:{port}"
                group.create_task(self._keep_batch(port))
            for name in names:
                group.create_task(self._keep_gateway(name, batch))
            for directory in self._home.gateways.glob("*/"):
                if directory.name not in wanted:  # left from a fleet file with more processes
                    group.create_task(asyncio.to_thread(end, directory))

    async def _keep_batch(self, port: int) -> None:
        """Keep the batch process running, after ending a batch process that has another configuration."""
        config = batch_config(self._fleet, self._home, self._directory, self._keys, self._host, port)
        text = router.batch.config.dump(config)
        directory, mark = self._home.gateways / BATCH, self._home.mark
        hosted = HostedProcess(BATCH, "router.batch", text, directory, port, mark, oom_score=OomScore.BATCH)

        def ended() -> None:
            if processes.listen_problem(self._host, port):
                raise PortTaken(f"somebody else listens on {port} now")

        await keep(hosted, self._looking(BATCH, None), ended)

    async def _keep_gateway(self, name: str, batch: str) -> None:
        answers = str(self._home.gateways / "answers.sqlite")
        config = gateway_config(self._fleet, name, self._directory, self._keys, batch, answers)
        text = router.gateway.config.dump(config)
        directory, other = place_of(self._home.gateways, name, fingerprint(text))
        grace_s, mark = config.drain_s + GRACE_S, self._home.mark
        hosted = HostedProcess(name, "router.gateway.main", text, directory, config.port, mark, grace_s)
        await keep(hosted, self._looking(name, other, config.port))

    def _looking(
        self, name: str, other: LeasedProcess | None, port: int = 0
    ) -> Callable[[LeasedProcess], Awaitable[None]]:
        """Return a callback that records the new process, and expires `other` once the new one listens."""

        async def look(process: LeasedProcess) -> None:
            nonlocal other
            self._processes[name] = process
            if other is not None:
                other = await asyncio.to_thread(_taken_over, other, process.record.pid, port)

        return look


def place_of(gateways: Path, name: str, fingerprint: str) -> tuple[Path, LeasedProcess | None]:
    """Return the directory in which gateway `name` is to run, and the old process to replace, if one runs.

    A gateway has two slots: while the old one finishes its streams, the new one already takes connections.
    """
    slots = [gateways / slot for slot in _slots(name)]
    live = {slot: process for slot in slots if (process := _running(slot)) is not None}
    same = (slot for slot, process in live.items() if process.record.fingerprint == fingerprint)
    free = (slot for slot in slots if slot not in live)
    chosen = next(same, None) or next(free, slots[0])
    chosen.mkdir(parents=True, exist_ok=True)
    # Also if a former actor had begun the hand-over, because nobody else ends the old process.
    old = (process for slot, process in live.items() if slot != chosen and (slot / LEASE).exists())
    return chosen, next(old, None)


def _slots(name: str) -> tuple[str, str]:
    return name, f"{name}-b"


def _running(directory: Path) -> LeasedProcess | None:
    process = LeasedProcess.recorded(directory)
    return process if process is not None and process.alive() else None


def _taken_over(old: LeasedProcess, new: int, port: int) -> LeasedProcess | None:
    """Expire `old` and return None once process `new` listens; until then renew `old` and return it."""
    if not _listens(new, port):
        old.renew()
        return old
    log.info("gateway hands over from=%s", old.directory.name)
    old.expire()
    return None


def _listens(host: int, port: int) -> bool:
    """Return whether a child of process `host` listens on the port; the old gateway listens there, too."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(host).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False
