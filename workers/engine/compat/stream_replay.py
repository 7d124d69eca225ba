"""Patches of vLLM's front end: a generation can be observed, and can continue another engine's generation."""

import asyncio
import copy
import functools
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from kvtransfer.compat.relied_on import ReliedOn
from workers.engine.compat.grammar_advance import BEHIND

_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_OUTPUTS = "vllm.v1.engine.output_processor:OutputProcessor"

CONTINUING = ReliedOn(
    signatures={
        _LLM: {"_add_request": ("self", "request", "prompt", "parent_req", "index", "queue")},
        _OUTPUTS: {
            "add_request": ("self", "request", "prompt", "parent_req", "request_index", "queue"),
            "process_outputs": (
                "self",
                "engine_core_outputs",
                "engine_core_timestamp",
                "iteration_stats",
                "weight_version",
            ),
        },
        "vllm.v1.request:Request": {
            "from_engine_core_request": ("request", "block_hasher"),
            "append_output_token_ids": ("self", "token_ids"),
            "get_finished_reason": ("self",),
        },
        "vllm.v1.core.sched.utils": {"check_stop": ("request", "max_model_len")},
        "vllm.utils": {"random_uuid": ()},
        "vllm.v1.metrics.stats:IterationStats": {"__init__": ("self",)},
    },
    attributes={
        _LLM: ("output_processor", "engine_core", "model_config"),
        _OUTPUTS: ("request_states", "log_stats"),
        "vllm.v1.engine.output_processor:RequestState": ("is_prefilling",),
        "vllm.v1.engine:EngineCoreRequest": ("prompt_token_ids", "sampling_params", "request_id"),
    },
    # `generate` takes one output at a time from the queue, so that replayed outputs are not merged.
    uses={_LLM: {"generate": ("get_nowait", "add_request"), "_add_request": ("add_request_async",)}},
)

GENERATIONS = ReliedOn(
    signatures={
        _LLM: {
            "generate": (
                "self",
                "prompt",
                "sampling_params",
                "request_id",
                "prompt_text",
                "lora_request",
                "tokenization_kwargs",
                "trace_headers",
                "priority",
                "data_parallel_rank",
                "session_id",
                "kv_hints",
                "reasoning_ended",
                "reasoning_parser_kwargs",
            ),
        },
    },
    attributes={_LLM: ("model_config",)},
)

AT_A_TIME = 32  # replayed outputs after which other streams of the server get their turn


class GenerationObserver(Protocol):
    """Observer of one HTTP request's generation, which may continue the generation of another engine."""

    replay: "ReplayedOutputs | None"

    def follow(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]: ...

    def next_id(self) -> str:
        """Return the next id of the answer, which is the same on every engine that continues it."""


class ReplayedOutputs:
    """Outputs of a generation whose engine was lost, replayed on this engine.

    The outputs pass through vLLM's own output processing one by one, as on the lost engine, so that its
    detokenizer, parsers and usage get into the same state. Then this engine continues after their tokens.
    """

    def __init__(self, llm: Any, request: Any, outputs: Sequence[list[int]]) -> None:
        self._llm, self._request, self._outputs = llm, request, deque(outputs)
        self._tokens = [token for output in outputs for token in output]

    @property
    def left(self) -> int:
        return len(self._outputs)

    async def go_on(self) -> None:
        """Replay the next output; after the last output, let the engine compute."""
        if self._outputs:
            if len(self._outputs) % AT_A_TIME == 0:
                await asyncio.sleep(0)
            self._put(self._outputs.popleft())
        elif self._request is not None:
            request, self._request = self._request, None
            await self._llm.engine_core.add_request_async(behind(request, self._tokens))

    def _put(self, tokens: list[int]) -> None:
        from vllm.v1.core.sched.utils import check_stop
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.metrics.stats import IterationStats
        from vllm.v1.request import Request

        request_id = self._request.request_id
        output = EngineCoreOutput(request_id, list(tokens))
        if not self._outputs and self._tokens:
            whole = Request.from_engine_core_request(self._request, None)
            whole.append_output_token_ids(self._tokens)
            if check_stop(whole, self._llm.model_config.max_model_len):  # the generation had ended
                output.finish_reason, output.stop_reason = whole.get_finished_reason(), whole.stop_reason
        processor = self._llm.output_processor
        # The generation may end with the last output, and tracing then needs statistics; nothing else does.
        stats = IterationStats() if processor.log_stats and not self._outputs else None
        processor.process_outputs([output], time.monotonic(), stats)
        state = processor.request_states.get(request_id)
        if state is None:
            self._request = None
        else:
            state.is_prefilling = True  # statistics of the request begin with this engine's first output


def behind(request: Any, tokens: Sequence[int]) -> Any:
    """Return the request with `tokens`, which another engine generated, appended to its prompt."""
    longer, params = copy.copy(request), copy.copy(request.sampling_params)
    longer.prompt_token_ids = [*request.prompt_token_ids, *tokens]
    if params.max_tokens is not None:
        params.max_tokens = max(1, params.max_tokens - len(tokens))
    params.min_tokens = max(0, params.min_tokens - len(tokens))
    params.extra_args = {**(params.extra_args or {}), BEHIND: len(tokens)}
    longer.sampling_params = params
    return longer


def _taken(request: Any) -> list[list[int]] | None:
    """Remove another engine's outputs from a request's parameters; return them, or None if there are none."""
    params = request.sampling_params
    transfer = ((params.extra_args if params is not None else None) or {}).get("kv_transfer_params") or {}
    resume = transfer.pop("resume", None)
    return None if resume is None else [list(map(int, output)) for output in resume["outputs"]]


def around_generations(around: Callable[..., AsyncGenerator[Any, None]]) -> None:
    """Patch this process so that `around(generate, llm, prompt, ...)` is called instead of `generate`.

    Every API of the server calls `generate` with the prompt as tokens.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    generating = AsyncLLM.generate

    @functools.wraps(generating)
    def generate(self: AsyncLLM, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        return around(generating, self, *args, **options)

    AsyncLLM.generate = generate


def continue_generations(observer: Callable[[], GenerationObserver | None]) -> None:
    """Patch this process so that requests are observed and may continue another engine's generation.

    `observer` returns the observer of the HTTP request that is being served.
    """
    import vllm.utils
    from vllm.v1.engine.async_llm import AsyncLLM

    adding, random = AsyncLLM._add_request, vllm.utils.random_uuid
    if hasattr(adding, "__wrapped__"):
        return

    @functools.wraps(adding)
    async def _add_request(
        self: AsyncLLM, request: Any, prompt: str | None, parent_req: Any, index: int, queue: Any
    ) -> None:
        outputs = _taken(request)
        if not outputs:
            await adding(self, request, prompt, parent_req, index, queue)
            return
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        current = observer()
        if current is None:  # a prefill leg, whose answer nobody reads
            tokens = [token for output in outputs for token in output]
            await self.engine_core.add_request_async(behind(request, tokens))
            return
        current.replay = ReplayedOutputs(self, request, outputs)
        await current.replay.go_on()

    def followed(generating: Callable[..., Any], *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        outputs = generating(*args, **options)
        current = observer()
        return outputs if current is None else current.follow(outputs)

    @functools.wraps(random)
    def random_uuid() -> str:
        current = observer()
        return random() if current is None else current.next_id()

    AsyncLLM._add_request = _add_request
    around_generations(followed)
    for name, module in list(sys.modules.items()):
        names = vars(module) if name.startswith("vllm") else {}  # getattr would load a lazy module
        if names.get("random_uuid") is random:
            names["random_uuid"] = random_uuid
