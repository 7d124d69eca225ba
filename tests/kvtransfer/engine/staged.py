"""A plugin that makes an engine's transfers pass through a small staging window, on CPUs too."""

from typing import Any

from kvtransfer.plugins import EngineContext, Plugin, WorkerSide
from kvtransfer.transfer import worker
from kvtransfer.transfer.staging import StagedBlockMemory

STAGED_PLUGIN = "tests.kvtransfer.engine.staged:StagedPlugin"
WINDOW_BYTES = 1 << 20
SAID = "KV is staged through"


def staged(kv_caches: Any, blocks: int, groups: Any) -> StagedBlockMemory:
    return staged_on_gpu(kv_caches, blocks, WINDOW_BYTES, None, groups)


def staged_on_gpu(
    kv_caches: Any, blocks: int, window: int, cuda: Any | None, groups: Any
) -> StagedBlockMemory:
    memory = StagedBlockMemory(kv_caches, blocks, WINDOW_BYTES, cuda, groups)
    print(f"{SAID} {memory.slots} slots", flush=True)
    return memory


class StagedPlugin(Plugin):
    name = "staged"

    def worker_side(self, context: EngineContext, rank: int) -> WorkerSide:
        """Return the transfer's worker side, and make it use a small staging window before it starts."""
        worker.HostBlockMemory = staged  # type: ignore[assignment,misc]
        worker.StagedBlockMemory = staged_on_gpu  # type: ignore[assignment,misc]
        return super().worker_side(context, rank)
