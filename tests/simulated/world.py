"""One run: a fleet, its clients and its faults, all drawn from a seed."""

import asyncio
import gc
import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from sqlalchemy.exc import SQLAlchemyError

from deploy.ray.control import DirectorySuperseded
from placement.engines import Role
from router.directory.journal import JournalError
from router.gateway.main import Gateway
from tests.simulated import clock, engines, invariants, processes
from tests.simulated import disk as disks
from tests.simulated import network as networks
from tests.simulated.batches import ADDRESS, BATCH_HOST, BatchOwner, batch_main
from tests.simulated.clients import Answer, SimulatedAgent, exceed_limits
from tests.simulated.disk import Disk
from tests.simulated.engines import EngineHost, Fabric
from tests.simulated.invariants import Monitor
from tests.simulated.loop import SimulatedProcess, VirtualLoop
from tests.simulated.network import Faults, Network
from tests.simulated.processes import (
    CONTROL_PORT,
    DIRECTORY_PORT,
    FREE,
    GATEWAY_GRACE_S,
    LIMITED,
    METERED,
    TTL_S,
    Unit,
)

START_S, FAULTS_S, LOAD_S = 4.0, 12.0, 18.0  # time until the fleet serves, with faults, and with load
QUIET_S = TTL_S + 22.0  # after the load, all state must be gone within this time, and stay gone for SETTLED_S
SETTLED_S = 3.0
LONGEST_TURN_S = 75.0  # with waits for placement, two lost decoders and a frozen gateway
TOGETHER_S = 15.0  # a replaced directory ends within this time if a keeper reaches it and its successor
BATCHES = 0.3  # share of worlds that have a batch process
LOOKS_S = 1.0  # between two checks of the processes' state
UNNOTICED_S = 15.0  # until the keep-alive shows that the directory's host has lost its power
DIRECTORY, CLIENTS = "directory", "10.0.9.1"  # a name, which resolves to the newest directory
DIRECTORY_HOSTS = "10.0.0.1", "10.0.0.2"


@dataclass
class RunResult:
    """Outcome of the run of one seed."""

    seed: int
    trace: int
    violations: list[str]
    steps: int
    virtual_s: float
    counts: dict[str, int] = field(default_factory=dict)


