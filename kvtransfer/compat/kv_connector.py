"""The connector's contact with vLLM below its public interface, checked in every engine before it serves.

Private names, patches and signatures of vLLM are here, in whole_graphs.py and, for co-serving and dropping
parameters, in vllm_internals.py of workers/engine/coserving and workers/engine/overload, and nowhere else
(tests/kvtransfer/test_vllm_internals.py reads the product's syntax trees). What any of them relies on is a
table; an engine on another vLLM stops with a sentence that says what changed, instead of misbehaving.
"""

import asyncio
import copy
import functools
import os
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Protocol

from kvtransfer.compat.relied_on import ReliedOn, differences
from kvtransfer.config import ConnectorConfigError

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = f"{_V1}.base:KVConnectorBase_V1"
_MULTI = f"{_V1}.multi_connector:MultiConnector"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_SPIN = "vllm.distributed.device_communicators.shm_broadcast:SpinCondition"

CONNECTOR = ReliedOn(
    signatures={
        _BASE: {
            "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
            "requires_piecewise_for_cudagraph": ("extra_config",),
            "get_required_kvcache_layout": ("vllm_config",),
            "build_kv_connector_stats": ("data",),
            "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
            "get_kv_connector_stats": ("self",),
            "bind_kv_cache_manager": ("self", "kv_cache_manager"),
            "on_new_request": ("self", "request"),
            "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
            "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
            "get_external_cache_hit_sources": ("self", "request", "num_external_tokens"),
            "build_connector_meta": ("self", "scheduler_output"),
            "update_connector_output": ("self", "connector_output"),
            "request_finished": ("self", "request", "block_ids"),
            "reset_cache": ("self",),
            "register_kv_caches": ("self", "kv_caches"),
            "handle_preemptions": ("self", "kv_connector_metadata"),
            "bind_connector_metadata": ("self", "connector_metadata"),
            "start_load_kv": ("self", "forward_context", "kwargs"),
            "wait_for_layer_load": ("self", "layer_name"),
            "save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "kwargs"),
            "wait_for_save": ("self",),
            "get_transfer_results": ("self", "finished_req_ids"),
            "get_finished": ("self", "finished_req_ids"),
            "get_block_ids_with_load_errors": ("self",),
            "build_connector_worker_meta": ("self",),
            "shutdown": ("self",),
        },
        f"{_V1}.base:SupportsHMA": {"request_finished_all_groups": ("self", "request", "block_ids")},
        f"{_V1}.base:KVConnectorWorkerMetadata": {"aggregate": ("self", "other")},
        _MULTI: {
            "request_finished": ("self", "request", "blocks"),
            "request_finished_all_groups": ("self", "request", "block_ids"),
            "reset_cache": ("self",),
        },
        f"{_V1}.metrics:KVConnectorStats": {
            "reset": ("self",), "aggregate": ("self", "other"), "reduce": ("self",), "is_empty": ("self",),
        },
        f"{_V1}.metrics:KVConnectorPromMetrics": {"observe": ("self", "transfer_stats_data", "engine_idx")},
        _POOL: {
            "touch": ("self", "blocks"),
            "free_blocks": ("self", "ordered_blocks"),
            "evict_blocks": ("self", "block_ids"),
            "get_cached_block": ("self", "block_hash", "kv_cache_group_ids"),
            "get_num_free_blocks": ("self",),
        },
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": {"iter_blocks_after": ("self", "cursor")},
        "vllm.v1.core.kv_cache_manager:KVCacheManager": {"get_block_ids": ("self", "request_id")},
        _SPIN: {"wait": ("self", "timeout_ms")},
    },
    attributes={
        _BASE: ("requires_kv_delivery",),
        _MULTI: ("sub_connectors",),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("block_pool",),
        _POOL: ("blocks", "free_block_queue", "hash_block_size", "num_gpu_blocks"),
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_id", "ref_cnt", "is_null", "block_hash"),
        "vllm.v1.request:Request": (
            "request_id", "priority", "status", "session_id", "kv_transfer_params", "block_hashes",
            "num_tokens", "num_prompt_tokens", "num_computed_tokens", "num_in_flight_tokens",
            "prompt_token_ids", "lora_request", "mm_features", "prefill_stats",
        ),
        "vllm.v1.metrics.stats:PrefillStats": ("num_cached_tokens", "num_local_cached_tokens"),
        "vllm.v1.request:RequestStatus": (
            "RUNNING", "PREEMPTED", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED",
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "preempted_req_ids",
        ),
        "vllm.v1.core.sched.output:NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
        "vllm.v1.core.sched.output:CachedRequestData": (
            "req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens",
        ),
        "vllm.v1.outputs:KVConnectorOutput": (
            "kv_connector_worker_meta", "finished_recving", "finished_sending", "invalid_block_ids",
        ),
        _SPIN: ("last_read", "busy_loop_s"),
    },
    uses={
        # Retention: a freed block with a hash joins the end of the queue that is taken last.
        _POOL: {"free_blocks": ("prepend_n", "append_n")},
        # Who calls the connector: what nobody calls any more would be left out without a word.
        _SCHEDULER: {
            "__init__": ("bind_kv_cache_manager", "requires_kv_delivery"),
            "add_request": ("on_new_request",),
            "schedule": (
                "get_num_new_matched_tokens", "update_state_after_alloc", "get_external_cache_hit_sources",
            ),
            "_build_kv_connector_meta": ("build_connector_meta",),
            "_update_from_kv_xfer_finished": ("update_connector_output",),
            "update_from_output": ("get_kv_connector_stats",),
            "_connector_finished": ("request_finished_all_groups",),
            "reset_connector_cache": ("reset_cache",),
            "shutdown": ("shutdown",),
        },
        _MULTI: {"request_finished_all_groups": ("request_finished",)},
        _BASE: {"get_transfer_results": ("get_finished",)},  # LMCache's connector has the latter
        "vllm.config.vllm:VllmConfig": {"__post_init__": ("requires_piecewise_for_cudagraph",)},
        "vllm.distributed.kv_transfer.kv_connector.utils": {
            "get_kv_connector_cache_layout": ("get_required_kvcache_layout",),
        },
        f"{_V1}.metrics:KVConnectorLogging": {"observe": ("build_kv_connector_stats",)},
        f"{_V1}.metrics:KVConnectorProm": {"__init__": ("build_prom_metrics",)},
        _SPIN: {"wait": ("last_read", "busy_loop_s")},
    },
)  # fmt: skip


