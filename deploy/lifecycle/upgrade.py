"""Changes a running fleet to a new fleet file, one engine at a time, while it serves (`conserve up`)."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from deploy.errors import LifecycleError
from deploy.fleet import FleetSpec, load_fleet
from deploy.fleet.changes import Difference, FleetChanges, differences, not_while_running, plan
from deploy.fleet.components import EngineName, engines
from deploy.home import FleetHome, RunRecord
from deploy.lifecycle.endpoint import endpoint_of
from deploy.lifecycle.up import (
    Tell,
    directory_address,
    refuse_few_descriptors,
    refuse_taken_port,
    until_engines_serve,
    until_gateway_answers,
    write_fleet,
)
from deploy.ray.cluster import connect
from deploy.ray.common import AUTOSCALER, DIRECTORY, GATEWAYS, keeper_name, replica


@contextlib.contextmanager
def upgrading(new: FleetSpec, home: FleetHome) -> Iterator[tuple["Upgrade", list[Difference]]]:
    """Yield an upgrade of the running fleet to `new`, not begun yet, and the keys whose values differ."""
    run = home.read_run()
    if run is None or not run.endpoint:
        raise LifecycleError(
            f"fleet '{new.name}' is still starting, or its start was killed; "
            f"end it with: conserve down {new.name}"
        )
    old = load_fleet(home.fleet_file)
    changed = differences(old, new)
    fixed = not_while_running(changed)
    if fixed:
        paths = ", ".join(one.path for one in fixed)
        raise LifecycleError(
            f"fleet '{new.name}' is up, and this cannot change while it runs: {paths}; "
            f"end it with: conserve down {new.name}, then bring it up again"
        )
    ray = connect(old, home, run)
    try:
        yield Upgrade(ray, old, new, home, run), changed
    finally:
        ray.shutdown()


class Upgrade:
    """Upgrade of a running fleet to a new fleet file, one engine at a time."""

    def __init__(self, ray: Any, old: FleetSpec, new: FleetSpec, home: FleetHome, run: RunRecord) -> None:
        from deploy.lifecycle.actors import Actors  # imports Ray, whose environment is complete only now

        self._ray, self._old, self._new, self._home, self._run = ray, old, new, home, run
        self._before, self._after = Actors(old, home), Actors(new, home)
        tiers = {tier.name: tier for tier in (*old.tiers, *new.tiers)}  # as the new file has them
        there = [EngineName(name, tiers[replica(name)[0]]) for name in self._after.engines()]
        needs = {engine.name: self._after.need(engine) for engine in there}
        self.plan: FleetChanges = plan(old, new, home, needs)

    @property
    def endpoint(self) -> str:
        return endpoint_of(self._new)

    def run(self, tell: Tell) -> None:
        """Make the changes. Bindings and conversations stay.

        If an engine does not start with its new settings, it is started with the old ones, and the remaining
        changes are not made.
        """
        made = self.plan
        refuse_few_descriptors(self._new)
        before, after = self._old.gateway, self._new.gateway
        if (before.host, before.port) != (after.host, after.port):
            refuse_taken_port(self._new)
        self._after.end_actor(AUTOSCALER)  # or it would react to engines that are replaced
        for name in self._after.engines():
            self._after.resume(name)  # the autoscaler, or an interrupted upgrade, may have drained some
        address = self._directory(tell) if made.directory else self._run.directory
        for engine in made.added:
            self._start(engine, tell)
        for engine in made.keepers:
            tell(f"{engine.name}: a new keeper takes over")
            self._after.end_actor(keeper_name(engine.name))
            self._serve(engine, tell)
        for engine in made.engines:
            self._replace(engine, tell)
        for name in made.removed:
            self._retire(name, tell)
        if made.gateways or address != self._run.directory:
            self._gateways(address, tell)
        write_fleet(self._new, self._home)
        self._home.write_run(replace(self._run, directory=address, endpoint=self.endpoint))
        self._after.start_autoscaler(address)

    def _directory(self, tell: Tell) -> str:
        tell("directory: restarting")
        self._after.end_actor(DIRECTORY)
        return directory_address(self._ray, self._after.start_directory())

    def _gateways(self, address: str, tell: Tell) -> None:
        tell("gateways: new ones start, old ones finish their streams")
        self._after.end_actor(GATEWAYS)
        gateways = self._after.start_gateways(address)
        until_gateway_answers(self._ray, gateways, self._new, self._home)

    def _start(self, engine: EngineName, tell: Tell) -> None:
        try:
            self._serve(engine, tell)
        except LifecycleError:
            self._after.end(engine.name)
            raise

    def _replace(self, engine: EngineName, tell: Tell) -> None:
        self._retire(engine.name, tell)
        try:
            self._serve(engine, tell)
        except LifecycleError as error:
            was = {one.name: one for one in engines(self._old)}.get(engine.name)
            self._after.end(engine.name)
            if was is None:
                raise
            tell(f"{engine.name}: does not start; it gets its former settings back")
            self._before.start(was)
            self._before.start_autoscaler(self._run.directory)
            raise LifecycleError(
                f"{error}\n{engine.name} starts again as it was, and the rest of the change was not made"
            ) from error

    def _retire(self, name: str, tell: Tell) -> None:
        limit_s = self._new.capacity.drain
        tell(f"{name}: draining, at most {limit_s:.0f} s")
        if not self._after.drain(name, limit_s):
            tell(f"{name}: not empty, or out of reach; it ends anyway")
        self._after.end(name)

    def _serve(self, engine: EngineName, tell: Tell) -> None:
        keeper = self._after.start(engine)
        until_engines_serve(self._ray, self._new, {engine.name: keeper}, self._home, tell)
