"""Settings of an engine's co-serving, carried in vLLM's `--additional-config` under the key `coserving`."""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from placement.iteration.interface import ServingSettings, TurnTargets
from placement.iteration.latency import CONSERVATIVE, LatencyModel
from workers.processes import WorkerError
from workers.profiles import ProfileKey, ProfileStore

KEY = "coserving"
SCHEDULER_CLASS = "workers.coserving.scheduler.CoServingScheduler"
PROMPT_SCHEDULER = "workers.coserving.planned.prompt_scheduler"
WORKER_CLASS = "workers.coserving.worker.CoServingWorker"
CPU_WORKER_CLASS = "workers.cpu_worker.CoServingCpuWorker"
SAFEPOINT_PLUGIN = "workers.coserving.safepoint:SafepointPlugin"


class CoServingConfigError(WorkerError, ValueError):
    """The co-serving settings cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class CoServingConfig:
    serving: ServingSettings = field(default_factory=ServingSettings)
    model: LatencyModel = CONSERVATIVE
    profiled: bool = False  # True: `model` was measured; else a profile is looked for, else it is a guess
    profiles: str = ""  # file with the measured latency models; empty: none
    safepoint_every: int = 1  # layers between two checks of the flag
    iteration_log: str = ""  # file that gets one JSON line an iteration; empty: none

    def __post_init__(self) -> None:
        if self.safepoint_every < 1:
            raise CoServingConfigError(f"safepoint_every must be 1 or more, not {self.safepoint_every}")

    def to_additional_config(self) -> dict[str, Any]:
        """The value of vLLM's `--additional-config`."""
        return {KEY: asdict(self)}

    @classmethod
    def from_additional_config(cls, additional: Any) -> "CoServingConfig":
        if not isinstance(additional, Mapping) or KEY not in additional:
            return cls()
        values = dict(additional[KEY])
        serving = dict(values.pop("serving", {}))
        try:
            if "slo" in serving:
                serving["slo"] = TurnTargets(**serving["slo"])
            model = values.pop("model", None)
            if model is not None:
                values["model"] = LatencyModel(**model)
            return cls(serving=ServingSettings(**serving), **values)
        except TypeError as wrong:
            known = sorted(f.name for f in fields(cls)), sorted(f.name for f in fields(ServingSettings))
            raise CoServingConfigError(
                f"co-serving settings: {wrong}; known are {known[0]}, and under `serving` {known[1]}"
            ) from wrong


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
