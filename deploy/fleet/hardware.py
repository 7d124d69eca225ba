"""What a tier's engines run on: accelerators by name, and how many of them an engine takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.fleet.schema import FleetSpec, TierSpec


@dataclass(frozen=True, slots=True)
class Accelerator:
    memory_gib: float
    tflops: float  # dense, in 16 bit
    bandwidth_gbs: float  # of its memory
    power_w: tuple[int, int]  # limits that can be set
    bfloat16: bool = True


# NVIDIA's data sheets, of the larger board where a name stands for several; the lowest power limit is what
# `nvidia-smi -q -d POWER` gives as "Min Power Limit" on such boards.
ACCELERATORS: Mapping[str, Accelerator] = {
    "T4": Accelerator(15, 65, 320, (60, 70), bfloat16=False),
    "V100": Accelerator(32, 125, 900, (100, 300), bfloat16=False),
    "A10": Accelerator(24, 125, 600, (60, 150)),
    "A10G": Accelerator(24, 70, 600, (60, 300)),
    "L4": Accelerator(24, 121, 300, (40, 72)),
    "A40": Accelerator(48, 149.7, 696, (100, 300)),
    "L40S": Accelerator(48, 362, 864, (100, 350)),
    "A100-40GB": Accelerator(40, 312, 1555, (100, 400)),
    "A100-80GB": Accelerator(80, 312, 2039, (100, 400)),
    "H100-PCIe": Accelerator(80, 756, 2000, (200, 350)),
    "H100": Accelerator(80, 989, 3350, (200, 700)),
    "H200": Accelerator(141, 989, 4800, (200, 700)),
    "B200": Accelerator(180, 2250, 8000, (200, 1000)),
}


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
