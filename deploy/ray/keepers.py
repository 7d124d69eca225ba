"""The Ray actor of a keeper, and `Keepers`, which starts, drains and ends the keepers of a fleet.

`conserve up` and the autoscaler change engines and their number through `Keepers`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.fleet import FleetSpec
from deploy.fleet.changes import Need
from deploy.fleet.components import (
    EngineName,
    engine_keys,
    engine_spec,
    keeper_settings,
    power_settings,
    shared_tier,
)
from deploy.fleet.engine_arguments import engine_resources
from deploy.home import CONTROL_FILE, FleetHome, FleetKeys, Purpose
from deploy.models.built_in import ensure_model
from deploy.ray.common import (
    Background,
    SealedFleet,
    always,
    engine_named,
    engines_of,
    keeper_name,
    log_to_stderr,
    resources,
    serve_metrics,
)
from deploy.ray.control import ControlClient, ControlError, ControlServer
from workers.keeper.engine_status import EngineLink, KeeperStatus, StatusStore
from workers.keeper.idle_moves import KvSender
from workers.keeper.keeper import Keeper
from workers.keeper.launch import FEED_SOCKET
from workers.keeper.process_lease import LeasedProcess
from workers.oom_score import OomScore, set_oom_score
from workers.power.engine_power import EnginePower, visible_gpus
from workers.processes import write_atomically
from workers.profiles import Coefficients, StartingKnowledge

log = logging.getLogger("conserve.deploy.keepers")

ANSWER_LIMIT_S = 10.0
END_LIMIT_S = 90.0
FREE_LIMIT_S = 30.0
GRACE_S = 10.0
POLL_S = 0.3
QUIET_S = 1.0  # a turn that a gateway has already sent arrives within this time


class KeeperActor:
    """Ray actor that hosts the keeper of one engine; the keeper itself is in `workers/keeper/`."""

    def __init__(
        self,
        sealed: SealedFleet,
        name: str,
        home: FleetHome,
        host: str | None,
        profiles: Mapping[str, Coefficients],
    ) -> None:
        """Create the keeper of engine `name`. `host` is this node's address; None asks Ray for it."""
        log_to_stderr()
        set_oom_score(OomScore.KEEPER)
        self._keys = FleetKeys.here(home.name)
        fleet = sealed.opened(self._keys)
        engine = engine_named(fleet, name)
        host = host or ray.util.get_node_ip_address()
        home.create()
        ensure_model(fleet, home)
        self._fleet, self._engine, self._home = fleet, engine, home
        self._spec = engine_spec(fleet, engine, home, host)
        self._spec.directory.mkdir(parents=True, exist_ok=True)
        self._store = StatusStore(engine.name)
        self._settings = keeper_settings(fleet)
        self._power = power_settings(fleet, engine, home, visible_gpus())
        self._shared_tier = shared_tier(fleet, engine, home)
        self._known = StartingKnowledge(profiles, engine.tier.power_cap_w)
        self._control = ""
        self._keeper: Keeper | None = None
        self._background = Background(self._work)

    def control_address(self) -> str:
        """Return host:port of the control service; empty until it listens."""
        return self._control

    def status(self) -> KeeperStatus:
        return self._store.status

    def compare(self, sealed: SealedFleet, profiles: Mapping[str, Coefficients]) -> str:
        """Return what the engine needs to match the fleet file in `sealed` (deploy.fleet.changes.Need)."""
        fleet = sealed.opened(self._keys)
        engine = engine_named(fleet, self._engine.name)
        spec = engine_spec(fleet, engine, self._home, self._spec.host)
        moved = engine_resources(fleet, engine.tier) != engine_resources(self._fleet, self._engine.tier)
        if moved or spec.fingerprint() != self._spec.fingerprint():
            return Need.ENGINE.value
        power = power_settings(fleet, engine, self._home, visible_gpus())
        store = shared_tier(fleet, engine, self._home)
        ours = (self._settings, self._power, self._shared_tier, self._known)
        known = StartingKnowledge(profiles, engine.tier.power_cap_w)
        same = (keeper_settings(fleet), power, store, known) == ours
        return (Need.NOTHING if same else Need.KEEPER).value

    def end(self) -> bool:
        """End the engine with all of its processes, and the keeper's work."""
        shut_down_cleanly(self._background, self._store, self._keeper)
        (self._spec.directory / CONTROL_FILE).unlink(missing_ok=True)
        return True

    async def _work(self) -> None:
        feed = EngineLink(self._spec.engine, self._spec.directory / FEED_SOCKET)
        sender = KvSender(feed, self._store, self._spec.served_name, self._keys.of(Purpose.ENGINES))
        server = ControlServer(self._store, feed, self._keys.of(Purpose.KEEPERS), sender)
        self._control = await server.start(self._spec.host, self._last_port())
        write_atomically(self._spec.directory / CONTROL_FILE, self._control)
        self._store.tell(self._store.status.phase, metrics=serve_metrics(self._spec.host))
        self._keeper = Keeper(
            self._spec,
            self._settings,
            self._store,
            feed,
            keys=engine_keys(self._keys),
            control=self._control,
            shared_tier=self._shared_tier,
            known=self._known,
        )
        try:
            async with EnginePower(self._power):
                await self._keeper.run()
        finally:
            await server.stop()

    def _last_port(self) -> int:
        """Return the port of the engine's former keeper, where the directory looks for this one."""
        file = self._spec.directory / CONTROL_FILE
        return int(file.read_text().rsplit(":", 1)[1]) if file.exists() else 0


