"""Policy of the BROS paper: online requests by their deadlines, offline requests by their swap-in cost."""

from placement.scheduling import memory_preemption
from placement.scheduling.interface import (
    BatchBuilder,
    EngineView,
    IterationDone,
    IterationPlan,
    RequestView,
    ServingPolicy,
    ServingSettings,
)
from placement.scheduling.latency_model import LatencyModel


class Bros(ServingPolicy):
    """BROS policy: online requests by deadline, offline requests by swap-in cost, and an adaptive batch size.

    In the paper two requests can also share one block, filled from both ends, which needs special attention
    kernels. The purpose is to take no more of an offline request's memory than online work needs. Here this
    holds at the granularity of blocks (`memory_preemption.victims`); sharing blocks would gain at most 0.9 %
    of throughput (docs/measurements/coserving.md). The policy preempts between iterations only.
    """

    batch_start = 8  # requests in the first batch, and in the batch after a missed deadline

    def __init__(self, settings: ServingSettings) -> None:
        super().__init__(settings)
        self._batch = self.batch_start
        self._overrun = False

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        online = sorted(memory_preemption.online_requests(view), key=lambda r: (r.deadline(), r.key))
        taken = memory_preemption.victims(view, lambda r: (r.restore_blocks + r.saved_blocks, -r.arrival))
        offline = sorted(
            (request for request in memory_preemption.without(view.running, taken) if request.offline),
            key=lambda request: (*self.start_order(request), request.key),
        )
        residual = max(online[0].deadline() - view.now, 0.0) if online else None
        chosen = online[: self._batch]
        slots = max(self._batch - len(chosen), 0)
        waiting = len(offline) + view.offline_waiting
        if slots == 0:
            chosen, slots = self._replace_least_urgent(chosen, waiting, view.now, model)
        left_out = {request.key: 0 for request in online if request not in chosen}
        work = memory_preemption.online_work(chosen, view.max_tokens)
        target = residual * (1 - self._settings.margin) if residual is not None else None
        self._overrun = target is not None and model.seconds(work) > target
        builder = BatchBuilder(
            model,
            work,
            view.max_tokens - work.new_tokens,
            target,
            slots_left=slots,
            caps=left_out,
            admit_waiting=not taken,
        )
        order = [r.key for r in online if r.running] + [r.key for r in offline]
        return IterationPlan(tuple(order), tuple(r.key for r in taken), builder)

    def start_order(self, request: RequestView) -> tuple[float, ...]:
        return (request.restore_blocks, request.arrival)

    def _replace_least_urgent(
        self, chosen: list[RequestView], offline: int, now: float, model: LatencyModel
    ) -> tuple[list[RequestView], int]:
        """Return `chosen` without requests that can skip this iteration, and the slots for offline requests.

        The last of `chosen` may be left out if its deadline is far away; the first always stays.
        """
        kept, slots = list(chosen), 0
        seconds = model.seconds(memory_preemption.online_work(kept, 1 << 30))
        while offline > slots and len(kept) > 1 and kept[-1].deadline() - now > 3 * seconds:
            kept.pop()
            slots += 1
        return kept, slots

    def observe(self, done: IterationDone) -> None:
        if self._overrun or done.late_requests:
            self._batch = self.batch_start
        else:
            self._batch += 1