WORKER = ReliedOn(
    signatures={}, attributes={},
    uses={
        # Orders are given out where vLLM tells of preemptions, once a step and before anything of it.
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {
            "execute_model": ("handle_preemptions",), "initialize_kv_cache": ("register_kv_caches",),
        },
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin": {
            "_get_kv_connector_output": (
                "start_load_kv", "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors",
                "get_kv_connector_stats", "build_connector_worker_meta", "bind_connector_metadata",
            ),
        },
        "vllm.model_executor.layers.attention.kv_transfer_utils": {
            "maybe_transfer_kv_layer": ("wait_for_layer_load", "save_kv_layer"),
        },
    },
)  # fmt: skip


_LMCACHE = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPWorkerAdapter"
LMCACHE = ReliedOn(signatures={}, attributes={_LMCACHE: ("_health_event",)})


def verify_lmcache() -> None:
    for difference in differences(LMCACHE):
        raise ConnectorConfigError(
            f"{difference} in this LMCache: pip install --no-deps -r requirements/lmcache.txt"
        )


def free_queue(pool: Any) -> Iterator[Any]:
    """The free blocks, those that are taken next first."""
    return iter(pool.free_block_queue.iter_blocks_after(None))


IN_USE_S = 1.0  # as long as vLLM spins; after that it sleeps until it is notified
SPIN_S = 2e-3  # the other side is about to answer, and a nap would take longer
SHARE = 0.03  # of the wait so far a nap lasts: what a message lies there is short beside what it took to come
LONGEST_S = 2e-3


