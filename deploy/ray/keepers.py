"""The keepers of a fleet in Ray: which there are, starting one, draining and ending one.

Used by whoever changes the number of engines or what they are: `conserve up` and the autoscaler.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.fleet import Fleet
from deploy.fleet.changes import Need
from deploy.fleet.rooms import EngineName
from deploy.home import FleetHome
from deploy.ray.actor_options import always, resources
from deploy.ray.keeper_actor import KeeperActor
from deploy.ray.names import engines_of, keeper_name
from workers.board import Status
from workers.control.client import ControlClient, ControlError

log = logging.getLogger("conserve.deploy.keepers")

ANSWER_LIMIT_S = 10.0
END_LIMIT_S = 90.0
FREE_LIMIT_S = 30.0
LOOK_EVERY_S = 0.3
QUIET_S = 1.0  # a turn on its way from a gateway arrives within


class Keepers:
    def __init__(self, fleet: Fleet, home: FleetHome, secret: str, host: str | None) -> None:
        self._fleet, self._home, self._secret, self._host = fleet, home, secret, host

    def engines(self) -> list[str]:
        """Those that have a keeper, whatever it is doing."""
        return engines_of(ray.util.list_named_actors())

    def start(self, engine: EngineName) -> Any:
        """A keeper that is there already is given back as it is."""
        actor = ray.remote(KeeperActor).options(
            **always(keeper_name(engine.name)), **resources(engine.tier.resources)
        )
        return actor.remote(self._fleet, engine, self._home, self._secret, self._host)

    def status(self, engine: str) -> Status | None:
        """None: it does not answer, as one that waits for a node, or whose node is lost."""
        try:
            status: Status = self._ask(engine, "status")
        except (RayError, ValueError):
            return None
        return status

    def need(self, engine: EngineName) -> Need:
        """What this engine needs to become what the fleet file says now."""
        try:
            return Need(self._ask(engine.name, "compare", self._fleet, engine))
        except (RayError, ValueError):
            return Need.PLACE

    def drain(self, engine: str, limit_s: float) -> bool:
        """Until nothing is left on it, at most so long; False if turns still ran, or it did not answer."""
        try:
            address = self._ask(engine, "control_address")
            return asyncio.run(self._drained(address, time.monotonic() + limit_s)) if address else False
        except (RayError, ValueError, ControlError) as error:
            log.warning("engine not drained engine=%s reason=%s", engine, str(error).splitlines()[0])
            return False

    def resume(self, engine: str) -> None:
        """Take back a drain that somebody began and did not end."""
        with contextlib.suppress(RayError, ValueError, ControlError):
            address = self._ask(engine, "control_address")
            if address:
                asyncio.run(self._resumed(address))

    def end(self, engine: str) -> None:
        """End the engine and its keeper; its name is free then."""
        with contextlib.suppress(ValueError):
            handle = ray.get_actor(keeper_name(engine))
            with contextlib.suppress(RayError):  # killed next; its engine ends by its lease
                if self.status(engine) is not None:
                    ray.get(handle.end.remote(), timeout=END_LIMIT_S)
        self.end_keeper(engine)

    def end_keeper(self, engine: str) -> None:
        """The engine goes on for its lease: another keeper may adopt it."""
        end_actor(keeper_name(engine))

    def _ask(self, engine: str, method: str, *arguments: object) -> Any:
        handle = ray.get_actor(keeper_name(engine))
        return ray.get(getattr(handle, method).remote(*arguments), timeout=ANSWER_LIMIT_S)

    async def _resumed(self, address: str) -> None:
        async with ControlClient(address, self._secret) as client:
            state = (await client.info()).state
            if state is not None and state.draining:
                await client.drain(False)

    async def _drained(self, address: str, until: float) -> bool:
        async with ControlClient(address, self._secret) as client:
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
                await asyncio.sleep(LOOK_EVERY_S)
            return not (state and (state.running or state.waiting))


def end_actor(name: str) -> None:
    """And wait until its name is free; one that is not there is no mistake."""
    try:
        ray.kill(ray.get_actor(name), no_restart=True)
    except ValueError:
        return
    deadline = time.monotonic() + FREE_LIMIT_S
    while name in ray.util.list_named_actors():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray does not let go of the actor {name}")
        time.sleep(0.1)
