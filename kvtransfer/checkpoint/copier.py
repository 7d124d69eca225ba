"""Worker side of the checkpoint: a thread that copies blocks in the background, and its throttle.

Loads come first, because turns wait for them; then come stores, and last moves to the disk. Loads and stores
are split into *pieces* of at most `Mover.at_once` blocks; the copier's threads share the work of a piece.
While the model computes on the same cores, the copier rests after each piece, so that decoding requests lose
little. The longer copies wait, the less it rests, because blocks are held on the accelerator until they are
stored. While no step runs, the copier does not rest.

A failed copy is logged and reported to the scheduler, because a request waits for the copy and blocks are
held for it. So no exception of a copy may end the thread.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from kvtransfer.checkpoint.copy_orders import (
    BlockCopy,
    BlockLoad,
    CheckpointOrder,
    CheckpointReport,
    DiskMove,
)
from kvtransfer.checkpoint.cuda_mover import memory_for, mover_for
from kvtransfer.checkpoint.disk_slots import DiskSlots
from kvtransfer.checkpoint.host_slots import THREADS, HostSlots, Mover, block_bytes
from kvtransfer.checkpoint.scheduler import CheckpointScheduler
from kvtransfer.plugins import EngineContext, LoadsEnded, Plugin, WorkerSide
from kvtransfer.transfer.kv_memory import by_block_first

logger = logging.getLogger("conserve.kvtransfer.checkpoint")

SHARE_BESIDE_STEPS = 0.05  # share of a core for copies while steps run, if no copy has waited for long
PATIENCE_S = 0.25
CLOSE_S = 3.0
BETWEEN_STEPS_S = 0.05  # after a longer time without a step the engine counts as idle
NICE = 10


class CopyThrottle:
    """Limits the share of a core that copies take from the model, by resting after each copy.

    The rest is proportional to the processor time of the copy. If it were proportional to the elapsed time,
    a copy that other threads delay would be followed by a longer rest, and copies might never end. The
    longer work has waited, the shorter the rests: the share of a core is twice `share` after `patience_s`,
    and three times `share` after twice `patience_s`.
    """

    def __init__(self, share: float, patience_s: float) -> None:
        self._share = share
        self._patience_s = patience_s
        self._until = 0.0
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.thread_time()

    def end(self, waited_s: float) -> None:
        """End the copy that `begin` began, and set the rest after it.

        `waited_s` is the age of the oldest unfinished work.
        """
        share = min(1.0, self._share * (1 + waited_s / self._patience_s))
        self._until = time.monotonic() + (time.thread_time() - self._began) * (1 / share - 1)

    def left_s(self) -> float:
        return self._until - time.monotonic()


class Copier:
    """Thread of one rank that copies blocks to and from the host, with helper threads."""

    def __init__(self, memory: HostSlots, mover: Mover) -> None:
        self.memory = memory
        self._mover = mover
        self._loads: deque[tuple[float, BlockLoad]] = deque()  # with the time of the order
        self._stores: deque[tuple[float, list[BlockCopy]]] = deque()
        self._moves: deque[DiskMove] = deque()
        self._work = threading.Condition()
        self._throttle = CopyThrottle(SHARE_BESIDE_STEPS, PATIENCE_S)
        self._beside_steps = False  # a step with requests runs
        self._in_step = False
        self._step_ended_at = 0.0
        self._closed = False
        self._report = CheckpointReport()
        self._ended = LoadsEnded()
        self._disk_fails = False  # whether the last move failed
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._part = max(1, mover.at_once // THREADS)
        self._helpers = ThreadPoolExecutor(THREADS - 1, "kv-copier", initializer=self._lower_priority)
        self._thread = threading.Thread(target=self._run, name="kv-copier", daemon=True)
        self._thread.start()

    def submit(self, order: CheckpointOrder) -> None:
        now = time.monotonic()
        if order.loads:
            self._mover.mark()
        with self._work:
            self._loads.extend((now, load) for load in order.loads)
            self._stores.extend((now, copies) for copies in self._pieces(order.stores))
            self._moves.extend(order.moves)
            self._beside_steps = order.beside_step
            self._work.notify()

    def step_began(self) -> None:
        self._in_step = True

    def step_ended(self) -> None:
        self._in_step, self._step_ended_at = False, time.monotonic()

    def _pieces(self, copies: list[BlockCopy]) -> Iterator[list[BlockCopy]]:
        size = self._mover.at_once
        return (copies[at : at + size] for at in range(0, len(copies), size))

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
        self._helpers.shutdown(wait=False)
        self._thread.join(CLOSE_S)  # a thread still inside torch would abort the process when it exits

    def _run(self) -> None:
        self._lower_priority()
        while True:
            with self._work:
                self._work.wait_for(lambda: self._loads or self._stores or self._moves or self._closed)
            self._rest()
            with self._work:
                if self._closed:
                    break
                work = self._next()
            work()
        self.memory.close()  # no copy is under way here

    def _next(self) -> Callable[[], None]:
        """Return the next work: a load if one waits, else a store, else a move to the disk.

        If one thread stores alone, it gets only a part of a piece, because a load that arrives waits for it.
        """
        if self._loads:
            asked_for, load = self._loads.popleft()
            return partial(self._load, load, asked_for)
        if not self._stores:
            return partial(self._move, self._moves.popleft())
        asked_for, copies = self._stores.popleft()
        if not self._mover.takes_cores and self._store_threads() == 1:
            copies, later = copies[: self._part], copies[self._part :]
            if later:
                self._stores.appendleft((asked_for, later))
        return partial(self._store, copies, asked_for)

    def _rest(self) -> None:
        if not self._mover.takes_cores:
            return
        with self._work:
            while self._steps_go_on() and not self._closed and (left := self._throttle.left_s()) > 0:
                self._work.wait(min(left, BETWEEN_STEPS_S))

    def _steps_go_on(self) -> bool:
        recently = self._in_step or time.monotonic() - self._step_ended_at < BETWEEN_STEPS_S
        return self._beside_steps and recently

    def _lower_priority(self) -> None:
        if self._mover.takes_cores:
            lower_thread_priority()

    def _in_parts(
        self,
        work: Callable[[HostSlots, list[BlockCopy], int], Any],
        copies: list[BlockCopy],
        threads: int,
    ) -> list[Any]:
        size = -(-len(copies) // threads)
        parts = [(self.memory, copies[at : at + size], at) for at in range(0, len(copies), size)]
        others: list[Future[Any]] = []
        try:
            others.extend(self._helpers.submit(work, *part) for part in parts[1:])
            mine = work(*parts[0])
        finally:
            wait(others)  # also after an exception: the next piece uses the same rows
        return [mine, *(other.result() for other in others)]

    def _store_threads(self) -> int:
        """Return how many threads store blocks: one while steps run, as each takes the GIL from the model."""
        return 1 if self._steps_go_on() else self._threads

    def _load_threads(self) -> int:
        return 1 if self._mover.takes_cores and self._steps_go_on() else self._threads

    def _waited_s(self, asked_for: float) -> float:
        """Return the age of work that was ordered at `asked_for`, or of a waiting store if that is older."""
        with self._work:
            oldest = self._stores[0][0] if self._stores else asked_for
        return time.monotonic() - min(oldest, asked_for)

    def _store(self, copies: list[BlockCopy], asked_for: float) -> None:
        failed: list[BlockCopy] = []
        self._throttle.begin()
        try:
            self._in_parts(self._mover.store, copies, self._store_threads())
        except Exception:
            logger.exception("%d blocks could not be copied to the host", len(copies))
            failed = copies
        self._throttle.end(self._waited_s(asked_for))
        with self._work:
            self._report.stored.update(copy.slot for copy in copies)
            self._report.failed.update(copy.slot for copy in failed)

    def _move(self, move: DiskMove) -> None:
        self._throttle.begin()
        failed = False
        try:
            self.memory.move_to_disk(move)
        except Exception:
            failed = True
            if not self._disk_fails:
                logger.exception(
                    "a block could not be written to the disk; further failures are only counted"
                )
        self._disk_fails = failed
        self._throttle.end(0.0)
        with self._work:
            self._report.moved[move.disk_slot] += 1
            if failed:
                self._report.unmoved.add(move.disk_slot)

    def _load_part(self, memory: HostSlots, copies: list[BlockCopy], at: int) -> list[BlockCopy]:
        staged = memory.staged(copies, at)
        return [staged[copy] for copy in self._mover.load(memory, list(staged), at)]

    def _load(self, load: BlockLoad, asked_for: float) -> None:
        failed: list[BlockCopy] = []
        corrupt: list[BlockCopy] = []
        for copies in self._pieces(load.copies):
            self._rest()
            self._throttle.begin()
            try:
                parts = self._in_parts(self._load_part, copies, self._load_threads())
                good = [copy for part in parts for copy in part]
            except Exception:
                logger.exception(
                    "request %s: %d blocks could not be copied from the host", load.request_id, len(copies)
                )
                failed += copies
            else:
                corrupt += set(copies).difference(good)
            self._throttle.end(self._waited_s(asked_for))
        if corrupt:
            logger.error(
                "request %s: %d blocks on the host failed their check", load.request_id, len(corrupt)
            )
        with self._work:
            unfilled = {copy.block for copy in failed + corrupt}
            if load.prefetch:
                self._report.prefetched[load.request_id] += 1
                self._report.unfilled |= unfilled
            else:
                self._ended.requests.add(load.request_id)
                if unfilled:
                    self._ended.failed.add(load.request_id)
                self._ended.failed_blocks |= unfilled
            self._report.failed.update(copy.slot for copy in failed)
            self._report.corrupt.update(copy.slot for copy in corrupt)


def lower_thread_priority() -> None:
    """Give the calling thread a low priority, so that it mostly uses idle cores and preempts no thread."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, NICE)
    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def pages(layers: Iterable[Any]) -> list[Any]:
    """Return one tensor for each distinct part of KV memory: that of the largest layer that uses it.

    Layers of different KV cache groups share memory; a block belongs to one group at a time.
    """
    by_size = sorted(layers, key=lambda layer: int(layer[0].nbytes))
    return list({layer.data_ptr(): layer for layer in by_size}.values())