def nap_instead_of_spinning() -> None:
    """In this process, from now on: also at queues that exist already.

    vLLM's engine core and workers watch shared memory for a second after every message before they sleep.
    On a GPU host with cores to spare that saves a wake-up; where the model computes on the CPU, the core it
    burns is taken from the model, from the copier and from every other engine of the machine.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    spinning = SpinCondition.wait
    if hasattr(spinning, "__wrapped__"):
        return

    @functools.wraps(spinning)
    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        waited = time.monotonic() - self.last_read
        if SPIN_S < waited < IN_USE_S:
            # Not vLLM's notification: one that comes before the last is acknowledged is lost.
            time.sleep(min(SHARE * waited, LONGEST_S))
        else:
            spinning(self, timeout_ms)

    SpinCondition.wait = wait


_CPU = "vllm.platforms.cpu:CpuPlatform"
STARTING = ReliedOn(signatures={_CPU: {"check_and_update_config": ("vllm_config",)}}, attributes={})


def fork_engine_on_cpu() -> None:
    """A patch of this process and those that it forks: vLLM's CPU platform has each of an engine's processes
    spawned, whatever the environment says, and an only worker has one, too. On GPUs that worker is in the
    engine core's, and so it is here: no step waits for messages of the two, and nobody watches for them."""
    from vllm.platforms.cpu import CpuPlatform

    updating = CpuPlatform.check_and_update_config

    @functools.wraps(updating)
    def check_and_update_config(vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        executor = parallel.distributed_executor_backend  # vLLM's own choice for one rank, or the user's
        updating(vllm_config)
        parallel.distributed_executor_backend = executor
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def lmcache_is_gone(adapter: Any) -> None:
    """LMCache's worker adapter goes on without its server, as after a heartbeat that missed it."""
    adapter._health_event.clear()


_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_OUTPUTS = "vllm.v1.engine.output_processor:OutputProcessor"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"

CONTINUING = ReliedOn(
    signatures={
        _LLM: {"_add_request": ("self", "request", "prompt", "parent_req", "index", "queue")},
        _OUTPUTS: {
            "add_request": ("self", "request", "prompt", "parent_req", "request_index", "queue"),
            "process_outputs": (
                "self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats", "weight_version",
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
    # One output at a time is taken from the queue: what is put there between two is not merged.
    uses={_LLM: {"generate": ("get_nowait", "add_request"), "_add_request": ("add_request_async",)}},
)  # fmt: skip

GRAMMARS = ReliedOn(
    signatures={
        _GRAMMARS: {
            "_create_grammar": ("self", "request"),
            "_get_constraint_bounds": ("self", "request", "spec_tokens", "spec_tokens_committed"),
            "_get_reasoner": ("self", "request"),
        },
        "vllm.reasoning.abs_reasoning_parsers:ReasoningParser": {
            "is_reasoning_end_streaming": ("self", "input_ids", "delta_ids"),
        },
    },
    attributes={
        _GRAMMARS: ("enable_in_reasoning",),
        "vllm.v1.structured_output.request:StructuredOutputRequest": ("reasoning_ended",),
    },
)

GENERATIONS = ReliedOn(
    signatures={
        _LLM: {
            "generate": (
                "self", "prompt", "sampling_params", "request_id", "prompt_text", "lora_request",
                "tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank", "session_id",
                "kv_hints", "reasoning_ended", "reasoning_parser_kwargs",
            ),
        },
    },
    attributes={_LLM: ("model_config",)},
)  # fmt: skip

BEHIND = "conserve_behind"  # in `extra_args`: so many tokens at a prompt's end another engine generated

AT_A_TIME = 32  # outputs that are put through in one go: an API server has other streams


class GenerationObserver(Protocol):
    """Of one HTTP request: sees its generation's outputs, and begins it behind those of another engine."""

    replay: "ReplayedOutputs | None"

    def follow(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]: ...

    def next_id(self) -> str:
        """Instead of a random one: the same in the same place, on every engine."""


class ReplayedOutputs:
    """Outputs of a generation that ended with its engine. They pass through vLLM's own output processing, in
    the pieces in which they came, so that detokenizer, parsers and usage stand where they stood; then the
    engine goes on behind their tokens."""

    def __init__(self, llm: Any, request: Any, outputs: Sequence[list[int]]) -> None:
        self._llm, self._request, self._outputs = llm, request, deque(outputs)
        self._tokens = [token for output in outputs for token in output]

    @property
    def left(self) -> int:
        return len(self._outputs)

    async def go_on(self) -> None:
        """The next output of before; after the last of them the engine computes."""
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
            if check_stop(whole, self._llm.model_config.max_model_len):  # only its last events are missing
                output.finish_reason, output.stop_reason = whole.get_finished_reason(), whole.stop_reason
        processor = self._llm.output_processor
        # With the last of them it may end, and with tracing that asks for statistics; these go nowhere else.
        stats = IterationStats() if processor.log_stats and not self._outputs else None
        processor.process_outputs([output], time.monotonic(), stats)
        state = processor.request_states.get(request_id)
        if state is None:
            self._request = None
        else:
            state.is_prefilling = True  # its statistics begin with the engine's first output


def behind(request: Any, tokens: Sequence[int]) -> Any:
    """The request with a prompt that ends in the tokens that were generated already."""
    longer, params = copy.copy(request), copy.copy(request.sampling_params)
    longer.prompt_token_ids = [*request.prompt_token_ids, *tokens]
    if params.max_tokens is not None:
        params.max_tokens = max(1, params.max_tokens - len(tokens))
    params.min_tokens = max(0, params.min_tokens - len(tokens))
    params.extra_args = {**(params.extra_args or {}), BEHIND: len(tokens)}
    longer.sampling_params = params
    return longer


def _taken(request: Any) -> list[list[int]] | None:
    """What is to be gone on from, which is nobody else's business."""
    params = request.sampling_params
    transfer = ((params.extra_args if params is not None else None) or {}).get("kv_transfer_params") or {}
    said = transfer.pop("resume", None)
    return None if said is None else [list(map(int, output)) for output in said["outputs"]]


def around_generations(around: Callable[..., AsyncGenerator[Any, None]]) -> None:
    """A patch of this process: `around(generate, llm, prompt, sampling_params, request_id, ...)` in the place
    of `generate`, to which every API of the server comes with its prompt as tokens."""
    from vllm.v1.engine.async_llm import AsyncLLM

    generating = AsyncLLM.generate

    @functools.wraps(generating)
    def generate(self: AsyncLLM, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        return around(generating, self, *args, **options)

    AsyncLLM.generate = generate


def continue_generations(observer: Callable[[], GenerationObserver | None]) -> None:
    """A patch of this process: requests are observed, and may begin behind what another engine generated.

    `observer`: of the HTTP request that is being served.
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
        if current is None:  # a prefiller's leg: its answer is of no interest
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
        names = vars(module) if name.startswith("vllm") else {}  # to ask a lazy module would be to load it
        if names.get("random_uuid") is random:
            names["random_uuid"] = random_uuid


def grammar_start(manager: Any, request: Any, reasoner: Any, tokens: list[int]) -> int:
    """`grammar_start` of `_get_constraint_bounds`, which tries every token: made for those of one step."""
    ended = manager.enable_in_reasoning or request.structured_output_request.reasoning_ended
    if ended or reasoner is None or hasattr(reasoner, "find_reasoning_end"):
        return int(manager._get_constraint_bounds(request, tokens, True).grammar_start)
    prompt = request.prompt_token_ids[: -len(tokens)]

    def ended_within(count: int) -> bool:
        first = tokens[:count]
        return bool(reasoner.is_reasoning_end_streaming([*prompt, *first], first))

    return bisect_left(range(1, len(tokens) + 1), True, key=ended_within) + 1


def advance_grammars() -> None:
    """A patch of this process: a grammar begins behind the tokens that another engine generated by it."""
    from vllm.v1.structured_output import StructuredOutputManager

    creating = StructuredOutputManager._create_grammar
    if hasattr(creating, "__wrapped__"):
        return

    @functools.wraps(creating)
    def _create_grammar(self: StructuredOutputManager, request: Any) -> Any:
        grammar = creating(self, request)
        count = (request.sampling_params.extra_args or {}).get(BEHIND, 0)
        if count:
            tokens = list(request.prompt_token_ids[-count:])
            asked = request.structured_output_request
            reasoner = self._get_reasoner(request)
            if asked.reasoning_ended is None and reasoner is not None:
                asked.reasoning_ended = reasoner.is_reasoning_end(request.prompt_token_ids[:-count])
            start = grammar_start(self, request, reasoner, tokens)
            if start <= count:
                asked.reasoning_ended = True
                if not grammar.accept_tokens(request.request_id, tokens[start:]):
                    raise ValueError("the tokens that were generated do not follow the grammar")
        return grammar

    StructuredOutputManager._create_grammar = _create_grammar
