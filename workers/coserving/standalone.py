"""A co-serving vLLM in this process's tree, for profiling, benchmarks and tests: no HTTP, no fleet."""

import asyncio
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvtransfer.config import ConnectorConfig
from workers.coserving.config import (
    CPU_WORKER_CLASS,
    SAFEPOINT_PART,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)
from workers.coserving.flag import Flag
from workers.coserving.iterations import IterationRecord, read_iterations

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class EngineShape:
    model: Path | str
    blocks: int | None = 1024  # None: as many as fit
    block_tokens: int = 32
    max_tokens: int = 512
    max_running: int = 32
    max_context: int = 4096
    compiled: bool = False
    ranks: int = 1
    scheduler: str = SCHEDULER_CLASS
    parts: tuple[str, ...] = (SAFEPOINT_PART,)
    host_kv_gib: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # more of vLLM's own


@dataclass
class CoServingEngine:
    llm: Any  # vLLM's AsyncLLM
    flag: Flag
    log: Path

    def iterations(self) -> list[IterationRecord]:
        return read_iterations(self.log)

    async def empty(self) -> None:
        """No request and no cached prefix is left."""
        for _ in range(100):
            if await self.llm.reset_prefix_cache():
                return
            await asyncio.sleep(0.05)
        raise TimeoutError("the engine still held blocks after 5 s without requests")


def on_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@asynccontextmanager
async def coserving_engine(shape: EngineShape, config: CoServingConfig) -> AsyncIterator[CoServingEngine]:
    """Starts vLLM with our scheduler, worker and connector; ends its processes."""
    os.environ.update(
        {
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            **shape.environment,
        }
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory(prefix="coserving-") as folder:
        log = Path(folder) / "iterations.jsonl"
        connector = ConnectorConfig(
            safepoint=f"conserve-{uuid.uuid4().hex[:12]}",
            parts=shape.parts,
            host_kv_gib=shape.host_kv_gib,
            transfer=False,
        )
        settings = config.to_additional_config()
        settings["coserving"]["iteration_log"] = str(log)
        own = {
            "model": str(shape.model),
            "max_model_len": shape.max_context,
            "block_size": shape.block_tokens,
            "num_gpu_blocks_override": shape.blocks,
            "max_num_batched_tokens": shape.max_tokens,
            "max_num_seqs": shape.max_running,
            "enforce_eager": not shape.compiled,
            "tensor_parallel_size": shape.ranks,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "scheduling_policy": "priority",
            "scheduler_cls": shape.scheduler,
            "worker_cls": WORKER_CLASS if on_cuda() else CPU_WORKER_CLASS,
            "additional_config": settings,
            "kv_transfer_config": connector.to_kv_transfer_config(),
            "disable_log_stats": True,
        }
        # Options of the server in front of the engine (tool parsers and the like) mean nothing here.
        known = {option.name for option in fields(AsyncEngineArgs)}
        more = {name: value for name, value in shape.arguments.items() if name in known}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**{"dtype": "float32", **own, **more}))
        flag = Flag(connector.safepoint)
        try:
            yield CoServingEngine(llm, flag, log)
        finally:
            llm.shutdown()
            flag.close()
            flag.remove()