class CheckpointWorker(WorkerSide):
    """Passes each step's order to the copier, and the copier's results to the scheduler side."""

    def __init__(self, context: EngineContext, rank: int) -> None:
        self._blocks = int(context.kv_cache_config.num_blocks)
        self._host = context.kv_state.host
        self._disk_path = context.config.disk_path
        self.copier: Copier

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        device = pages([by_block_first(tensor, self._blocks) for tensor in kv_caches.values()])
        mover, disk = mover_for(device), self._disk(block_bytes(device))
        memory = memory_for(device, self._host.capacity, disk, mover.at_once if disk else 0)
        self.copier = Copier(memory, mover)

    def _disk(self, block_bytes: int) -> DiskSlots | None:
        if not self._host.disk_capacity:
            return None
        try:
            return DiskSlots(Path(self._disk_path), self._host.disk_capacity, block_bytes)
        except OSError as reason:
            logger.error(
                "kv.disk_gib cannot be reserved in %s (%s): KV that leaves host memory is lost",
                self._disk_path,
                reason,
            )
            return None

    def before_step(self, order: CheckpointOrder | None) -> None:
        self.copier.step_began()
        if order is not None:
            self.copier.submit(order)

    def after_step(self) -> None:
        self.copier.step_ended()

    def loads_ended(self) -> LoadsEnded:
        return self.copier.take_ended()

    def report(self) -> CheckpointReport | None:
        return self.copier.take_report() or None

    def take_counts(self) -> Mapping[str, float]:
        refused = self.copier.memory.take_refused()
        return {"unregistered_chunks": refused} if refused else {}

    def shutdown(self) -> None:
        self.copier.close()


class CheckpointPlugin(Plugin):
    name = "checkpoint"
    scheduler = CheckpointScheduler
    worker = CheckpointWorker
