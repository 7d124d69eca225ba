"""Negative controls: schedulers that leave out one step of the roll-back, loaded by vLLM by name.

Each of them, and `Audited`, compares vLLM's records of requests after an aborted iteration with the records
from before it, and appends each difference to the file that the variable `AUDIT_VARIABLE` names.
"""

import os
from pathlib import Path
from typing import Any

from tests.workers.coserving.audit import AUDIT_VARIABLE
from workers.engine.compat import coserving_scheduler as internals
from workers.engine.coserving import rollback
from workers.engine.coserving.scheduler import CoServingScheduler


class Audited(CoServingScheduler):
    _before: dict[str, tuple[Any, ...]]

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._before = {request.request_id: self._records_of(request) for request in self.running}
        return super().schedule(throttle_prefills)

    def settle_abort(self) -> Any:
        was_aborted = self.iteration is not None and self.iteration.aborted
        step = super().settle_abort()
        if step is not None and step.aborted and not was_aborted:
            for request_id, before in self._before.items():
                request = self.requests.get(request_id)
                if request is None or not internals.is_running(request):
                    continue
                after = self._records_of(request)
                if after != before and request_id in {one.request.request_id for one in step.scheduled}:
                    with Path(os.environ[AUDIT_VARIABLE]).open("a") as file:
                        file.write(f"{request_id}: {before} -> {after}\n")
        return step

    def _records_of(self, request: Any) -> tuple[Any, ...]:
        registered = tuple(
            manager.num_cached_block.get(request.request_id, 0)
            for manager in self.kv_cache_manager.coordinator.single_type_managers
        )
        pending = request.num_tokens - request.num_computed_tokens
        awaited = request.num_output_placeholders
        return request.num_computed_tokens, registered, pending > 1 and request.is_prefill_chunk, awaited


def _all_but(left_out: rollback.Step) -> tuple[rollback.Step, ...]:
    return tuple(step for step in rollback.STEPS if step is not left_out)


class WithoutEvictWritten(Audited):
    rollback_steps = _all_but(rollback.evict_written)
