"""The worker's half of the checkpoint."""

from collections.abc import Mapping
from typing import Any

from kvtransfer.checkpoint.copier import Copier
from kvtransfer.checkpoint.movers import block_bytes, mover_for
from kvtransfer.checkpoint.orders import CheckpointOrder, CheckpointReport
from kvtransfer.checkpoint.slots import HostSlots
from kvtransfer.parts import EngineContext, LoadsEnded, WorkerHalf
from kvtransfer.sizes import host_slots
from kvtransfer.transfer.memory import by_block_first


class CheckpointWorker(WorkerHalf):
    def __init__(self, context: EngineContext) -> None:
        self._blocks = int(context.kv_cache_config.num_blocks)
        self._slots = host_slots(context.config, context.vllm_config, context.kv_cache_config)
        self._copier: Copier

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        device = [by_block_first(tensor, self._blocks) for tensor in kv_caches.values()]
        self._copier = Copier(HostSlots(self._slots, block_bytes(device)), mover_for(device))

    def before_step(self, order: CheckpointOrder | None) -> None:
        self._copier.step_began()
        if order is not None:
            self._copier.submit(order)

    def after_step(self) -> None:
        self._copier.step_ended()

    def loads_ended(self) -> LoadsEnded:
        return self._copier.take_ended()

    def report(self) -> CheckpointReport | None:
        return self._copier.take_report() or None

    def shutdown(self) -> None:
        self._copier.close()
