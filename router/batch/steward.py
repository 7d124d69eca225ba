"""Moves batches through their states: validation, end of window, cancellation, finalizing, clean-up.

Runs in threads: one for validation, so that a large file does not hold up the ends of others. Every pass may
be cut off anywhere: the next one, here or at another gateway, starts from what the store says.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from sqlalchemy.sql.elements import ColumnElement

from router.batch.blobs import Blobs
from router.batch.finish import Finisher
from router.batch.intake import Intake
from router.batch.metrics import BATCHES_LIVE
from router.batch.records import LIVE, BatchRecord
from router.batch.store.batches import ENDS, VALIDATES
from router.batch.store.store import Store

log = logging.getLogger("conserve.router.batch.steward")

_SWEEP_EVERY_S = 60.0


class Steward:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        intake: Intake,
        worker: str,
        cancel_grace_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._intake = intake
        self._finisher = Finisher(store, blobs, clock)
        self._worker = worker
        self._cancel_grace_s = cancel_grace_s
        self._clock = clock
        self._swept = float("-inf")
        self._failed: deque[int] = deque()  # batches whose work failed here, still in our name
        self._handing_back = threading.Lock()

    def take_in(self) -> bool:
        """Validate one batch; True when there may be more."""
        return self._work(VALIDATES, lambda batch: self._intake.validate(batch, self._worker))

    def see_out(self) -> bool:
        """Close what is through, late or cancelled, and finish one batch; True when there may be more."""
        now = self._clock()
        self._store.batches.settle(now, self._cancel_grace_s)
        self._count_live()
        if now - self._swept >= _SWEEP_EVERY_S:
            self._swept = now
            self._sweep_files(now)
        return self._work(ENDS, self._end)

    def _work(self, which: ColumnElement[bool], work: Callable[[BatchRecord], None]) -> bool:
        self._hand_back()
        batch = self._store.batches.take_up(self._worker, which)
        if batch is None:
            return False
        try:
            work(batch)
        except Exception:  # the dispatcher logs and counts it
            self._failed.append(batch.seq)
            raise
        return True

    def _hand_back(self) -> None:
        """Not where the work failed: what failed it may be the store that is to be told."""
        with self._handing_back:
            while self._failed:
                self._store.batches.hand_back(self._failed[0], self._worker)
                self._failed.popleft()

    def _end(self, batch: BatchRecord) -> None:
        if batch.status in LIVE:
            self._finisher.finish(batch, self._worker)
        else:  # its last state is durable, its lines are still to be forgotten
            self._finisher.clean_up(batch, self._worker)

    def _count_live(self) -> None:
        live = self._store.batches.count_live()
        for status in LIVE:
            BATCHES_LIVE.labels(status).set(live.get(status, 0))

    def _sweep_files(self, now: float) -> None:
        while gone := self._store.files.unreferenced(now):
            for file_id in gone:
                self._blobs.delete(file_id)
            self._store.files.forget(gone)
            log.info("deleted or expired files removed files=%d", len(gone))