class World:
    """All processes of one run, and the faults that hit them."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.random = seed, Random(seed)
        draw = self.random
        self.loop = loop = VirtualLoop(Random(draw.random()))
        clock.begin(loop.time, seed)
        calm = draw.random() < 0.1
        faults = Faults(
            delay_s=draw.choice((0.0005, 0.002, 0.01)),
            late=0.0 if calm else draw.choice((0.0, 0.0, 0.01, 0.05)),
            reset=0.0 if calm else draw.choice((0.0, 0.01, 0.05)),
            breaks=0.0 if calm else draw.choice((0.0, 0.02, 0.2)),
            twice=0.0 if calm else draw.choice((0.0, 0.0, 0.01, 0.05)),
        )
        self.network = loop.network = Network(loop, faults)
        networks.install(self.network)
        self.monitor = Monitor(self)
        self.me = SimulatedProcess(loop, "world", CLIENTS)
        self._calm, self._root = calm, root
        self._in_time = not faults.late and not faults.twice  # messages arrive once and soon
        self._out_of_reach: dict[str, float] = {}  # host -> until when it may not reach the directory
        self._gateways: dict[str, Gateway] = {}
        self._at_end_of_turn: Callable[[str], None] | None = None  # what to do at the next end of a turn
        self._at_result: Callable[[], None] | None = None  # what to do at the next results of a batch
        self.replaced: Unit | None = None  # the directory that a second one has replaced
        self._together_s = 0.0  # time for which a keeper has reached it and its successor
        self._make_fleet(draw)

    def _make_fleet(self, draw: Random) -> None:
        self.disk = Disk(self._root, "directory", Random(draw.random()))
        fabric = Fabric()
        self._addresses: dict[str, str] = {}
        self.machines: list[EngineHost] = []
        self.keepers: list[Unit] = []
        roles = [Role.DECODE] * draw.randrange(2, 4) + [Role.PREFILL] * draw.randrange(0, 2)
        for number, role in enumerate(roles):
            name, host = f"{role.value}-{number}", f"10.0.2.{number + 1}"
            folder = processes.machine_folder(self._root, name)
            kv_tokens = draw.choice((16_000, 64_000))
            machine = EngineHost(self.loop, self.network, fabric, name, role, host, kv_tokens, folder)
            engines.MACHINES[folder] = machine
            self.machines.append(machine)
            self._addresses[name] = f"{host}:{CONTROL_PORT}"
            self.keepers.append(Unit(self.loop, f"keeper {name}", host, processes.keeper_main(machine)))
        self.directory = self._directory_on(DIRECTORY_HOSTS[0])
        offline = Random(f"offline {self.seed}")
        self.batch: list[tuple[Unit, Disk]] = []  # the batch process, in some worlds
        if offline.random() < BATCHES:
            disk = Disk(self._root, "batch", offline)
            unit = Unit(self.loop, "batch", BATCH_HOST, batch_main(disk, DIRECTORY), disk)
            self.batch.append((unit, disk))
        self.gateways: list[Unit] = []
        for number in range(draw.choice((1, 2, 2, 3, 3))):
            name, host = f"gateway-{number}", f"10.0.1.{number + 1}"
            disk = Disk(self._root, name, Random(draw.random()))

            def started(gateway: Gateway, host: str = host) -> None:
                self._gateways[host] = gateway
                self._keep_from_directory(0.0, host)

            address, batch = f"{DIRECTORY}:{DIRECTORY_PORT}", ADDRESS if self.batch else None
            main = processes.gateway_main_of(name, host, address, disk, started, batch)
            self.gateways.append(Unit(self.loop, name, host, main, disk))
        self.units = [self.directory, *self.gateways, *self.keepers, *(unit for unit, _ in self.batch)]
        for unit in self.units:
            unit.supervisor, unit.on_failure = self.me.context, self._unit_failed

    def _directory_on(self, host: str) -> Unit:
        self.network.names[DIRECTORY] = host
        main = processes.directory_main(self.disk, host, self._addresses)
        return Unit(self.loop, f"directory on {host}", host, main, self.disk)

    # Asked by the monitor

    def directory_serves(self) -> bool:
        return self.directory.alive

    def engine_runs(self, engine: str, epoch: int) -> bool:
        """Return whether the process of an engine in this epoch is alive."""
        found = next((one for one in self.machines if one.name == engine), None)
        return (
            found is not None
            and found.process is not None
            and found.process.alive
            and found.record is not None
            and found.record.epoch == epoch
        )

    def reached_directory(self, gateway: SimulatedProcess, seconds: float) -> bool:
        """Return whether a gateway could reach the newest directory during the last `seconds`."""
        cut = self.network.is_cut(gateway.host, self.directory.host)
        return not cut and self.loop.time() - self._out_of_reach.get(gateway.host, 0.0) > seconds

    def shares(self, one: SimulatedProcess, other: SimulatedProcess, seconds: float) -> bool:
        """Return whether two gateways could tell each other their usage during the last `seconds`."""
        both = all(gateway.alive and self.reached_directory(gateway, seconds) for gateway in (one, other))
        return self._in_time and both

    def live_gateways(self) -> list[Gateway]:
        alive = [one.host for one in self.gateways if one.process is not None and one.process.alive]
        return [self._gateways[host] for host in alive if host in self._gateways]

    # The run

    def run(self) -> RunResult:
        loop = self.loop
        loop.on_step = self._after_step
        loop.on_fault = self._fault
        done = loop.create_task(self._script(), context=self.me.context)
        done.add_done_callback(lambda _: loop.stop(), context=self.me.context)
        asyncio.set_event_loop(loop)
        loop.run_forever()
        if not self.monitor.violations:
            done.result()
        return RunResult(
            self.seed, loop.trace, self.monitor.violations, loop.steps, loop.time(), self.monitor.counts
        )

    def _after_step(self, process: SimulatedProcess) -> None:
        if process.crashes_at is not None and process.steps >= process.crashes_at and process.alive:
            process.crashes_at = None
            unit = next(one for one in self.units if one.process is process)
            self._crash(unit)
        if self.monitor.violations:
            self.loop.stop()

    def _fault(self, process: SimulatedProcess, context: dict[str, object]) -> None:
        error = context.get("exception")
        if process.alive and error is not None:
            what = context.get("message"), error, context.get("task")
            self.monitor.violated("no step fails", f"{process.name}: {what!r}")

    def _unit_failed(self, error: BaseException) -> None:
        """Count a process that ended by itself, as only a failing disk or a newer directory may make it."""
        self.monitor.count(f"ended by {type(error).__name__}")
        ends = JournalError | OSError | sqlite3.Error | SQLAlchemyError | DirectorySuperseded
        if not isinstance(error, ends):
            self.monitor.violated("no process ends by itself", repr(error))

    async def _script(self) -> None:
        loop = self.loop
        for unit in self.units:
            unit.start()
        watching = asyncio.create_task(self._watch())
        await asyncio.sleep(START_S)
        agents = asyncio.create_task(self._load())
        cut = Random(f"cut {self.seed}")
        if not self._calm and cut.random() < 0.2:
            self._later(cut.uniform(0.0, FAULTS_S), lambda: self._cut_off_after_report(cut))
        if not self._calm:
            await self._hurt(loop.time() + FAULTS_S)
        self._heal()
        await agents
        until, settled_s = loop.time() + QUIET_S, 0.0
        while loop.time() < until and settled_s < SETTLED_S:
            await asyncio.sleep(1.0)
            settled_s = 0.0 if self.monitor.left() else settled_s + 1.0
        watching.cancel()
        self.monitor.at_the_end()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOKS_S)
            if not self._runs(self.directory):
                self._keep_from_directory(LOOKS_S)
            self.monitor.now_and_then()
            if self.replaced is not None and self.replaced.alive:
                self._check_replaced(self.replaced)

    def _check_replaced(self, replaced: Unit) -> None:
        """Check that a replaced directory ends soon if a keeper reaches it and its successor."""
        self._keep_from_directory(LOOKS_S)  # a gateway may still follow the replaced directory
        hosts = replaced.host, self.directory.host
        between = [
            one
            for one in self.keepers
            if self._runs(one) and not any(self.network.is_cut(one.host, host) for host in hosts)
        ]
        together = between and self._runs(replaced) and self._runs(self.directory)
        self._together_s = self._together_s + LOOKS_S if together else 0.0
        if self._together_s > TOGETHER_S:
            self.monitor.violated("a replaced directory ends", f"it still runs after {TOGETHER_S:.0f} s")

    def _runs(self, unit: Unit) -> bool:
        process = unit.process
        return process is not None and process.alive and process.frozen_until <= self.loop.time()

    async def _load(self) -> None:
        draw, until = Random(self.random.random()), self.loop.time() + LOAD_S
        hosts = [one.host for one in self.gateways]
        agents: list[asyncio.Task[None]] = []
        number = 0
        if self.batch:
            owner = BatchOwner(hosts, Random(draw.random()), self.monitor)
            agents.append(asyncio.create_task(owner.run()))
        metered = Random(f"metered {self.seed}")
        if self._in_time and len(hosts) > 1 and metered.random() < 0.5:
            key = metered.choice(list(METERED))
            agents.append(asyncio.create_task(exceed_limits(key, hosts, metered, until, self._answered)))
        while self.loop.time() < until:
            await asyncio.sleep(draw.expovariate(0.9))
            number += 1
            key = LIMITED if draw.random() < 0.35 else FREE
            agent = SimulatedAgent(key, f"c{number}", hosts, Random(draw.random()), self._answered)
            turns = draw.choice((1, 3, 12, 12))
            agents.append(asyncio.create_task(agent.run(turns, until)))
        await asyncio.gather(*agents)

    def _answered(self, answer: Answer) -> None:
        self.monitor.count(f"answers {answer.status}")
        if answer.status == 500:
            self.monitor.violated("no step fails", f"a client got {answer.body.decode()}")
        if answer.seconds > LONGEST_TURN_S:
            self.monitor.violated(
                "no turn waits beyond its limit", f"status {answer.status} after {answer.seconds:.1f} s"
            )

    # Faults

    async def _hurt(self, until: float) -> None:
        draw = Random(self.random.random())
        mean_s = draw.choice((1.0, 2.5, 6.0))
        while self.loop.time() < until:
            await asyncio.sleep(draw.expovariate(1.0 / mean_s))
            fault = draw.choice(FAULTS + BATCH_FAULTS if self.batch else FAULTS)
            self.monitor.count(fault.__name__.lstrip("_"))
            fault(self, draw)

    def _heal(self) -> None:
        """End every lasting fault."""
        for one in self._hosts():
            for other in self._hosts():
                self._mend(one, other)
        for disk in (self.disk, *(disk for _, disk in self.batch)):
            disk.full = disk.fails = False
            disk.slow_s = 0.0
            disk.at_write = disk.at_sync = None
        for unit in self.units:
            unit.start()
        self.network.faults = Faults(self.network.faults.delay_s)
        self._at_end_of_turn = None

    def _hosts(self) -> list[str]:
        return list(dict.fromkeys(one.host for one in self.units))

    def _crash(self, unit: Unit, *, power_lost: bool = False, away_s: float | None = None) -> None:
        if unit is self.directory:
            self._keep_from_directory(UNNOTICED_S if power_lost else 0.0)
        unit.crash(power_lost=power_lost)
        away_s = self.random.uniform(0.05, 3.0) if away_s is None else away_s
        unit.start_in(away_s, self.me.context)

    def _mend(self, one: str, other: str) -> None:
        if self.network.is_cut(one, other):
            self.network.mend(one, other)
            if self.directory.host in (one, other):
                self._keep_from_directory(0.0, one, other)

    def _keep_from_directory(self, seconds: float, *hosts: str) -> None:
        """Record that `hosts`, by default all, may not reach the directory for the next `seconds`."""
        until = self.loop.time() + seconds
        for host in hosts or self._hosts():
            self._out_of_reach[host] = max(self._out_of_reach.get(host, 0.0), until)

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        self.loop.call_later(seconds, undo, context=self.me.context)

    def _crash_soon(self, draw: Random) -> None:
        """Let a process crash at one of its next awaits."""
        unit = draw.choice(self.units + [self.directory] * 3)
        if unit.process is not None and unit.process.alive:
            unit.process.crashes_at = unit.process.steps + draw.randrange(1, 400)

    def _crash_after_commit(self, draw: Random) -> None:
        """Let the directory crash a few steps after its journal's next sync, maybe before it answers."""
        process = self.directory.process
        if process is None or not process.alive:
            return

        def strike() -> None:
            process.crashes_at = process.steps + draw.randrange(1, 12)

        self.disk.at_sync = strike

    def _lose_power(self, draw: Random) -> None:
        """Cut the power of the directory's host, often in the middle of a write."""
        if draw.random() < 0.5:
            self._crash(self.directory, power_lost=True)
            return
        directory = self.directory

        def strike() -> None:
            self._later(0.0, lambda: None)
            self._crash(directory, power_lost=True)

        self.disk.at_write = self.disk.writes + draw.randrange(1, 12), strike

    def _start_second_directory(self, draw: Random) -> None:
        """Start a new directory on another host from a copy of the disk, while the old one still serves.

        Some hosts cannot reach the old directory for a while. When it ends, nobody restarts it.
        """
        first = self.directory
        if self.replaced is not None or first.disk is None or not first.alive:
            return
        self.replaced, first.retired = first, True
        self.disk = first.disk.copy("second")
        second = self.directory = self._directory_on(DIRECTORY_HOSTS[1])
        second.supervisor, second.on_failure = self.me.context, self._unit_failed
        self.units.append(second)
        self.monitor.journal_copied(first.host, second.host)
        self._keep_from_directory(0.0)
        for host in self._hosts():
            if host not in DIRECTORY_HOSTS and draw.random() < 0.3:
                self._cut(first.host, host, draw)
        second.start()

    def _kill_engine(self, draw: Random) -> None:
        draw.choice(self.machines).kill()

    def _cut_off_after_report(self, draw: Random) -> None:
        """Cut a gateway off when it has reported the end of a turn, for longer than it may be silent."""
        seconds = draw.uniform(GATEWAY_GRACE_S + 0.2, TTL_S - 0.5)

        def strike(host: str) -> None:
            directory = self.directory.host
            self.network.cut(directory, host, both_ways=True)
            self.network.reset_between(directory, host)
            self._later(seconds, lambda: self._mend(directory, host))

        self._at_end_of_turn = strike

    def turn_ended(self, gateway: str) -> None:
        """Inject the fault that is due, if any, before the answer to a gateway's report arrives."""
        host = next((one.host for one in self.gateways if gateway.startswith(f"{one.name}.")), None)
        strike, self._at_end_of_turn = self._at_end_of_turn, None
        if strike is not None and host is not None and not self.network.is_cut(self.directory.host, host):
            self._later(0.0, lambda: strike(host))

    def _cut_link(self, draw: Random) -> None:
        one, other = draw.sample(self._hosts(), 2)
        if draw.random() < 0.5:
            one = self.directory.host
        self._cut(one, other, draw)

    def _cut(self, one: str, other: str, draw: Random) -> None:
        """Cut a link, one way or both, for some seconds."""
        if one != other and not self.network.is_cut(one, other):
            self.network.cut(one, other, both_ways=draw.random() < 0.7)
            self._later(draw.expovariate(0.2), lambda: self._mend(one, other))

    def _reset_connections(self, draw: Random) -> None:
        self._keep_from_directory(0.0)
        self.network.reset_some(draw.choice((0.2, 1.0)))

    def _freeze(self, draw: Random) -> None:
        unit = draw.choice(self.units)
        if unit.process is not None:
            seconds = draw.expovariate(0.7)
            unit.process.freeze(seconds)
            self._keep_from_directory(seconds, *([] if unit is self.directory else [unit.host]))

    def _hurt_disk(self, draw: Random) -> None:
        self._hurt_one(self.disk, draw)

    def _hurt_batch(self, draw: Random) -> None:
        """Let the batch process crash at an await, its host lose power after a result, or its disk fail."""
        unit, disk = self.batch[0]
        which = draw.randrange(4)
        if which == 0:
            seconds = draw.choice((0.0, 0.05, 0.5))
            self._at_result = lambda: self._later(seconds, lambda: self._crash(unit, power_lost=True))
        elif which == 1:
            self._hurt_one(disk, draw)
        elif unit.process is not None and unit.process.alive:
            unit.process.crashes_at = unit.process.steps + draw.randrange(1, 400)

    def results_taken(self) -> None:
        """Inject the fault that is due, if any, when results of a batch have been written."""
        strike, self._at_result = self._at_result, None
        if strike is not None:
            strike()

    def _hurt_one(self, disk: Disk, draw: Random) -> None:
        """Let a disk be full, fail or be slow for a while. The directory may crash while its disk is slow."""
        which = draw.randrange(3)
        if which == 0:
            disk.full = True
        elif which == 1:
            disk.fails = True
        else:
            disk.slow_s = draw.choice((0.2, 2.0, 6.0))
            if disk is self.disk and draw.random() < 0.5:
                lost, directory = draw.random() < 0.5, self.directory
                self._later(draw.uniform(0.0, 4.0), lambda: self._crash(directory, power_lost=lost))

        def undo() -> None:
            disk.full = disk.fails = False
            disk.slow_s = 0.0

        seconds = draw.expovariate(0.3)
        if disk is self.disk:
            self._keep_from_directory(seconds + 2 * disk.slow_s)  # gateways learn of written bindings only
        self._later(seconds, undo)


FAULTS = [
    *[World._crash_soon] * 3,
    World._crash_after_commit,
    World._lose_power,
    World._start_second_directory,
    World._kill_engine,
    *[World._cut_link] * 2,
    World._reset_connections,
    World._freeze,
    World._hurt_disk,
]
BATCH_FAULTS = [World._hurt_batch] * 4

_current: list[World] = []


def prepare() -> None:
    """Install the hooks and stand-ins that all runs in this operating-system process share."""
    logging.disable(logging.CRITICAL)
    disks.install()
    processes.install()
    invariants.install(lambda: _current[-1].monitor)
    run(0)  # a first run takes twice as long as later ones, and all others run in copies of this process
    gc.freeze()  # garbage collections of the copies skip the objects that all runs share


def run(seed: int) -> RunResult:
    """Run the world that is drawn from `seed`, and return the outcome."""
    root = Path(tempfile.mkdtemp(prefix="simulated-"))
    try:
        world = World(seed, root)
        _current.append(world)
        return world.run()
    finally:
        clock.end()
        shutil.rmtree(root, ignore_errors=True)
