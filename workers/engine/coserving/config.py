"""Settings of an engine's scheduling, which vLLM gets in `--additional-config` under the key `coserving`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import CONSERVATIVE, LatencyModel
from workers.processes import WorkerError
from workers.profiles import Coefficients, StartingKnowledge

KEY = "coserving"
SCHEDULER_CLASS = "workers.engine.coserving.scheduler.CoServingScheduler"
PROMPT_SCHEDULER = "workers.engine.coserving.prompt_scheduler.prompt_scheduler"
WORKER_CLASS = "workers.engine.engine_worker.EngineWorker"
SAFEPOINT_PLUGIN = "workers.engine.coserving.safepoint:SafepointPlugin"


class CoServingConfigError(WorkerError, ValueError):
    """The co-serving settings cannot be used. The message says which setting is wrong, and why."""


@dataclass(frozen=True, slots=True)
class CoServingConfig:
    serving: ServingSettings = field(default_factory=ServingSettings)
    model: LatencyModel = CONSERVATIVE
    profiled: bool = False  # whether `model` was measured; if not, one of `profiles` or a guess is used
    profiles: Mapping[str, Coefficients] = field(default_factory=dict)  # key -> measured latency model
    power_cap_w: float | None = None  # cap of this engine's GPUs, which is part of its profile's key
    planned: bool = True  # whether a policy plans iterations; False: vLLM's own rules, for measurements
    safepoint_every: int = 1  # layers between two checks of the flag
    iteration_log: str = ""  # file that gets a JSON line for each iteration; empty: no file

    def __post_init__(self) -> None:
        if self.safepoint_every < 1:
            raise CoServingConfigError(f"safepoint_every must be 1 or more, not {self.safepoint_every}")

    def to_additional_config(self) -> dict[str, Any]:
        """Return these settings as a value of vLLM's `--additional-config`."""
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


def with_knowledge(additional: str, known: StartingKnowledge) -> str:
    """Return the value `additional` of vLLM's `--additional-config` with the `known` measurements in it."""
    config = CoServingConfig.from_additional_config(json.loads(additional))
    config = replace(config, profiles=known.profiles, power_cap_w=known.power_cap_w)
    return json.dumps(config.to_additional_config())
