"""The one patch of vLLM: tells the policy of a request while an iteration runs.

`EngineCore.preprocess_add_request` runs in the thread that receives requests, beside the model. Without the
patch an arrival is seen only when the iteration is over, which is what a safepoint is there to prevent.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine.core import EngineCore

from placement.latency import BatchWork, LatencyModel
from placement.serving import ServingPolicy
from placement.serving.state import Row, RunningBatch
from workers.coserving.flag import Flag

logger = logging.getLogger("conserve.workers.arrival")


@dataclass(slots=True)
class InFlight:
    """The armed iteration in the model, published whole: the watching thread never sees half of one."""

    epoch: int
    started: float
    batch: RunningBatch  # as of its start
    queued: BatchWork  # online work that waits for the next iteration
    raised: bool = False
    arrivals: list[Row] = field(default_factory=list)


class ArrivalWatch:
    def __init__(
        self,
        policy: ServingPolicy,
        flag: Flag,
        model: Callable[[], LatencyModel],
        row_of: Callable[[Any, float], Row],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self._flag = flag
        self._model = model
        self._row_of = row_of
        self._clock = clock
        self.in_flight: InFlight | None = None  # set and cleared by the scheduler
        self.counts: Counter[str] = Counter()

    def take_counts(self) -> Counter[str]:
        counts, self.counts = self.counts, Counter()
        return counts

    def on_arrival(self, request: Any) -> None:
        """In the receiving thread. Reads what the scheduler published; writes the flag only."""
        running = self.in_flight
        if running is None or request.priority > 0 or running.raised:
            return
        now = self._clock()
        row = self._row_of(request, now)
        running.arrivals.append(row)
        queued = running.queued
        for arrival in running.arrivals:
            queued = queued.plus(arrival.pending, arrival.computed)
        batch = running.batch
        batch = RunningBatch(
            batch.work,
            batch.online_work,
            batch.offline_rows,
            batch.online_rows,
            batch.seconds,
            now - running.started,
            batch.slack_s,
        )
        if self.policy.interrupts(row, queued, batch, self._model()):
            self._flag.raise_for(running.epoch)
            running.raised = True
            self.counts["coserving_signals"] += 1


_watch: ArrivalWatch | None = None


def install(watch: ArrivalWatch) -> None:
    """Patches vLLM once a process; the last watch installed is the one that is told."""
    global _watch  # noqa: PLW0603
    _watch = watch
    original = EngineCore.preprocess_add_request
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def preprocess_add_request(self: EngineCore, request: Any) -> Any:
        result = original(self, request)
        if _watch is not None:
            try:
                _watch.on_arrival(result[0])
            except Exception:
                # The request must reach the scheduler whatever becomes of the decision to hurry for it.
                _watch.counts["coserving_unjudged"] += 1
                logger.exception("arrival not judged request=%s", result[0].request_id)
        return result

    EngineCore.preprocess_add_request = preprocess_add_request
