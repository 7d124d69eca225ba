"""Runs plain or modified vLLM in this process, without HTTP and without a fleet."""

import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY

from benchmarks.harness.fleet import ROOT


@dataclass
class EngineAnswer:
    """Tokens of an answer, each with its time since the request."""

    tokens: list[int]
    first_token_s: float
    arrivals: list[float]
    cached_tokens: int  # prompt tokens whose KV was on the accelerator already, or restored


@dataclass
class VllmEngine:
    """Running engine to which prompts are sent as token ids."""

    llm: Any  # vLLM's AsyncLLM
    asked: int = 0

    async def ask(
        self,
        prompt: list[int],
        output: int,
        session: str | None = None,
        priority: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> EngineAnswer:
        """Return the greedy answer to a prompt; `extra` are the sampling parameters' `extra_args`."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self.asked += 1
        sampling = SamplingParams(
            max_tokens=output,
            temperature=0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=dict(extra) if extra else None,
        )
        began, answer = time.monotonic(), EngineAnswer([], 0.0, [], 0)
        async for delta in self.llm.generate(
            TokensPrompt(prompt_token_ids=prompt),
            sampling,
            f"r{self.asked}",
            session_id=session,
            priority=priority,
        ):
            new = delta.outputs[0].token_ids
            answer.cached_tokens = delta.num_cached_tokens or 0
            answer.tokens.extend(new)
            answer.arrivals.extend([time.monotonic() - began] * len(new))
        answer.first_token_s = answer.arrivals[0]
        return answer


@asynccontextmanager
async def vllm_engine(
    arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> AsyncIterator[VllmEngine]:
    """Run an engine with these vLLM arguments; `environment` is added to this process's own."""
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as the fleet's engines
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        **environment,
    }
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    forget_connector_counters()
    usual = {"enable_prefix_caching": True, "scheduling_policy": "priority"}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**usual, **arguments}))
    try:
        engine = VllmEngine(llm)
        await engine.ask([5, 6, 7], 2)
        yield engine
    finally:
        llm.shutdown()


def forget_connector_counters() -> None:
    """Unregister the connector counters of a previous engine, as vLLM does with its own metrics.

    Otherwise a second engine in the same process fails to register them.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("conserve_"):
            REGISTRY.unregister(collector)


def counter(name: str, **labels: str) -> float:
    """Return the value of a Prometheus counter of this process, summed over the labels not given."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
