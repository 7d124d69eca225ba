"""Patch of vLLM's engine core: armed steps run alone.

The table of `coserving_scheduler.py` names what the patch relies on.
"""

import functools
from typing import Any

from vllm.v1.engine.core import DPEngineCoreProc, EngineCore

from workers.engine.compat.coserving_scheduler import OpenScheduler

StepResult = tuple[dict[int, Any] | None, bool]


def keep_armed_steps_alone() -> None:
    """Patch the engine core so that an armed step is the only one in flight.

    With asynchronous scheduling vLLM schedules a step while the previous one runs. If the next step may be
    armed, the result of the one in flight is taken first. The result of an armed step is taken before
    anything else, so that no other step, request or command meets a step that may yet be undone.
    """
    original = EngineCore.step_with_batch_queue
    if hasattr(original, "__wrapped__"):
        return

    def result_only(core: EngineCore) -> StepResult:
        # Without an empty step: those make vLLM sleep, and run the connector.
        with core.scheduler.only_result():
            outputs, _ = original(core)
        # Ranks of a mixture of experts must run as many steps as the others, if only an idle one.
        return outputs, not isinstance(core, DPEngineCoreProc)

    @functools.wraps(original)
    def step_with_batch_queue(self: EngineCore) -> StepResult:
        scheduler = self.scheduler
        if not isinstance(scheduler, OpenScheduler):
            plain: StepResult = original(self)
            return plain
        if self.batch_queue and scheduler.waits_for_result():
            return result_only(self)
        outputs, executed = original(self)
        if outputs is None and scheduler.armed_step_runs:
            outputs, _ = result_only(self)
        return outputs, executed

    EngineCore.step_with_batch_queue = step_with_batch_queue
