"""The product's processes in a simulated run: how they are configured, started and restarted."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deploy.directory import hosted_directory
from deploy.directory.config import HostedDirectoryConfig
from deploy.directory.hosted_directory import HostedDirectory
from deploy.ray.control import ControlServer
from kvtransfer.config import ConnectorConfig
from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.prefill_curve import PrefillCurve
from router.auth.keys import Key, Limits, hash_secret
from router.directory.directory import DirectorySettings
from router.gateway import main as gateway_main
from router.gateway.config import AnswersConfig, BatchAddress, GatewayConfig, ServedModel
from router.gateway.main import Gateway
from router.http.connection import ServerConnection
from router.http.upstream import UpstreamConnection
from tests.simulated import engines
from tests.simulated.disk import Disk
from tests.simulated.engines import MODEL, EngineHost
from tests.simulated.loop import SimulatedProcess, VirtualLoop, number_of
from workers.keeper import keeper as keeper_module
from workers.keeper.config import KeeperSettings
from workers.keeper.engine_status import EngineLink, StatusStore
from workers.keeper.idle_moves import KvSender
from workers.keeper.keeper import Keeper
from workers.keeper.launch import FEED_SOCKET, Device, EngineKeys, LaunchSpec

SECRET, KEEPERS_KEY, NO_KEY = "directory", "keepers", ""
DIRECTORY_PORT, GATEWAY_PORT, CONTROL_PORT = 7000, 8000, 9000
PLACE_WAIT_S = 4.0
GATEWAY_GRACE_S = 3.0  # a gateway's turns count as ended after this long without its stream
TTL_S = 5.0  # a conversation ends after this much silence
ENGINE_LEASE_S = 8.0
TURNS_AT_ONCE, REQUESTS_PER_MINUTE = 2, 60  # limits of the limited key
FREE, LIMITED = "free-key", "limited-key"  # secrets of the two callers
METERED = {  # secrets of callers with one limit a minute each, which they exceed
    "requests-key": Limits(requests_per_minute=20),
    "tokens-key": Limits(tokens_per_minute=1000),
}


class Unit:
    """Part of a fleet that runs as one process at a time, and is restarted when its process ends."""

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        host: str,
        main: Callable[[], Coroutine[Any, Any, Any]],
        disk: Disk | None = None,
    ) -> None:
        self.loop, self.name, self.host, self.main, self.disk = loop, name, host, main, disk
        self.process: SimulatedProcess | None = None
        self.lives = 0
        self.retired = False  # not started again after its end

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def start(self) -> None:
        """Start the process if it is not running."""
        if self.alive or self.retired:
            return
        self.lives += 1
        self.process = SimulatedProcess(self.loop, self.name, self.host, self.disk)
        self.process.spawn(self._run(self.process))

    def start_in(self, seconds: float, context: Any) -> None:
        self.loop.call_later(seconds, self.start, context=context)

    def crash(self, *, power_lost: bool = False) -> None:
        process = self.process
        if process is not None and process.alive:
            process.crash()
            self.loop.network.process_ended(process, silently=power_lost)
            if self.disk is not None:
                self.disk.remount(power_lost=power_lost)

    async def _run(self, process: SimulatedProcess) -> None:
        """Run the process's main function. An error in it ends the process, as in reality."""
        try:
            await self.main()
        except Exception as error:  # noqa: BLE001  reported below
            logging.getLogger("conserve.simulated").warning("%s ended: %r", self.name, error)
            self.on_failure(error)
        self.loop.call_soon(self._ended, process, context=self.supervisor)

    on_failure: Callable[[BaseException], None] = staticmethod(lambda error: None)
    supervisor: Any = None  # context in which ends are handled

    def _ended(self, process: SimulatedProcess) -> None:
        if self.process is process and process.alive:
            self.crash()
            self.start_in(1.0, self.supervisor)


Main = Callable[[], Coroutine[Any, Any, Any]]


