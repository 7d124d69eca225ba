"""Ray actor of the directory: its gRPC server, fed by the control services of all keepers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import ray
from ray.exceptions import RayError

from deploy.fleet.components import alike, directory_settings, placer_settings, prefill_curves
from deploy.home import FleetHome, FleetKeys, Purpose
from deploy.ray.common import Background, SealedFleet, engines_of, keeper_name, log_to_stderr, serve_metrics
from deploy.ray.control import ControlClient, ControlError
from placement.engines import EngineInfo
from placement.routing.placer import MissingCurve, Placer
from router.directory.directory import Directory
from router.directory.server import DirectoryServer
from router.process import collect_when_idle, settle_heap
from workers import processes
from workers.keeper.engine_status import KeeperReport
from workers.oom_score import OomScore, set_oom_score
from workers.processes import LogOnChange, write_atomically

log = logging.getLogger("conserve.deploy.directory")

CALL_LIMIT_S = 10.0
FIND_EVERY_S = 1.0
RETRY_S = 0.5


class DirectoryActor:
    def __init__(self, sealed: SealedFleet, home: FleetHome, host: str | None) -> None:
        log_to_stderr()
        set_oom_score(OomScore.SERVING)
        home.create()
        keys = FleetKeys.here(home.name)
        self._fleet, self._home = sealed.opened(keys), home
        self._secret, self._keepers_key = keys.of(Purpose.DIRECTORY), keys.of(Purpose.KEEPERS)
        self._host = host or ray.util.get_node_ip_address()
        self._address = ""
        self._handles: dict[str, ray.actor.ActorHandle] = {}
        self._background = Background(self._work)

    def address(self) -> str:
        """Return host:port of the gRPC service; empty until it listens."""
        return self._address

    async def _work(self) -> None:
        placer = Placer(placer_settings(self._fleet), prefill_curves(self._fleet), alike(self._fleet))
        server = DirectoryServer(
            directory_settings(self._fleet),
            placer,
            self._home.journal,
            self._release,
            prefetch=self._prefetch,
            secret=self._secret,
            drops=_DropsByKeepers(self._keepers_key),
        )
        port_file = self._home.journal.parent / "port"
        port = await server.start(self._host, _read_port(port_file))
        write_atomically(port_file, str(port))
        self._address = f"{self._host}:{port}"
        settle_heap()
        # One an hour: no moment is idle, and at 100,000 conversations it holds placing for half a second.
        self._collecting = asyncio.create_task(collect_when_idle(lambda: False))
        server.metrics_page = serve_metrics(self._host)
        await self._follow_keepers(server)

    async def _follow_keepers(self, server: DirectoryServer) -> None:
        """Watch each keeper that Ray knows, and engines that outlive their keepers.

        While Ray does not answer, all stay as they are. Engines of the journal are watched at once.
        """
        was_up = [record.info for record in server.table.fleet.records()]
        watches = {info.engine: self._watch(info.engine, server, info) for info in was_up}
        tasks = {engine: asyncio.create_task(watch.run()) for engine, watch in watches.items()}
        asking: asyncio.Task[list[str] | None] | None = None
        while True:
            asking = asking or asyncio.create_task(asyncio.to_thread(_engines))
            await asyncio.wait([asking], timeout=FIND_EVERY_S)
            for task in tasks.values():
                if task.done():
                    task.result()  # a watch only ends by a fault
            if not asking.done():
                continue
            present, asking = asking.result(), None
            if present is not None:
                for engine in set(present) - watches.keys():
                    watches[engine] = self._watch(engine, server)
                    tasks[engine] = asyncio.create_task(watches[engine].run())
                for engine in [name for name in watches.keys() - set(present) if not watches[name].up]:
                    await _cancelled(tasks.pop(engine))
                    del watches[engine]
                    self._handles.pop(engine, None)
            await asyncio.sleep(FIND_EVERY_S)

    def _watch(self, engine: str, server: DirectoryServer, known: EngineInfo | None = None) -> "EngineWatch":
        lease_s = self._fleet.engine.lease
        return EngineWatch(engine, server, self._keeper_address, self._keepers_key, lease_s, known=known)

    async def _keeper_address(self, engine: str) -> str:
        """Ask the keeper for its control address; a known handle answers even without Ray's head."""
        if engine not in self._handles:
            self._handles[engine] = await asyncio.to_thread(ray.get_actor, keeper_name(engine))
        call = self._handles[engine].control_address.remote()
        try:
            return str(await asyncio.wait_for(asyncio.wrap_future(call.future()), CALL_LIMIT_S))
        except RayError:
            del self._handles[engine]  # found again by name, with what Ray knows then
            raise

    async def _release(self, info: EngineInfo, conversation: str) -> None:
        async with ControlClient(info.control, self._keepers_key) as client:
            await client.release(conversation)

    async def _prefetch(self, info: EngineInfo, conversation: str, due_in_s: float) -> bool:
        async with ControlClient(info.control, self._keepers_key) as client:
            return await client.prefetch(conversation, due_in_s)


