"""A fleet as an actor's argument: Ray keeps arguments, so what may hold API keys or passwords goes sealed."""

from dataclasses import dataclass

from deploy.fleet import FleetSpec
from deploy.fleet.components import EngineName
from deploy.home import FleetKeys
from deploy.ray.common import replica


@dataclass(frozen=True, slots=True)
class SealedFleet:
    content: bytes

    @classmethod
    def of(cls, fleet: FleetSpec, keys: FleetKeys) -> "SealedFleet":
        return cls(keys.seal(fleet.model_dump_json(exclude_unset=True).encode()))

    def opened(self, keys: FleetKeys) -> FleetSpec:
        return FleetSpec.model_validate_json(keys.unseal(self.content))


def engine_named(fleet: FleetSpec, name: str) -> EngineName:
    return EngineName(name, next(tier for tier in fleet.tiers if tier.name == replica(name)[0]))
