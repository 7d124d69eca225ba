"""Runs an engine with little KV, plain or with our connector."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.vllm_engine import VllmEngine, counter, vllm_engine
from kvtransfer.config import ConnectorConfig

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),  # one core is for the engine's other threads
}


@dataclass(frozen=True)
class KvShape:
    """Model, blocks and context of an engine that has little KV."""

    model: Path
    blocks: int
    block_tokens: int = 32  # the smallest that the CPU build takes
    context: int = 8192


@asynccontextmanager
async def kv_engine(shape: KvShape, connector: ConnectorConfig | None) -> AsyncIterator[VllmEngine]:
    arguments = {
        "model": str(shape.model),
        "dtype": "float32",
        "max_model_len": shape.context,
        "block_size": shape.block_tokens,
        "num_gpu_blocks_override": shape.blocks,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 48,
        "enforce_eager": True,
        "async_scheduling": False,
        "kv_transfer_config": connector.to_kv_transfer_config() if connector else None,
    }
    async with vllm_engine(arguments, ENVIRONMENT) as engine:
        yield engine


async def restored_blocks(engine: VllmEngine) -> float:
    await engine.ask([1, 2, 3], 2)  # counts arrive with a step
    return counter("conserve_kv_restored_blocks_total")


async def leave_accelerator(engine: VllmEngine) -> None:
    """Wait until every block has been copied to the host, then drop all blocks from the accelerator."""
    for _ in range(200):
        await engine.ask([5, 6, 7], 1)
        if await engine.llm.reset_prefix_cache():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("blocks were still being copied to the host after 10 s")