class _DropsByKeepers:
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def drop(self, info: EngineInfo, epoch: int, members: tuple[str, ...], part: int) -> None:
        async with ControlClient(info.control, self._secret) as client:
            await client.drop(epoch, members, part)

    async def restore(self, info: EngineInfo, epoch: int) -> None:
        async with ControlClient(info.control, self._secret) as client:
            await client.restore(epoch)


def _engines() -> list[str] | None:
    """Return the engines that have a keeper; None while Ray does not answer."""
    try:
        return engines_of(ray.util.list_named_actors())
    except (RayError, RuntimeError) as error:
        log.warning("keepers not listed reason=%s", str(error).splitlines()[0])
        return None


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _read_port(file: Path) -> int:
    """Return the port of the directory before this one, which gateways know."""
    return int(file.read_text()) if file.exists() else 0


class EngineWatch:
    """A keeper out of reach is not an engine that is gone: it goes on serving for its lease, and under a
    supervisor until it is told to end. After the lease it counts as gone when it listens no more."""

    def __init__(
        self,
        engine: str,
        directory: Directory,
        address_of: Callable[[str], Awaitable[str]],
        secret: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        known: EngineInfo | None = None,
    ) -> None:
        """`known`: the directory takes that engine to be up, from before it restarted."""
        self._engine, self._directory, self._address_of = engine, directory, address_of
        self._secret, self._lease_s, self._clock = secret, lease_s, clock
        self._up = known
        self._last_address = known.control if known is not None else ""
        self._ask_ray = not self._last_address
        self._heard = clock()

    @property
    def up(self) -> bool:
        """Whether the directory takes the engine to be up."""
        return self._up is not None

    async def run(self) -> None:
        engine = self._engine
        say = LogOnChange(lambda why: log.warning("keeper not followed engine=%s reason=%r", engine, why))
        while True:
            try:
                await self._follow()
            except (ControlError, MissingCurve, RayError, TimeoutError, ValueError) as error:
                say(str(error) or repr(error))
            self._ask_ray = not self._ask_ray
            late = self._clock() - self._heard > self._lease_s
            if self._up is not None and late and not await _listens(self._up):
                log.warning("keeper gone for longer than its lease, and its engine engine=%s", self._engine)
                self._gone()
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        # A restarted keeper listens where it did before, so every other try needs no Ray: what a handle knows
        # of its actor can be out of date after Ray's head was lost.
        address = self._last_address
        if self._ask_ray or not address:
            address = await self._address_of(self._engine)
        if not address:
            return  # it does not listen yet
        async with ControlClient(address, self._secret) as client:
            async for report in client.watch():
                if report.status.engine != self._engine:
                    raise ControlError(f"at {address} is now the keeper of {report.status.engine}")
                self._heard, self._last_address = self._clock(), address
                self._tell(report)

    def _tell(self, report: KeeperReport) -> None:
        info = report.info
        if self._up is not None and _over(report, self._up):
            self._gone()
        if info is not None and info != self._up:
            self._directory.engine_up(info)
            self._up = info
        if report.state is not None:
            self._directory.engine_state(report.state)

    def _gone(self) -> None:
        if self._up is not None:
            self._up = None
            self._directory.engine_down(self._engine)


async def _listens(info: EngineInfo) -> bool:
    host, _, port = info.http.rpartition(":")
    return await asyncio.to_thread(processes.listens, host, int(port))


def _over(report: KeeperReport, up: EngineInfo) -> bool:
    """A keeper without an engine may not have adopted it yet; one that was lost and found again may have lost
    its engine meanwhile."""
    return report.over >= up.epoch or report.status.epoch > up.epoch
