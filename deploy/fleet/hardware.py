"""How many accelerators an engine of a tier takes."""

from dataclasses import dataclass
from typing import Any

from deploy.fleet.schema import FleetSpec, TierSpec


@dataclass(frozen=True, slots=True)
class Parallel:
    tensor: int
    pipeline: int

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline


def arguments(fleet: FleetSpec, tier: TierSpec) -> dict[str, Any]:
    """vLLM's options of a tier's engines."""
    return {**fleet.engine.args, **tier.args}


def parallel(fleet: FleetSpec, tier: TierSpec) -> Parallel:
    given = arguments(fleet, tier)

    def size(name: str) -> int:
        value = given.get(name)
        return value if isinstance(value, int) and value > 0 else 1

    return Parallel(size("tensor-parallel-size"), size("pipeline-parallel-size"))


def engine_resources(fleet: FleetSpec, tier: TierSpec) -> dict[str, float]:
    """Ray resources of one engine: on GPUs as many as its ranks, unless the tier says what share of one.

    Ray places an actor on one node with all it takes, and an engine's ranks are where its keeper is.
    """
    if fleet.engine.device != "cuda":
        return dict(tier.resources)
    return {"GPU": float(parallel(fleet, tier).gpus), **tier.resources}
