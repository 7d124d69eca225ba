"""vLLM in this process, plain or with our connector, without HTTP and without a fleet."""

import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from kvtransfer.config import ConnectorConfig

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class KvShape:
    """Sizes of an engine."""

    model: Path
    blocks: int
    block_tokens: int = 32  # the smallest that the CPU build takes
    batched_tokens: int = 2048
    running: int = 48
    context: int = 8192


@dataclass
class EngineAnswer:
    """Tokens of an answer with their times since the request."""

    tokens: list[int]
    first_token_s: float
    arrivals: list[float]
    cached_tokens: int  # of the prompt: on the accelerator already, or restored


@dataclass
class KvEngine:
    """A running engine that is asked with token ids."""

    llm: Any  # vLLM's AsyncLLM
    index: int = 0

    async def ask(
        self,
        prompt: list[int],
        output: int,
        session: str | None = None,
        priority: int = 0,
        transfer: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> EngineAnswer:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self.index += 1
        extra = dict(arguments or {})
        if transfer:
            extra["kv_transfer_params"] = dict(transfer)
        sampling = SamplingParams(
            max_tokens=output,
            temperature=0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
        )
        began = time.monotonic()
        answer = EngineAnswer([], 0.0, [], 0)
        async for delta in self.llm.generate(
            TokensPrompt(prompt_token_ids=prompt),
            sampling,
            f"r{self.index}",
            session_id=session,
            priority=priority,
        ):
            new = delta.outputs[0].token_ids
            answer.cached_tokens = delta.num_cached_tokens or 0
            answer.tokens.extend(new)
            answer.arrivals.extend([time.monotonic() - began] * len(new))
        answer.first_token_s = answer.arrivals[0]
        return answer


def counter(name: str, **labels: str) -> float:
    """Return a counter of this process, summed over labels that are not given."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@asynccontextmanager
async def kv_engine(shape: KvShape, connector: ConnectorConfig | None) -> AsyncIterator[KvEngine]:
    os.environ.update(
        {
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as the fleet's engines
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),  # the engine's other threads need one
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(shape.model),
        dtype="float32",
        max_model_len=shape.context,
        block_size=shape.block_tokens,
        num_gpu_blocks_override=shape.blocks,
        max_num_batched_tokens=shape.batched_tokens,
        max_num_seqs=shape.running,
        enforce_eager=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        scheduling_policy="priority",
        kv_transfer_config=connector.to_kv_transfer_config() if connector else None,
    )
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        engine = KvEngine(llm)
        await engine.ask([5, 6, 7], 2)
        yield engine
    finally:
        llm.shutdown()
