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
from deploy.ray.keepers import Keepers
from workers.profiles import ProfileStore

LOCAL_HOST = "127.0.0.1"


class Actors(Keepers):
    """Starts and ends the actors of a fleet."""

    def __init__(self, fleet: FleetSpec, home: FleetHome) -> None:
        host = LOCAL_HOST if fleet.ray.address is None else None
        super().__init__(fleet, home, host, ProfileStore(home.profiles).coefficients())

    def start_keepers(self) -> dict[str, Any]:
        return {engine.name: self.start(engine) for engine in engines(self._fleet)}

    def start_directory(self) -> Any:
        return self._start(DirectoryActor, DIRECTORY, self._host)

    def start_gateways(self, directory: str) -> Any:
        return self._start(GatewaysActor, GATEWAYS, directory)

    def start_autoscaler(self, directory: str) -> None:
        """Start the autoscaler, if a tier is autoscaled."""
        if any(tier.autoscale is not None for tier in self._fleet.tiers):
            self._start(AutoscalerActor, AUTOSCALER, directory, self._host, self._profiles)

    def _start(self, kind: type, name: str, *arguments: object) -> Any:
        actor = ray.remote(kind).options(**always(name), **control_resources(self._fleet))
        return actor.remote(self._sealed, self._home, *arguments)
