"""Create the fleet's actors in Ray."""

from typing import Any

import ray

from deploy.fleet import FleetSpec
from deploy.fleet.components import engines
from deploy.home import FleetHome
from deploy.ray.autoscaler_actor import AutoscalerActor
from deploy.ray.common import AUTOSCALER, DIRECTORY, GATEWAYS, always, control_resources
from deploy.ray.directory_actor import DirectoryActor
from deploy.ray.gateway_actor import GatewaysActor
from deploy.ray.keepers import Keepers, end_actor

LOCAL_HOST = "127.0.0.1"


class Actors:
    def __init__(self, fleet: FleetSpec, home: FleetHome) -> None:
        self._fleet, self._home = fleet, home
        self._secret = home.secret()
        self._host = LOCAL_HOST if fleet.ray.address is None else None
        self.keepers = Keepers(fleet, home, self._secret, self._host)

    def start_keepers(self) -> dict[str, Any]:
        return {engine.name: self.keepers.start(engine) for engine in engines(self._fleet)}

    def start_directory(self) -> Any:
        actor = ray.remote(DirectoryActor).options(**always(DIRECTORY), **control_resources(self._fleet))
        return actor.remote(self._fleet, self._home, self._secret, self._host)

    def start_gateways(self, directory: str) -> Any:
        actor = ray.remote(GatewaysActor).options(**always(GATEWAYS), **control_resources(self._fleet))
        return actor.remote(self._fleet, self._home, directory, self._secret)

    def start_autoscaler(self, directory: str) -> None:
        """If a tier follows the load."""
        if any(tier.autoscale is not None for tier in self._fleet.tiers):
            options = {**always(AUTOSCALER), **control_resources(self._fleet)}
            ray.remote(AutoscalerActor).options(**options).remote(
                self._fleet, self._home, directory, self._secret, self._host
            )

    def end(self, name: str) -> None:
        """Of an actor that holds nothing: what it started goes on under its lease."""
        end_actor(name)
