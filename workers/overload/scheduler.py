"""The scheduler of an engine that can drop parameters: its pool of blocks grows, shrinks, and starts over."""

import time
from dataclasses import replace
from typing import Any

from kvtransfer.connector import StepReports
from kvtransfer.relied_on import verify
from placement.iteration.interface import EngineView, IterationPlan
from placement.iteration.latency import BatchWork
from placement.overload.lookahead import Forecast
from workers.coserving.planned import PromptScheduler
from workers.overload import vllm_internals as internals
from workers.overload.orders import PeersForecasts, SplitReport
from workers.overload.plugin import NAME, OverloadScheduler

IDLE_S = 0.02  # between steps of an engine that has no requests, and waits for its parameters or KV
MEASURED_EVERY = 32  # iterations: the first of them before anything is known of this engine's time


class DroppingScheduler(PromptScheduler):
    """For vLLM's `--scheduler-cls`, without asynchronous scheduling: no step is planned while one runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        verify(internals.SCHEDULING)
        super().__init__(*args, **kwargs)
        side = self.plugin(NAME)
        assert isinstance(side, OverloadScheduler), "the connector has no overload plugin"
        self._overload = side

    def has_requests(self) -> bool:
        return super().has_requests() or self._overload.pending or self._overload.steps_anyway

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if self._overload.steps_anyway and not self.requests:
            time.sleep(IDLE_S)
        self._overload.between_steps(self)
        self._say_what_decodes()
        return super().schedule(throttle_prefills)

    def _say_what_decodes(self) -> None:
        """To engines that share its layers; with prompts in the step their plan says more."""
        pipeline = self._overload.pipeline()
        if pipeline is not None and self.running:
            work = BatchWork.of((1, int(request.num_computed_tokens)) for request in self.running)
            seconds = pipeline.model.seconds(work)
            self._overload.says(Forecast(seconds, seconds))

    def engine_view(self, now: float) -> EngineView:
        return replace(super().engine_view(now), pipeline=self._overload.pipeline())

    def carry_out(self, plan: IterationPlan, now: float) -> None:
        if plan.forecast is not None:
            self._overload.says(plan.forecast)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._overload.after_step(self, _report_in(model_runner_output))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.latency.observed % MEASURED_EVERY == 0 and self.latency.observed:
            self._overload.measured(self.latency.model)
        return outputs


def _report_in(model_runner_output: Any) -> SplitReport | PeersForecasts | None:
    meta = internals.connector_meta(model_runner_output)
    report = meta.reports.get(NAME) if isinstance(meta, StepReports) else None
    assert report is None or isinstance(report, SplitReport | PeersForecasts)
    return report
