"""Scheduler's part of dropping layers: orders drops and restores, and changes the policy meanwhile."""

import copy
import time
from typing import Any

from kvtransfer.compat.relied_on import verify
from kvtransfer.connector import StepReports
from placement.scheduling.interface import ServingSettings
from placement.scheduling.latency_model import SelfCorrecting
from placement.scheduling.prompts_in_order import TurnsAlone
from workers.engine.compat import block_pool as internals
from workers.engine.overload.config import OverloadConfigError
from workers.engine.overload.orders import SplitReport
from workers.engine.overload.plugin import NAME, OverloadScheduler

IDLE_S = 0.02  # pause between iterations while layers are shared and only offline requests wait
MEASURED_EVERY = 32  # iterations between two reports of the engine's latency


class SplitScheduling:
    """Scheduler's part of dropping layers, which the scheduler calls before and after each iteration.

    While layers are shared, or about to be, no iteration is aborted and offline requests wait.
    """

    def __init__(self, scheduler: Any, side: OverloadScheduler, settings: ServingSettings) -> None:
        verify(internals.SCHEDULING)
        if scheduler.vllm_config.scheduler_config.async_scheduling:
            raise OverloadConfigError(
                "parameters cannot be dropped with asynchronous scheduling: start with --no-async-scheduling"
            )
        self._scheduler, self._side = scheduler, side
        self._whole_model_latency: SelfCorrecting | None = None  # set aside while layers are shared
        self._policies = scheduler.policy, TurnsAlone(settings) if scheduler.coserves else scheduler.policy

    @property
    def pending(self) -> bool:
        """Return whether a command waits or runs, so that even an idle engine has to run iterations."""
        return self._side.pending

    @property
    def shared(self) -> bool:
        """Return whether layers are shared or about to be."""
        return self._side.kv_io_suspended

    def before_step(self) -> None:
        scheduler = self._scheduler
        self._side.between_steps(scheduler)
        self._separate_latencies()
        scheduler.policy = self._policies[self.shared]
        idle = not (scheduler.running or self.pending or any(scheduler.tracked.online()))
        if scheduler.coserves and self.shared and idle:
            time.sleep(IDLE_S)

    def before_result(self, model_runner_output: Any) -> None:
        self._side.after_step(self._scheduler, _report_in(model_runner_output))

    def after_result(self) -> None:
        self._separate_latencies()
        latency = self._scheduler.latency
        if latency.observed % MEASURED_EVERY == 0 and latency.observed:
            self._side.measured(latency.model)

    def _separate_latencies(self) -> None:
        """Use a copy of the latency model while layers are shared, because iterations then take longer."""
        scheduler = self._scheduler
        if self.shared and self._whole_model_latency is None:
            self._whole_model_latency = scheduler.latency
            scheduler.latency = copy.deepcopy(scheduler.latency)
        elif self._whole_model_latency is not None and not self.shared:
            scheduler.latency, self._whole_model_latency = self._whole_model_latency, None
            scheduler.report_curve(scheduler.clock())


def _report_in(model_runner_output: Any) -> SplitReport | None:
    meta = internals.connector_meta(model_runner_output)
    report = meta.reports.get(NAME) if isinstance(meta, StepReports) else None
    assert report is None or isinstance(report, SplitReport)
    return report
