"""Watches for online requests that arrive while offline work runs, and raises the flag that aborts it."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from placement.scheduling.interface import RequestView, ServingPolicy
from placement.scheduling.latency_model import LatencyModel
from workers.engine.coserving.iterations import PendingIteration
from workers.engine.coserving.safepoint import Flag

logger = logging.getLogger("conserve.workers.coserving")


class ArrivalWatch:
    """Watch for online requests that arrive in an armed iteration: raises the flag if one should abort it."""

    def __init__(
        self,
        policy: Callable[[], ServingPolicy],
        flag: Flag,
        model: Callable[[], LatencyModel],
        view_of: Callable[[Any, float], RequestView],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._flag = flag
        self._model = model
        self._view_of = view_of
        self._clock = clock
        self.in_flight: PendingIteration | None = None  # armed; set by the scheduler
        self.counts: Counter[str] = Counter()

    def take_counts(self) -> Counter[str]:
        counts, self.counts = self.counts, Counter()
        return counts

    def on_arrival(self, request: Any) -> None:
        """Raise the flag if the policy wants an abort for this arrival; called in the receiving thread."""
        try:
            self._judge(request)
        except Exception:
            # The request must reach the scheduler even if it cannot be judged.
            self.counts["coserving_unjudged"] += 1
            logger.exception("arrival not judged request=%s", request.request_id)

    def _judge(self, request: Any) -> None:
        running = self.in_flight
        if running is None or request.priority > 0 or running.raised:
            return
        now = self._clock()
        view = self._view_of(request, now)
        running.arrivals.append(view)
        queued = running.queued
        for arrival in running.arrivals:
            queued = queued.plus(arrival.pending, arrival.computed)
        batch = replace(running.batch, passed_s=now - running.started)
        if self._policy().interrupts(view, queued, batch, self._model()):
            self._flag.raise_for(running.epoch)
            running.raised = True
            self.counts["coserving_signals"] += 1
