"""Energy that the GPUs of this machine have used, as their driver counts it."""

from workers.power.nvml import Gpus, PowerError


def joules() -> float | None:
    """Return what all GPUs here have used since the driver was loaded; None without GPUs."""
    try:
        with Gpus() as gpus:
            return sum(gpus.joules(gpu.uuid) for gpu in gpus.all())
    except (PowerError, ImportError):
        return None
