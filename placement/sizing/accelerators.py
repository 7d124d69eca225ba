"""Accelerators by name, with figures from their data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    memory_gib: float
    tflops: float  # dense, 16 bit
    bandwidth_gbs: float  # memory bandwidth
    power_w: tuple[int, int]  # lowest and highest power limit that can be set
    source: str


# Where a name stands for several boards, the figures are the larger board's. Where a sheet states operations
# with sparsity, half of them count. The lowest power limit is in no sheet: it is the "Min Power Limit" that
# `nvidia-smi -q -d POWER` shows on such boards.
ACCELERATORS: Mapping[str, Accelerator] = {
    "T4": Accelerator(15, 65, 320, (60, 70), "NVIDIA T4 data sheet"),
    "V100": Accelerator(32, 125, 900, (100, 300), "NVIDIA V100 data sheet, SXM2 32 GB"),
    "A10": Accelerator(24, 125, 600, (60, 150), "NVIDIA A10 data sheet"),
    "A10G": Accelerator(24, 70, 600, (60, 300), "NVIDIA A10G data sheet"),
    "L4": Accelerator(24, 121, 300, (40, 72), "NVIDIA L4 data sheet"),
    "A40": Accelerator(48, 149.7, 696, (100, 300), "NVIDIA A40 data sheet"),
    "L40S": Accelerator(48, 362, 864, (100, 350), "NVIDIA L40S data sheet"),
    "A100-40GB": Accelerator(40, 312, 1555, (100, 400), "NVIDIA A100 data sheet, SXM 40 GB"),
    "A100-80GB": Accelerator(80, 312, 2039, (100, 400), "NVIDIA A100 data sheet, SXM 80 GB"),
    "H100-PCIe": Accelerator(80, 756, 2000, (200, 350), "NVIDIA H100 data sheet, PCIe"),
    "H100": Accelerator(80, 989, 3350, (200, 700), "NVIDIA H100 data sheet, SXM"),
    "H200": Accelerator(141, 989, 4800, (200, 700), "NVIDIA H200 data sheet, SXM"),
    # 128 GB, shared with the processor. The sheet has 1000 of sparse FP4: an eighth is dense, of 16 bits. The
    # driver sets no power limit.
    "GB10": Accelerator(119, 125, 273, (140, 140), "NVIDIA DGX Spark data sheet"),
    "B200": Accelerator(180, 2250, 8000, (200, 1000), "NVIDIA DGX B200 data sheet, of one of eight"),
}


def accelerator_of(device: str) -> Accelerator | None:
    """Return the accelerator for a driver's name, such as `NVIDIA A100-SXM4-80GB`; None if unknown."""
    words = set(device.upper().replace("-", " ").split())
    fitting = [name for name in ACCELERATORS if set(name.upper().split("-")) <= words]
    return ACCELERATORS[max(fitting, key=len)] if fitting else None
