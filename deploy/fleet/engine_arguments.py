"""Merges the engine arguments of the fleet and a tier, and derives what a tier's engines need from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deploy.errors import KeyPath
from deploy.fleet.model_architecture import BYTES, Architecture
from deploy.fleet.schema import FleetSpec, TierSpec
from placement.engines import Role
from placement.sizing.accelerators import ACCELERATORS, Accelerator


@dataclass(frozen=True, slots=True)
class Parallel:
    tensor: int
    pipeline: int

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline


def arguments(fleet: FleetSpec, tier: TierSpec) -> dict[str, Any]:
    """Return vLLM's options for a tier's engines."""
    return {**fleet.engine.args, **tier.args}


def parallel(fleet: FleetSpec, tier: TierSpec) -> Parallel:
    given = arguments(fleet, tier)

    def size(name: str) -> int:
        value = given.get(name)
        return value if isinstance(value, int) and value > 0 else 1

    return Parallel(size("tensor-parallel-size"), size("pipeline-parallel-size"))


def engine_resources(fleet: FleetSpec, tier: TierSpec) -> dict[str, float]:
    """Return an engine's Ray resources: as many GPUs as it has ranks, unless the tier sets another number.

    Its keeper, one actor, takes them all, so Ray places the keeper where all ranks of the engine can run.
    """
    if fleet.engine.device != "cuda":
        return dict(tier.resources)
    return {"GPU": float(parallel(fleet, tier).gpus), **tier.resources}


def coserves_on(fleet: FleetSpec, role: Role) -> bool:
    """Return whether engines of `role` co-serve; prefillers do if the file gives them offline work."""
    return fleet.coserving.enabled and (role is not Role.PREFILL or fleet.batch.harvest_prefill)


@dataclass(frozen=True)
class TierEngines:
    """Engines of a tier, with their model's architecture if it is known."""

    fleet: FleetSpec
    index: int
    tier: TierSpec
    model: Architecture | None

    @cached_property
    def args(self) -> dict[str, Any]:
        return arguments(self.fleet, self.tier)

    @cached_property
    def parallel(self) -> Parallel:
        return parallel(self.fleet, self.tier)

    @property
    def on_gpus(self) -> bool:
        return self.fleet.engine.device == "cuda"

    @property
    def coserves(self) -> bool:
        return coserves_on(self.fleet, self.tier.role)

    @property
    def safepoints(self) -> bool:
        return self.coserves and self.fleet.coserving.safepoints and self.fleet.coserving.policy == "conserve"

    @property
    def transfers(self) -> bool:
        return self.fleet.policy != "collocated"

    @property
    def accelerator(self) -> Accelerator | None:
        return ACCELERATORS.get(self.tier.hardware.accelerator or "")

    @property
    def kv_width(self) -> int:
        kind = str(self.args.get("kv-cache-dtype", "auto"))
        if kind.startswith("fp8"):
            return 1
        named = (
            self.fleet.model.dtype if self.fleet.model.dtype != "auto" else self.model and self.model.dtype
        )
        return BYTES.get(kind) or BYTES.get(str(named), 2)

    @property
    def max_context(self) -> int:
        """Return how many tokens the longest conversation may have; 0 if that is not known."""
        return self.fleet.model.max_context or (self.model.max_context if self.model else 0)

    def at(self, name: str) -> KeyPath:
        """Return the path of vLLM's option `name` in the fleet file, or of the tier if it is not set."""
        if name in self.tier.args:
            return ("tiers", self.index, "args", name)
        return ("engine", "args", name) if name in self.args else ("tiers", self.index)

    def integer(self, name: str) -> int:
        """Return the value of vLLM's option `name`; 0 if it is not set or is not an integer."""
        value = self.args.get(name)
        return value if isinstance(value, int) else 0