def directory_main(disk: Disk, host: str, addresses: dict[str, str]) -> Main:
    async def main() -> None:
        keepers = disk.path / "keepers.json"
        keepers.write_text(json.dumps(addresses))
        config = HostedDirectoryConfig(
            settings=DirectorySettings(ttl_s=TTL_S, gateway_grace_s=GATEWAY_GRACE_S),
            placer=PlacerSettings(headroom_tokens=256),
            curves={"prefill": PrefillCurve(0.01, 1e-5, 0.0), "decode": PrefillCurve(0.01, 2e-5, 0.0)},
            alike={},
            journal=str(disk.path / "journal"),
            keepers=str(keepers),
            host=host,
            port=DIRECTORY_PORT,
            secret=SECRET,
            keepers_key=KEEPERS_KEY,
            lease_s=ENGINE_LEASE_S,
        )
        await HostedDirectory(config).run()

    return main


def gateway_main_of(
    name: str,
    host: str,
    directory: str,
    disk: Disk,
    on_start: Callable[[Gateway], None],
    batch: BatchAddress | None,
) -> Main:
    keys = (
        Key("free", "free", hash_secret(FREE)),
        Key(
            "limited",
            "limited",
            hash_secret(LIMITED),
            limits=Limits(turns=TURNS_AT_ONCE, requests_per_minute=REQUESTS_PER_MINUTE),
        ),
        *(Key(secret, secret, hash_secret(secret), limits=limits) for secret, limits in METERED.items()),
    )

    async def main() -> None:
        config = GatewayConfig(
            directory=directory,
            models=(ServedModel(MODEL),),
            name=name,
            host=host,
            port=GATEWAY_PORT,
            metrics_host=host,
            place_wait_s=PLACE_WAIT_S,
            directory_secret=SECRET,
            keys=keys,
            answers=AnswersConfig(path=str(disk.path / "answers.sqlite")),
            batch=batch,
        )
        gateway = Gateway(config)
        await gateway.start()
        on_start(gateway)
        await asyncio.Event().wait()

    return main


def keeper_main(machine: EngineHost) -> Main:
    tier = "prefill" if machine.role is Role.PREFILL else "decode"
    spec = LaunchSpec(
        engine=machine.name,
        tier=tier,
        role=machine.role,
        model=MODEL,
        served_name=MODEL,
        device=Device.CPU,
        directory=machine.directory,
        host=machine.host,
        connector=ConnectorConfig(),
    )
    settings = KeeperSettings(
        lease_s=ENGINE_LEASE_S,
        health_interval_s=3.0,
        health_timeout_s=2.0,
        health_misses=2,
        backoff_longest_s=4.0,
    )

    async def main() -> None:
        store = StatusStore(machine.name)
        feed = EngineLink(machine.name, machine.directory / FEED_SOCKET)
        sender = KvSender(feed, store, MODEL, NO_KEY)
        server = ControlServer(store, feed, KEEPERS_KEY, sender)
        control = await server.start(machine.host, CONTROL_PORT)
        await Keeper(spec, settings, store, feed, keys=EngineKeys(), control=control).run()

    return main


def install() -> None:
    """Replace what the processes take from the operating system, besides network, disk and clock."""
    for name in ("LeasedProcess", "last_epoch", "free_port"):
        stand_in = engines.HostedEngine if name == "LeasedProcess" else getattr(engines, name)
        setattr(keeper_module, name, stand_in)
    keeper_module.engine_command = lambda *_: None
    hosted_directory.settle_heap = lambda: None
    hosted_directory.start_http_server = lambda *_, **__: (SimpleNamespace(server_port=1), None)
    gateway_main.reserve_descriptors = lambda connections: None
    for connection in (UpstreamConnection, ServerConnection):
        connection.__hash__ = number_of  # type: ignore[method-assign]
    gateway_main.LOOKS_AT_LOOP_S = 10.0  # a step of this loop takes no time that could be measured


def machine_folder(root: Path, name: str) -> Path:
    folder = root / "machines" / name
    folder.mkdir(parents=True)
    return folder
