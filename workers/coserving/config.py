"""Settings of an engine's co-serving, carried in vLLM's `--additional-config` under the key `coserving`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from placement.latency import CONSERVATIVE, LatencyModel
from placement.serving import ServingSettings
from placement.serving.state import Slo

KEY = "coserving"
SCHEDULER_CLASS = "workers.coserving.scheduler.CoServingScheduler"
WORKER_CLASS = "workers.coserving.worker.CoServingWorker"
CPU_WORKER_CLASS = "workers.coserving.cpu_worker.CoServingCpuWorker"
SAFEPOINT_PART = "workers.coserving.safepoint:SafepointPart"


class CoServingConfigError(ValueError):
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
                serving["slo"] = Slo(**serving["slo"])
            model = values.pop("model", None)
            if model is not None:
                values["model"] = LatencyModel(**model)
            return cls(serving=ServingSettings(**serving), **values)
        except TypeError as wrong:
            known = sorted(f.name for f in fields(cls)), sorted(f.name for f in fields(ServingSettings))
            raise CoServingConfigError(
                f"co-serving settings: {wrong}; known are {known[0]}, and under `serving` {known[1]}"
            ) from wrong
