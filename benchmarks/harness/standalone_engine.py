"""Runs a co-serving engine from this process, without HTTP and fleet, for benchmarks and tests."""

import asyncio
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.vllm_engine import vllm_engine
from kvtransfer.config import ConnectorConfig
from workers.engine.coserving.config import (
    SAFEPOINT_PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)
from workers.engine.coserving.profile import LoggedEngine
from workers.engine.coserving.safepoint import Flag


@dataclass(frozen=True)
class StandaloneShape:
    model: Path | str
    blocks: int | None = 1024  # None: all that fit
    block_tokens: int = 32
    max_tokens: int = 512
    max_running: int = 32
    max_context: int = 4096
    compiled: bool = False
    ranks: int = 1
    scheduler: str = SCHEDULER_CLASS
    host_kv_gib: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # more arguments of vLLM


@dataclass
class StandaloneEngine(LoggedEngine):
    flag: Flag

    async def empty(self) -> None:
        """Wait until no request is left, then empty the prefix cache."""
        for _ in range(100):
            if await self.llm.reset_prefix_cache():
                return
            await asyncio.sleep(0.05)
        raise TimeoutError("the engine still held blocks after 5 s without requests")


def on_cuda() -> bool:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as in vLLM: otherwise the check makes forks unsafe
    import torch

    return bool(torch.cuda.is_available())


@asynccontextmanager
async def coserving_engine(
    shape: StandaloneShape, config: CoServingConfig
) -> AsyncIterator[StandaloneEngine]:
    """Run vLLM with our scheduler, worker and connector within this block, then end its processes."""
    with tempfile.TemporaryDirectory(prefix="coserving-") as folder:
        log = Path(folder) / "iterations.jsonl"
        connector = ConnectorConfig(
            safepoint=f"conserve-{uuid.uuid4().hex[:12]}",
            plugins=(SAFEPOINT_PLUGIN,),
            host_kv_gib=shape.host_kv_gib,
            transfer=False,
        )
        settings = config.to_additional_config()
        settings["coserving"]["iteration_log"] = str(log)
        arguments = {
            "dtype": "float32",
            "model": str(shape.model),
            "max_model_len": shape.max_context,
            "block_size": shape.block_tokens,
            "num_gpu_blocks_override": shape.blocks,
            "max_num_batched_tokens": shape.max_tokens,
            "max_num_seqs": shape.max_running,
            "enforce_eager": not shape.compiled,
            "tensor_parallel_size": shape.ranks,
            "scheduler_cls": shape.scheduler,
            "worker_cls": WORKER_CLASS,
            "additional_config": settings,
            "kv_transfer_config": connector.to_kv_transfer_config(),
            "disable_log_stats": True,
            **shape.arguments,
        }
        environment = {
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **shape.environment,
        }
        flag = Flag(connector.safepoint)
        try:
            async with vllm_engine(arguments, environment) as engine:
                yield StandaloneEngine(engine.llm, log, flag)
        finally:
            flag.close()
            flag.remove()
