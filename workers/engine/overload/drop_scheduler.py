"""vLLM schedulers whose pool of blocks changes with the layers that the engine keeps."""

import copy
import time
from typing import Any

from kvtransfer.compat.relied_on import verify
from kvtransfer.connector import StepReports
from placement.scheduling.latency_model import SelfCorrecting
from placement.scheduling.prompts_in_order import TurnsAlone
from workers.engine.compat import parameter_drop as internals
from workers.engine.coserving.config import CoServingConfig
from workers.engine.coserving.planned import PlannedScheduling, PromptScheduler
from workers.engine.coserving.scheduler import CoServingScheduler
from workers.engine.overload.orders import SplitReport
from workers.engine.overload.plugin import NAME, OverloadScheduler

IDLE_S = 0.02  # between steps of a split engine in which only offline requests wait
MEASURED_EVERY = 32  # iterations between two reports of the engine's latency


class DroppingScheduling(PlannedScheduling):
    """Mixin for a scheduler of an engine that can drop layers; plans no step while another one runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        verify(internals.SCHEDULING)
        super().__init__(*args, **kwargs)
        side = self.plugin(NAME)
        assert isinstance(side, OverloadScheduler), "the connector has no overload plugin"
        self._overload = side
        self._whole_model_latency: SelfCorrecting | None = None  # set aside while layers are shared

    def unsupported(self) -> dict[str, bool]:
        overlaps = self.vllm_config.scheduler_config.async_scheduling
        return {
            **super().unsupported(),
            "asynchronous scheduling (start with --no-async-scheduling)": overlaps,
        }

    def has_requests(self) -> bool:
        return bool(super().has_requests()) or self._overload.pending  # type: ignore[misc]

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._overload.between_steps(self)
        self._separate_latencies()
        return super().schedule(throttle_prefills)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._overload.after_step(self, _report_in(model_runner_output))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._separate_latencies()
        if self.latency.observed % MEASURED_EVERY == 0 and self.latency.observed:
            self._overload.measured(self.latency.model)
        return outputs

    def _separate_latencies(self) -> None:
        """Learn from steps with shared layers in a copy: they tell nothing about the whole model."""
        if self._overload.fenced and self._whole_model_latency is None:
            self._whole_model_latency, self.latency = self.latency, copy.deepcopy(self.latency)
        elif self._whole_model_latency is not None and not self._overload.fenced:
            self.latency, self._whole_model_latency = self._whole_model_latency, None
            self.report_curve(self.clock())


class DroppingScheduler(DroppingScheduling, PromptScheduler):
    """Scheduler without co-serving, for vLLM's `--scheduler-cls`."""


class CoServingDroppingScheduler(DroppingScheduling, CoServingScheduler):
    """Scheduler with co-serving, without aborted iterations and offline work while layers are shared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = CoServingConfig.from_additional_config(self.vllm_config.additional_config).serving
        self._policy_when_whole, self._policy_when_shared = self.policy, TurnsAlone(settings)

    def needs_plan(self) -> bool:
        fenced = self._overload.fenced
        self.policy = self._policy_when_shared if fenced else self._policy_when_whole
        if fenced and not (self.running or self._overload.pending or any(self.tracked.online())):
            time.sleep(IDLE_S)
        return super().needs_plan()


def _report_in(model_runner_output: Any) -> SplitReport | None:
    meta = internals.connector_meta(model_runner_output)
    report = meta.reports.get(NAME) if isinstance(meta, StepReports) else None
    assert report is None or isinstance(report, SplitReport)
    return report
