"""Patch of vLLM's engine core: an armed iteration is the only one in flight.

The table in `coserving_scheduler.py` names what the patch relies on.
"""

import functools
from typing import Any

from vllm.v1.engine.core import DPEngineCoreProc, EngineCore

from workers.engine.compat.coserving_scheduler import OpenScheduler

StepResult = tuple[dict[int, Any] | None, bool]


def keep_armed_steps_alone() -> None:
    """Patch the engine core so that an armed iteration is the only one in flight.

    With asynchronous scheduling vLLM schedules an iteration while the previous one runs. With this patch, it
    first takes the result of the iteration in flight if the next may be armed. It takes the result of an
    armed iteration before anything else, so that no other iteration, request or command comes between an
    iteration and its roll-back.
    """
    original = EngineCore.step_with_batch_queue
    if hasattr(original, "__wrapped__"):
        return

    def result_only(core: EngineCore) -> StepResult:
        # Take the result without scheduling an empty iteration, which makes vLLM sleep and runs the
        # connector.
        with core.scheduler.only_result():
            outputs, _ = original(core)
        # The ranks of a mixture of experts must all run equally many iterations, even if some are empty.
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
