"""The thread that copies blocks in the background. Loads go before stores: a turn waits for them.

Whatever goes wrong with a copy is logged and reported as a copy that ended badly, which the scheduler counts:
a request waits for it, and blocks are held for it. So nothing that a copy raises may end the thread.
"""

import logging
import threading
from collections import deque

from kvtransfer.checkpoint.movers import BOUNCE_BLOCKS, Mover
from kvtransfer.checkpoint.orders import CheckpointReport, Copy, Load
from kvtransfer.checkpoint.slots import HostSlots
from kvtransfer.parts import LoadsEnded

logger = logging.getLogger("conserve.kvtransfer.checkpoint")


class Copier:
    def __init__(self, memory: HostSlots, mover: Mover) -> None:
        self._memory = memory
        self._mover = mover
        self._loads: deque[Load] = deque()
        self._stores: deque[list[Copy]] = deque()
        self._work = threading.Condition()
        self._closed = False
        self._report = CheckpointReport()
        self._ended = LoadsEnded()
        threading.Thread(target=self._run, name="kv-copier", daemon=True).start()

    def submit(self, stores: list[Copy], loads: list[Load]) -> None:
        with self._work:
            self._loads.extend(loads)
            self._stores.extend(
                stores[at : at + BOUNCE_BLOCKS] for at in range(0, len(stores), BOUNCE_BLOCKS)
            )
            self._work.notify()

    def take_report(self) -> CheckpointReport:
        with self._work:
            report, self._report = self._report, CheckpointReport()
            return report

    def take_ended(self) -> LoadsEnded:
        with self._work:
            ended, self._ended = self._ended, LoadsEnded()
            return ended

    def close(self) -> None:
        with self._work:
            self._closed = True
            self._work.notify()

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._loads or self._stores or self._closed)
                if self._closed:
                    return
                load = self._loads.popleft() if self._loads else None
                copies = self._stores.popleft() if load is None else []
            if load is not None:
                self._load(load)
            else:
                self._store(copies)

    def _store(self, copies: list[Copy]) -> None:
        failed: list[Copy] = []
        try:
            self._memory.put(copies, self._mover.from_device([copy.block for copy in copies]))
        except Exception:
            logger.exception("%d blocks could not be copied to the host", len(copies))
            failed = copies
        with self._work:
            self._report.stored.update(copy.slot for copy in copies)
            self._report.failed.update(copy.slot for copy in failed)

    def _load(self, load: Load) -> None:
        failed: list[Copy] = []
        corrupt: list[Copy] = []
        for at in range(0, len(load.copies), BOUNCE_BLOCKS):
            copies = load.copies[at : at + BOUNCE_BLOCKS]
            try:
                good, pieces = self._memory.take(copies)
                if good:
                    self._mover.to_device(pieces, [copy.block for copy in good])
            except Exception:
                logger.exception(
                    "request %s: %d blocks could not be copied from the host", load.request_id, len(copies)
                )
                failed += copies
            else:
                corrupt += set(copies).difference(good)
        if corrupt:
            logger.error(
                "request %s: %d blocks on the host are not what they were", load.request_id, len(corrupt)
            )
        with self._work:
            self._ended.requests.add(load.request_id)
            self._ended.failed_blocks.update(copy.block for copy in failed + corrupt)
            self._report.failed.update(copy.slot for copy in failed)
            self._report.corrupt.update(copy.slot for copy in corrupt)