def shut_down_cleanly(background: Background, store: StatusStore, keeper: Keeper | None) -> None:
    """Report that the engine has ended, then end it, so that the directory does not wait for its lease."""

    async def withdraw() -> None:
        store.engine_down()

    background.call(withdraw(), 10.0)
    background.call(background.stop(), 10.0)
    if keeper is not None:
        background.call(keeper.end(), 60.0)


class Keepers:
    """Starts, drains and ends the keepers of a fleet."""

    def __init__(
        self, fleet: FleetSpec, home: FleetHome, host: str | None, profiles: Mapping[str, Coefficients]
    ) -> None:
        self._fleet, self._home, self._host = fleet, home, host
        self._keys = FleetKeys.here(home.name)
        self._sealed = SealedFleet.of(fleet, self._keys)
        self._profiles = profiles  # measured latency models of the fleet's engines

    def engines(self) -> list[str]:
        """Return the engines that have a keeper, in any state."""
        return engines_of(ray.util.list_named_actors())

    def start(self, engine: EngineName) -> Any:
        """Start a keeper, or return the one that exists."""
        actor = ray.remote(KeeperActor).options(
            **always(keeper_name(engine.name)), **resources(engine_resources(self._fleet, engine.tier))
        )
        return actor.remote(self._sealed, engine.name, self._home, self._host, self._profiles)

    def status(self, engine: str) -> KeeperStatus | None:
        """Return the status of an engine's keeper; None while it waits for a node, or if its node is lost."""
        try:
            status: KeeperStatus = self._ask(engine, "status")
        except (RayError, ValueError):
            return None
        return status

    def need(self, engine: EngineName) -> Need:
        """Return what has to be done with an engine so that it matches the fleet file."""
        try:
            return Need(self._ask(engine.name, "compare", self._sealed, self._profiles))
        except (RayError, ValueError):
            return Need.PLACE

    def drain(self, engine: str, limit_s: float) -> bool:
        """Drain an engine; return False if it still has turns after `limit_s`, or does not answer."""
        try:
            return asyncio.run(self._drained(engine, time.monotonic() + limit_s))
        except (RayError, ValueError, ControlError) as error:
            log.warning("engine not drained engine=%s reason=%s", engine, str(error).splitlines()[0])
            return False

    def resume(self, engine: str) -> None:
        """Let an engine accept conversations again, after a drain that was not finished."""
        with contextlib.suppress(RayError, ValueError, ControlError):
            asyncio.run(self._resumed(engine))

    def end(self, engine: str) -> None:
        """End an engine and its keeper, so that the name becomes free."""
        with contextlib.suppress(ValueError):
            handle = ray.get_actor(keeper_name(engine))
            with contextlib.suppress(RayError):  # an actor that does not end is killed next
                if self.status(engine) is not None:
                    ray.get(handle.end.remote(), timeout=END_LIMIT_S)
        self.end_actor(keeper_name(engine))
        # If its keeper did not answer, an engine on another machine ends by its lease. On this machine the
        # supervisor keeps the lease alive.
        process = LeasedProcess.recorded(self._home.engine(engine)) if self._host is not None else None
        if process is not None:
            process.end(GRACE_S)

    def end_actor(self, name: str) -> None:
        """End an actor if it exists, and wait until its name is free.

        A keeper's engine runs on until its lease ends; another keeper can adopt it until then.
        """
        try:
            ray.kill(ray.get_actor(name), no_restart=True)
        except ValueError:
            return
        deadline = time.monotonic() + FREE_LIMIT_S
        while name in ray.util.list_named_actors():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ray still lists the ended actor {name}")
            time.sleep(0.1)

    def _ask(self, engine: str, method: str, *arguments: object) -> Any:
        handle = ray.get_actor(keeper_name(engine))
        return ray.get(getattr(handle, method).remote(*arguments), timeout=ANSWER_LIMIT_S)

    def _client(self, engine: str) -> ControlClient:
        address = self._ask(engine, "control_address")
        return ControlClient(address, self._keys.of(Purpose.KEEPERS))

    async def _resumed(self, engine: str) -> None:
        async with self._client(engine) as client:
            state = (await client.info()).state
            if state is not None and state.draining:
                await client.drain(False)

    async def _drained(self, engine: str, until: float) -> bool:
        async with self._client(engine) as client:
            if (await client.info()).state is None:
                return True  # it does not serve
            await client.drain()
            quiet_since: float | None = None
            while time.monotonic() < until:
                state = (await client.info()).state
                if state is None:
                    return True
                if not state.drained:
                    quiet_since = None
                elif quiet_since is None:
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since >= QUIET_S:
                    return True
                await asyncio.sleep(POLL_S)
            return not (state and (state.running or state.waiting))
