"""Plugins that break one thing each, to test that the fault is found.

`SabotagePlugin` damages KV on the host when a file exists. `LeakPlugin` now and then takes a block and never
gives it back. `BlindPlugin` damages KV on the host and disables the check that would find it.
"""

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.checkpoint.copy_orders import FIRST_DISK_SLOT
from kvtransfer.checkpoint.host_slots import HostSlots
from kvtransfer.plugins import EngineContext, Plugin, SchedulerSide, WorkerSide

VARIABLE = "CONSERVE_TEST_SABOTAGE"
PLUGINS = {name: f"tests.kvtransfer.engine.sabotage:{name.title()}Plugin" for name in ("leak", "blind")}


def damage(memory: HostSlots, slot: int, byte: int) -> None:
    """Flip a bit of a block in host memory or on the disk."""
    if slot < FIRST_DISK_SLOT:
        memory.rows[slot][byte] ^= 1
    elif memory.disk is not None:
        row = memory.rows[0].copy()
        memory.disk.read(slot, row)
        row[byte] ^= 1
        memory.disk.write(slot, row)


class SabotageWorker(WorkerSide):
    def __init__(self, context: EngineContext, rank: int) -> None:
        self._request = Path(os.environ[VARIABLE])
        self._memory: HostSlots | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        (self._memory,) = [thing for thing in gc.get_objects() if isinstance(thing, HostSlots)]

    def before_step(self, order: Any | None) -> None:
        if self._request.exists() and self._memory is not None:
            for slot in self._memory.contents:
                damage(self._memory, slot, 11)
            self._request.unlink()


class SabotagePlugin(Plugin):
    name = "sabotage"
    worker = SabotageWorker


class LeakScheduler(SchedulerSide):
    def __init__(self, context: EngineContext) -> None:
        self._finished = 0

    def bind(self, manager: Any) -> None:
        self._pool = manager.block_pool

    def on_finished(self, request: Any, block_ids: list[int]) -> None:
        self._finished += 1
        if self._finished % 50 == 0 and block_ids:
            self._pool.touch([self._pool.blocks[block_ids[0]]])


class LeakPlugin(Plugin):
    name = "leak"
    scheduler = LeakScheduler


class BlindWorker(WorkerSide):
    def register(self, kv_caches: Mapping[str, Any]) -> None:
        (self._memory,) = [thing for thing in gc.get_objects() if isinstance(thing, HostSlots)]
        self._memory.known = self._spoiled  # type: ignore[method-assign]
        self._memory.holds = lambda copy, digest: True  # type: ignore[method-assign]

    def _spoiled(self, copies: list[Any]) -> list[Any]:
        slots = [copy.slot for copy in copies]
        self._memory.rows[slots] = np.roll(self._memory.rows[slots], 4, axis=1)
        return copies


class BlindPlugin(Plugin):
    name = "blind"
    worker = BlindWorker
