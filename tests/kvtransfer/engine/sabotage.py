"""Parts that break something on purpose, for tests that it is found.

`SabotagePart` damages KV on the host when a file exists. `LeakPart` holds a block now and then and never
gives it back. `BlindPart` damages KV on the host and takes the check away that would find it.
"""

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.checkpoint.slots import HostSlots
from kvtransfer.parts import EngineContext, Part, SchedulerHalf, WorkerHalf

VARIABLE = "CONSERVE_TEST_SABOTAGE"
PARTS = {name: f"tests.kvtransfer.engine.sabotage:{name.title()}Part" for name in ("leak", "blind")}


class SabotageWorker(WorkerHalf):
    def __init__(self) -> None:
        self._request = Path(os.environ[VARIABLE])
        self._memory: HostSlots | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        (self._memory,) = [thing for thing in gc.get_objects() if isinstance(thing, HostSlots)]

    def before_step(self, order: Any | None) -> None:
        if self._request.exists() and self._memory is not None:
            for slot in self._memory._contents:
                self._memory.rows[slot][11] ^= 1
            self._request.unlink()


class SabotageScheduler(SchedulerHalf):
    def order(self, scheduler_output: Any) -> None:
        return None


class SabotagePart(Part):
    name = "sabotage"

    def scheduler_half(self, context: EngineContext) -> SchedulerHalf:
        return SabotageScheduler()

    def worker_half(self, context: EngineContext, rank: int) -> WorkerHalf:
        return SabotageWorker()


class LeakScheduler(SchedulerHalf):
    def __init__(self) -> None:
        self._finished = 0

    def bind(self, manager: Any) -> None:
        self._pool = manager.block_pool

    def on_finished(self, request: Any, block_ids: list[int]) -> None:
        self._finished += 1
        if self._finished % 50 == 0 and block_ids:
            self._pool.touch([self._pool.blocks[block_ids[0]]])


class LeakPart(Part):
    name = "leak"

    def scheduler_half(self, context: EngineContext) -> SchedulerHalf:
        return LeakScheduler()

    def worker_half(self, context: EngineContext, rank: int) -> WorkerHalf:
        return WorkerHalf()


class BlindWorker(WorkerHalf):
    def register(self, kv_caches: Mapping[str, Any]) -> None:
        (self._memory,) = [thing for thing in gc.get_objects() if isinstance(thing, HostSlots)]
        self._memory.take = self._take_unchecked  # type: ignore[method-assign]

    def _take_unchecked(self, copies: list[Any], bounce: Any) -> list[Any]:
        piece = self._memory._gather(copies, bounce)
        piece[:] = np.roll(piece, 4, axis=1)
        return copies


class BlindPart(Part):
    name = "blind"

    def scheduler_half(self, context: EngineContext) -> SchedulerHalf:
        return SchedulerHalf()

    def worker_half(self, context: EngineContext, rank: int) -> WorkerHalf:
        return BlindWorker()
