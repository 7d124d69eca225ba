"""BROS: online by remaining time to the token deadline, offline by least swap-in cost, adaptive batch size.

Its bidirectional sharing of a block's slots needs attention kernels of its own. What it is for, giving online
work no more of an offline request's memory than it takes, holds here at the granularity of blocks
(see memory.victims).
"""

from placement.latency import BatchWork, LatencyModel
from placement.serving import memory
from placement.serving.policy import ServingSettings
from placement.serving.state import EngineView, Filling, IterationDone, Plan, Row, RunningBatch


class Bros:
    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings
        self._batch = settings.batch_start
        self._overrun = False

    def plan(self, view: EngineView, model: LatencyModel) -> Plan:
        online = sorted(memory.online_rows(view), key=lambda row: (row.deadline(), row.key))
        taken = memory.victims(view, lambda row: (row.restore_blocks + row.saved_blocks, -row.arrival))
        offline = sorted(
            (row for row in memory.without(view.running, taken) if row.offline),
            key=lambda row: (row.restore_blocks, row.arrival, row.key),
        )
        residual = max(online[0].deadline() - view.now, 0.0) if online else None
        chosen = online[: self._batch]
        places = max(self._batch - len(chosen), 0)
        waiting = len(offline) + view.offline_waiting
        if places == 0:
            chosen, places = self._replace_least_urgent(chosen, waiting, view.now, model)
        left_out = {row.key: 0 for row in online if row not in chosen}
        work = memory.online_work(chosen, view.max_tokens)
        target = residual * (1 - self._settings.margin) if residual is not None else None
        self._overrun = target is not None and model.seconds(work) > target
        filling = Filling(
            model, work, view.max_tokens - work.new_tokens, target, rows_left=places, caps=left_out,
            admit_waiting=not taken,
        )  # fmt: skip
        order = [row.key for row in online if row.running] + [row.key for row in offline]
        return Plan(tuple(order), tuple(row.key for row in taken), filling)

    def _replace_least_urgent(
        self, chosen: list[Row], offline: int, now: float, model: LatencyModel
    ) -> tuple[list[Row], int]:
        """Rows that still meet their deadline after sitting out this iteration give their place away."""
        kept, places = list(chosen), 0
        seconds = model.seconds(memory.online_work(kept, 1 << 30))
        while offline > places and len(kept) > 1 and kept[-1].deadline() - now > 3 * seconds:
            kept.pop()
            places += 1
        return kept, places

    def interrupts(self, arrival: Row, queued: BatchWork, batch: RunningBatch, model: LatencyModel) -> bool:
        return False  # BROS preempts between iterations, which the residual time keeps short

    def observe(self, done: IterationDone) -> None:
        if self._overrun or done.late_rows:
            self._batch = self._settings.batch_start
        else:
            self._batch += 1
