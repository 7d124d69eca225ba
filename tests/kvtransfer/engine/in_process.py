"""vLLM engines in the test's own process, for tests of many models; each starts in a second.

On the worker's side, vLLM has one connector in a process. Here each engine has its own, which is put in place
while the engine starts, steps or ends. The same is true of environment variables, so that engines which other
tests start as processes do not inherit them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from kvtransfer.connector import ConServeConnector
from tests.support import engine_device
from workers.engine.coserving.config import (
    PROMPT_SCHEDULER,
    SAFEPOINT_PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    SECRET_VARIABLE: "a secret only for these tests",
}
LIMIT_STEPS = 200_000


def forget_the_model() -> None:
    """Discard vLLM's global state of a model, because the next model may have other parallel groups."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


class EngineHere:
    """One engine in this process; `connector=None` is plain vLLM."""

    def __init__(
        self, model: Path, connector: ConnectorConfig | None = None, blocks: int = 200, **arguments: Any
    ) -> None:
        if connector is not None:
            arguments["kv_transfer_config"] = connector.to_kv_transfer_config()
            if SAFEPOINT_PLUGIN in connector.plugins:
                arguments.setdefault("scheduler_cls", SCHEDULER_CLASS)
                arguments.setdefault("worker_cls", WORKER_CLASS)
                arguments["additional_config"] = CoServingConfig().to_additional_config()
            else:
                arguments.setdefault("scheduler_cls", PROMPT_SCHEDULER)
        self._agent: Any = None
        with self._in_place():
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            self.engine = LLMEngine.from_engine_args(
                EngineArgs(
                    **{
                        "model": str(model),
                        "dtype": "float32",
                        "max_model_len": 2048,
                        "enforce_eager": True,
                        "max_num_batched_tokens": 256,
                        "max_num_seqs": 8,
                        "num_gpu_blocks_override": blocks,
                        "block_size": 32,
                        "async_scheduling": False,
                        "scheduling_policy": "priority",
                        "enable_prefix_caching": True,
                        "disable_log_stats": True,
                        **engine_device.options(),
                        **arguments,
                    }
                )
            )
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.computed = 0  # computed tokens of prompts and answers, without prefix hits and loads
        schedule = self.scheduler.schedule

        def counted(*given: Any) -> Any:
            planned = schedule(*given)
            self.computed += planned.total_num_scheduled_tokens
            return planned

        self.scheduler.schedule = counted
        self._asked = 0
        self.answers: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with mock.patch.dict(os.environ, engine_device.environment() | ENVIRONMENT):
            from vllm.distributed.kv_transfer import kv_transfer_state

            kv_transfer_state._KV_CONNECTOR_AGENT = self._agent
            try:
                yield
            finally:
                self._agent = kv_transfer_state._KV_CONNECTOR_AGENT
                kv_transfer_state._KV_CONNECTOR_AGENT = None

    @property
    def connector(self) -> ConServeConnector:
        found = self.scheduler.connector
        return found if isinstance(found, ConServeConnector) else found.ours

    def side(self, plugin: str) -> Any:
        return self.connector.scheduler_side(plugin)

    def worker_side(self, plugin: str) -> Any:
        return self._agent.worker_side(plugin)

    def add(
        self,
        prompt: list[int],
        output: int,
        session: str | None = None,
        params: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=output, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        if params:
            sampling.extra_args = {"kv_transfer_params": params}
        self._asked += 1
        request_id = f"r{self._asked}"
        self.engine.add_request(
            request_id, {"prompt_token_ids": prompt}, sampling, priority=priority, session_id=session
        )
        return request_id

    def step(self) -> None:
        with self._in_place():
            for output in self.engine.step():
                if output.finished:
                    self.answers[output.request_id] = list(output.outputs[0].token_ids)
                    self.params[output.request_id] = output.kv_transfer_params

    def run(self) -> None:
        """Step until no request and no plugin has anything left to do."""
        for _ in range(LIMIT_STEPS):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"still busy after {LIMIT_STEPS} steps: {list(self.scheduler.requests)}")

    def ask(self, prompt: list[int], output: int, session: str | None = None, **more: Any) -> list[int]:
        request_id = self.add(prompt, output, session, **more)
        self.run()
        return self.answers[request_id]

    def behind(self, prompt: list[int], answer: list[int]) -> float:
        """Return by how much log-probability a token of `answer` is behind the likeliest there, at most."""
        from vllm import SamplingParams

        self._asked += 1
        request_id, worst = f"r{self._asked}", 0.0
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        self.engine.add_request(request_id, {"prompt_token_ids": prompt + answer}, sampling)
        while self.engine.has_unfinished_requests():
            with self._in_place():
                outputs = self.engine.step()
            for output in outputs:
                for token, ranked in zip(answer, output.prompt_logprobs[-len(answer) :], strict=True):
                    likeliest = max(one.logprob for one in ranked.values())
                    worst = max(worst, likeliest - ranked[token].logprob)
        return worst

    def faults(self) -> list[str]:
        return list(self.side("report").faults())

    def close(self) -> None:
        with self._in_place():
            if self._agent is not None:
                self._agent.shutdown()
            self._agent = None
