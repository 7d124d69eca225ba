"""A vLLM of this process, plain or with our connector, and conversations played on it: no HTTP, no fleet."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from kvtransfer.config import ConnectorConfig
from traces.format import TraceConversation, load
from traces.generators import Scale, fit, scale

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class KvShape:
    model: Path
    blocks: int
    block_tokens: int = 32  # the smallest that the CPU build takes
    batched_tokens: int = 2048
    running: int = 48
    context: int = 8192


@dataclass
class EngineAnswer:
    tokens: list[int]
    first_token_s: float
    arrivals: list[float]  # times of tokens, since the request
    cached_tokens: int  # of the prompt: on the accelerator already, or brought there


@dataclass
class KvEngine:
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
        start = time.monotonic()
        tokens: list[int] = []
        arrivals: list[float] = []
        cached = 0
        async for delta in self.llm.generate(
            TokensPrompt(prompt_token_ids=prompt),
            sampling,
            f"r{self.index}",
            session_id=session,
            priority=priority,
        ):
            new = delta.outputs[0].token_ids
            cached = delta.num_cached_tokens or 0
            tokens.extend(new)
            arrivals.extend([time.monotonic() - start] * len(new))
        return EngineAnswer(tokens, arrivals[0], arrivals, cached)


def counter(name: str, **labels: str) -> float:
    """A counter of this process, summed over labels not given."""
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


SAMPLE = REPOSITORY / "traces" / "samples" / "turns.jsonl.gz"


@dataclass(frozen=True)
class LoadShape:
    conversations: int = 40
    lengths: float = 1 / 16
    times: float = 1 / 30
    longest_wait_s: float = 10.0  # of a turn: the benchmark ends
    turns: int = 6
    context: int = 6000
    arrivals_s: float = 45.0
    trace: Path = SAMPLE


@dataclass
class PlayedTurns:
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    later_first_token_s: list[float] = field(default_factory=list)
    known_tokens: int = 0  # of later prompts: their KV was computed before
    recomputed_tokens: int = 0  # of those, in whole blocks: computed again
    recomputed_tails: int = 0  # of those, in a last block that was not full: vLLM keeps none of them


def conversations(shape: LoadShape) -> list[TraceConversation]:
    by = Scale(lengths=shape.lengths, waits=shape.times, wait_cap_s=shape.longest_wait_s)
    scaled = fit(scale(load(shape.trace).conversations, by), shape.context, shape.turns)
    return [c for c in scaled if len(c.turns) > 1][: shape.conversations]


def living_tokens(load: list[TraceConversation]) -> int:
    """What all of them hold in the end: none of them ends before the last has spoken."""
    return sum(c.peak_context_tokens for c in load)


async def play(
    engine: KvEngine, load: list[TraceConversation], shape: LoadShape, block_tokens: int
) -> PlayedTurns:
    result = PlayedTurns()

    async def live(number: int, conversation: TraceConversation) -> None:
        rng = random.Random(number)
        await asyncio.sleep(shape.arrivals_s * number / max(1, len(load)))
        context: list[int] = []
        for index, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.wait_s)
            kept = context[: turn.cached_tokens]
            prompt = kept + [rng.randrange(5, 250) for _ in range(turn.prompt_tokens - len(kept))]
            answer = await engine.ask(prompt, max(1, turn.output_tokens), conversation.id)
            result.outputs.setdefault(conversation.id, []).append(answer.tokens)
            if index:
                # An answer's last token is never computed, and a prompt's last token always is.
                known = min(len(kept), len(context) - 1, len(prompt) - 1)
                result.later_first_token_s.append(answer.first_token_s)
                result.known_tokens += known
                whole = known // block_tokens * block_tokens
                result.recomputed_tokens += max(0, whole - answer.cached_tokens)
                result.recomputed_tails += known - whole
            context = prompt + answer.tokens

    await asyncio.gather(*(live(number, conversation) for number, conversation in enumerate(load)))
    return result
