"""Differences between two fleet files, and the parts of a running fleet that they affect."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from deploy.fleet.components import (
    EngineName,
    batch_config,
    directory_settings,
    gateway_config,
    placer_settings,
    prefill_curves,
)
from deploy.fleet.schema import FleetSpec
from deploy.home import FleetHome, FleetKeys

# Engines that differ in these settings do not understand each other's KV, so they cannot change one by one.
WHOLE_FLEET = ("name", "policy", "model", "engine.device", "transfer.backend", "transfer.encrypt", "ray")
WHOLE_FLEET_ARGUMENTS = ("block-size", "kv-cache-dtype")

SECRET = ("key", "secret", "token", "database", "headers", "env")


class Need(StrEnum):
    """Step that brings a running engine in line with a fleet file."""

    NOTHING = "nothing"
    KEEPER = "keeper"  # another keeper, which adopts the engine with its KV
    ENGINE = "engine"  # another engine
    PLACE = "place"  # another engine; this one does not answer, because its node may be gone


@dataclass(frozen=True, slots=True)
class Difference:
    path: str  # dotted, as in conversation.ttl
    old: Any  # None: not set
    new: Any

    def __str__(self) -> str:
        if any(word in self.path for word in SECRET):
            return f"{self.path}: changed"
        return f"{self.path}: {_shown(self.old)} -> {_shown(self.new)}"


@dataclass(frozen=True, slots=True)
class FleetChanges:
    directory: bool
    gateways: bool
    autoscaler: bool
    added: tuple[EngineName, ...]
    keepers: tuple[EngineName, ...]
    engines: tuple[EngineName, ...]  # drained, ended and started again, one by one
    removed: tuple[str, ...]

    def steps(self) -> list[str]:
        found = [f"start {engine.name}" for engine in self.added]
        found += [f"restart the keeper of {engine.name}; the engine runs on" for engine in self.keepers]
        found += [f"drain {engine.name} and start it again" for engine in self.engines]
        found += [f"drain {name} and end it" for name in self.removed]
        if self.directory:
            found.insert(0, "restart the directory; bindings stay")
        if self.gateways:
            found.append("replace the gateways; new ones take over before the old ones end")
        if self.autoscaler:
            found.append("restart the autoscaler")
        return found


def differences(old: FleetSpec, new: FleetSpec) -> list[Difference]:
    before, after = dict(_flat(old.model_dump(mode="json"))), dict(_flat(new.model_dump(mode="json")))
    paths = [*after, *(path for path in before if path not in after)]
    changed = [path for path in paths if before.get(path) != after.get(path)]
    return [Difference(path, before.get(path), after.get(path)) for path in changed]


def not_while_running(found: list[Difference]) -> list[Difference]:
    return [
        one
        for one in found
        if any(one.path == path or one.path.startswith(f"{path}.") for path in WHOLE_FLEET)
        or (".args." in one.path and one.path.rsplit(".", 1)[1] in WHOLE_FLEET_ARGUMENTS)
    ]


def plan(old: FleetSpec, new: FleetSpec, home: FleetHome, running: Mapping[str, Need]) -> FleetChanges:
    """Return what changes from `old` to `new`. `running` gives each running engine's name and its need."""
    wanted = {engine.name: engine for engine in _wanted(new, running)}

    def needing(need: Need) -> tuple[EngineName, ...]:
        return tuple(engine for name, engine in wanted.items() if running.get(name) is need)

    return FleetChanges(
        directory=_directory(old) != _directory(new),
        gateways=_gateways(old, home) != _gateways(new, home),
        autoscaler=_autoscaler(old) != _autoscaler(new),
        added=tuple(engine for name, engine in wanted.items() if name not in running),
        keepers=needing(Need.KEEPER),
        engines=(*needing(Need.ENGINE), *needing(Need.PLACE)),
        removed=tuple(sorted(running.keys() - wanted.keys(), reverse=True)),
    )


def _wanted(fleet: FleetSpec, running: Mapping[str, Need]) -> Iterator[EngineName]:
    """Yield the engines of `fleet`. An autoscaled tier keeps as many as are `running`, within its limits."""
    for tier in fleet.tiers:
        count = tier.replicas
        if tier.autoscale is not None:
            present = sum(1 for name in running if name.rsplit("-", 1)[0] == tier.name)
            count = min(max(present or count, tier.autoscale.min), tier.autoscale.max)
        for index in range(count):
            yield EngineName(f"{tier.name}-{index}", tier)


def _directory(fleet: FleetSpec) -> object:
    """Return the settings whose change restarts the directory.

    The group of tiers that compute equally fast is not among them, because engines report their group.
    """
    return directory_settings(fleet), placer_settings(fleet), prefill_curves(fleet)


def _gateways(fleet: FleetSpec, home: FleetHome) -> object:
    """Return the settings whose change replaces the gateways and the batch process, which one actor keeps."""
    keys = FleetKeys("the same for both", fleet.name)
    batch = batch_config(fleet, home, "", keys, "", 0) if fleet.batch.enabled else None
    return fleet.gateway.processes, gateway_config(fleet, "", "", keys, ""), batch


def _autoscaler(fleet: FleetSpec) -> object:
    """Return the settings whose change restarts the autoscaler; None if no tier is autoscaled."""
    scaled = [tier for tier in fleet.tiers if tier.autoscale is not None]
    return (scaled, fleet.capacity, fleet.engine) if scaled else None


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        for one in value:
            yield from _flat(one, f"{path}.{one['name']}")
    elif value not in (None, {}):
        yield path, value


def _shown(value: Any) -> str:
    return "(not set)" if value is None else str(value)
