"""The Ray actor of the directory: keeps its process running, and tells it where the keepers are.

The process outlives the actor, which is lost with Ray's node. New conversations are placed meanwhile.
"""

import asyncio
import json
import logging

import ray
from ray.exceptions import RayError

from deploy.directory.config import HostedDirectoryConfig
from deploy.fleet.components import alike, directory_settings, placer_settings, prefill_curves
from deploy.home import FleetHome, FleetKeys, Purpose
from deploy.ray.common import Background, SealedFleet, engines_of, keeper_name, log_to_stderr
from deploy.ray.hosting import HostedProcess, end, keep, last_port
from workers import processes
from workers.keeper.process_lease import LeasedProcess
from workers.oom_score import OomScore, set_oom_score

log = logging.getLogger("conserve.deploy.directory_actor")

CALL_LIMIT_S = 10.0
FIND_EVERY_S = 1.0


class DirectoryActor:
    def __init__(self, sealed: SealedFleet, home: FleetHome, host: str | None) -> None:
        log_to_stderr()
        set_oom_score(OomScore.SERVING)
        home.create()
        self._keys = FleetKeys.here(home.name)
        self._fleet, self._home = sealed.opened(self._keys), home
        self._host = host or ray.util.get_node_ip_address()
        self._keepers = home.directory / "keepers.json"
        self._address = ""
        self._handles: dict[str, ray.actor.ActorHandle] = {}
        self._addresses: dict[str, str] = {}
        self._background = Background(self._work)

    def address(self) -> str:
        """Return host:port of the gRPC service; empty until it listens."""
        return self._address

    def end(self) -> bool:
        self._background.call(self._background.stop(), CALL_LIMIT_S)
        end(self._home.directory)
        return True

    async def _work(self) -> None:
        port = last_port(self._home.directory, self._host)

        async def look(_: LeasedProcess) -> None:
            if not self._address and await asyncio.to_thread(processes.listens, self._host, port):
                self._address = f"{self._host}:{port}"

        async with asyncio.TaskGroup() as group:
            group.create_task(keep(self._hosted(port), look))
            group.create_task(self._tell_keepers())

    def _hosted(self, port: int) -> HostedProcess:
        config = HostedDirectoryConfig(
            settings=directory_settings(self._fleet),
            placer=placer_settings(self._fleet),
            curves=dict(prefill_curves(self._fleet)),
            alike=dict(alike(self._fleet)),
            journal=str(self._home.journal),
            keepers=str(self._keepers),
            host=self._host,
            port=port,
            secret=self._keys.of(Purpose.DIRECTORY),
            keepers_key=self._keys.of(Purpose.KEEPERS),
            lease_s=self._fleet.engine.lease,
        )
        folder = self._home.directory
        return HostedProcess("directory", "deploy.directory", config.dump(), folder, port, self._home.mark)

    async def _tell_keepers(self) -> None:
        """Write the keepers' addresses to the file when they change, as long as Ray answers."""
        written: dict[str, str] | None = None
        while True:
            present = await asyncio.to_thread(_engines)
            if present is not None:
                for engine in self._handles.keys() - set(present):
                    del self._handles[engine]
                found = await asyncio.gather(*(self._keeper_address(engine) for engine in present))
                self._addresses = dict(zip(present, found, strict=True))
                if self._addresses != written:
                    written = self._addresses
                    processes.write_atomically(self._keepers, json.dumps(written))
            await asyncio.sleep(FIND_EVERY_S)

    async def _keeper_address(self, engine: str) -> str:
        """Ask the engine's keeper for its address. A known handle works even while Ray's head is away."""
        try:
            if engine not in self._handles:
                self._handles[engine] = await asyncio.to_thread(ray.get_actor, keeper_name(engine))
            call = self._handles[engine].control_address.remote()
            return str(await asyncio.wait_for(asyncio.wrap_future(call.future()), CALL_LIMIT_S))
        except (RayError, TimeoutError, ValueError) as error:
            self._handles.pop(engine, None)  # looked up by name again next time
            log.debug("keeper does not answer engine=%s reason=%r", engine, str(error))
            return self._addresses.get(engine, "")


def _engines() -> list[str] | None:
    """Return the names of the engines that have a keeper; None while Ray does not answer."""
    try:
        return engines_of(ray.util.list_named_actors())
    except (RayError, RuntimeError) as error:
        log.warning("keepers not listed reason=%s", str(error).splitlines()[0])
        return None
