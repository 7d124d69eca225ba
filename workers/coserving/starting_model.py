"""The latency model an engine starts with: measured for it, or a guess that it corrects."""

import logging
import os
from pathlib import Path

from placement.latency import LatencyModel
from placement.profiles import ProfileKey, ProfileStore
from workers.coserving.config import CoServingConfig

logger = logging.getLogger("conserve.workers.starting_model")


def hardware_name() -> str:
    """The accelerator, or the processor and the threads that compute."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name} x{os.environ.get('OMP_NUM_THREADS') or os.cpu_count()}"


def key_of(model: str) -> ProfileKey:
    import vllm

    return ProfileKey(Path(model).name, hardware_name(), vllm.__version__)


def starting_model(config: CoServingConfig, key: ProfileKey) -> LatencyModel:
    """Says so when there is no profile: the engine admits little offline work until it knows itself."""
    if config.profiled:
        return config.model
    found = ProfileStore(Path(config.profiles)).find(key) if config.profiles else None
    if found is not None:
        logger.info("latency profile found key=%s median_error=%.3f", key, found.errors[0].median)
        return found.model
    logger.warning(
        "no latency profile key=%s store=%s: starting from a conservative model; run `conserve profile`",
        key,
        config.profiles or "none",
    )
    return config.model
