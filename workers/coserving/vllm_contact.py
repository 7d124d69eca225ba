"""All contact with vLLM's internals, written for one release and checked at start.

The connector (kvtransfer/) uses a public interface; what is here is not one. `verify` compares the signatures
relied on with those installed, so that another vLLM refuses to start with a sentence instead of misbehaving.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from workers.coserving.rollback import ScheduledRow

WRITTEN_FOR = "0.32"

_SIGNATURES: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (Scheduler, "schedule", ("self", "throttle_prefills")),
    (Scheduler, "update_from_output", ("self", "scheduler_output", "model_runner_output")),
    (Scheduler, "finish_requests", ("self", "request_ids", "finished_status")),
    (Scheduler, "add_request", ("self", "request")),
    (
        Scheduler,
        "_reserve_prefill_lookahead",
        ("self", "request", "num_computed_tokens", "num_new_tokens"),
    ),
    (Scheduler, "_preempt_request", ("self", "request", "timestamp", "drop_stale_output")),
    (Scheduler, "_update_after_schedule", ("self", "scheduler_output")),
    (KVCacheManager, "evict_blocks", ("self", "block_ids")),
    (BlockPool, "get_cached_block", ("self", "block_hash", "kv_cache_group_ids")),
    (PriorityRequestQueue, "peek_request", ("self",)),
    (EngineCore, "preprocess_add_request", ("self", "request")),
    (GPUModelRunner, "sample_tokens", ("self", "grammar_output")),
    (GPUModelRunner, "execute_model", ("self", "scheduler_output", "intermediate_tensors")),
    (
        GPUModelRunner,
        "_model_forward",
        ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
    ),
    (Worker, "execute_model", ("self", "scheduler_output")),
    (Worker, "sample_tokens", ("self", "grammar_output")),
)


class UnsupportedEngineError(RuntimeError):
    """This engine cannot co-serve; the message says what stands in the way and what to do."""


def verify(release: str = vllm.__version__) -> None:
    """Refuses a vLLM whose internals are not those this file was written for."""
    if not release.startswith(WRITTEN_FOR + "."):
        raise UnsupportedEngineError(
            f"co-serving was written for vLLM {WRITTEN_FOR} and this is {release}: "
            f"install vllm=={WRITTEN_FOR}.0, or start the engine without the co-serving scheduler"
        )
    for owner, name, wanted in _SIGNATURES:
        method = getattr(owner, name, None)
        found = tuple(inspect.signature(method).parameters) if method is not None else None
        if found != wanted:
            raise UnsupportedEngineError(
                f"co-serving relies on {owner.__name__}.{name}{wanted}, but this vLLM ({release}) "
                f"has {found}: install vllm=={WRITTEN_FOR}.0, or start without the co-serving scheduler"
            )


def refuse_unsupported(scheduler: Scheduler) -> None:
    """Refuses settings under which an abort could not be undone, or the plan not be kept."""
    config = scheduler.vllm_config
    asynchronous = config.scheduler_config.async_scheduling
    wrong = {
        "asynchronous scheduling (start with --no-async-scheduling)": asynchronous,
        "first-come scheduling (start with --scheduling-policy priority)": not isinstance(
            scheduler.waiting, PriorityRequestQueue
        ),
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "the V2 model runner (set VLLM_USE_V2_MODEL_RUNNER=0)": scheduler.use_v2_model_runner,
        "models with other than full attention": not all(
            isinstance(manager, FullAttentionManager) for manager in _managers(scheduler)
        ),
    }
    named = [what for what, present in wrong.items() if present]
    if named:
        raise UnsupportedEngineError(f"co-serving does not work with {'; '.join(named)}")


def _managers(scheduler: Scheduler) -> tuple[Any, ...]:
    return tuple(scheduler.kv_cache_manager.coordinator.single_type_managers)


def block_tokens(scheduler: Scheduler) -> int:
    return int(scheduler.block_size)


def free_blocks(scheduler: Scheduler) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def total_blocks(scheduler: Scheduler) -> int:
    return int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks)


def blocks_held(scheduler: Scheduler, request: Request) -> int:
    return sum(len(manager.req_to_blocks.get(request.request_id, ())) for manager in _managers(scheduler))


def cached_tokens(scheduler: Scheduler, request: Request) -> int:
    """Tokens of a request that has not started which the prefix cache holds now.

    Also called from the thread that receives requests, while the scheduler works: it only looks up a dict,
    and an answer that is out of date costs speed, not correctness.
    """
    pool = scheduler.kv_cache_manager.block_pool
    hits = 0
    for block_hash in request.block_hashes:
        if pool.get_cached_block(block_hash, [0]) is None:
            break
        hits += 1
    return min(hits * int(scheduler.hash_block_size), int(request.num_tokens) - 1)


def saved_blocks_of(scheduler: Scheduler) -> Callable[[Request], int]:
    """How many blocks of a request the host holds too, as the connector's checkpoint knows."""
    half = getattr(scheduler.connector, "scheduler_half", lambda part: None)("checkpoint")
    if half is None:
        return lambda request: 0
    return lambda request: int(half.saved_blocks(request.request_id))


def let_offline_start(scheduler: Scheduler, may_start: bool) -> None:
    """Whether offline requests may take blocks for KV from the host: vLLM does not ask before a load."""
    half = getattr(scheduler.connector, "scheduler_half", lambda part: None)("checkpoint")
    if half is not None:
        half.offline_may_start = may_start


def is_running(request: Request) -> bool:
    return bool(request.status == RequestStatus.RUNNING)


def is_waiting(request: Request) -> bool:
    """Waiting for tokens of an iteration, and not for something that only comes between iterations."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def preempt(scheduler: Scheduler, request: Request, now: float) -> None:
    """Takes all blocks and the place in the batch; the request waits and resumes by itself."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, now, drop_stale_output=True)


def full_blocks(scheduler: Scheduler, tokens: int) -> tuple[int, ...]:
    """Blocks that this many tokens fill, by KV cache group."""
    return tuple(tokens // manager.block_size for manager in _managers(scheduler))


def scheduled_row(
    scheduler: Scheduler, request: Request, tokens: int, adopted: tuple[int, ...], admitted: bool
) -> ScheduledRow:
    """To be noted right after scheduling, when `num_computed_tokens` already counts the new tokens."""
    start = request.num_computed_tokens - tokens
    before = full_blocks(scheduler, start)
    written = tuple(
        tuple(block.block_id for block in manager.req_to_blocks[request.request_id][first:])
        for manager, first in zip(_managers(scheduler), before, strict=True)
    )
    return ScheduledRow(request, tokens, start, written, tuple(map(max, before, adopted)), admitted)


class Books:
    """vLLM's scheduler as the roll-back sees it (rollback.Bookkeeping)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def block_tokens(self) -> int:
        return block_tokens(self._scheduler)

    def is_running(self, request: Request) -> bool:
        return is_running(request)

    def hashed(self, block_ids: set[int]) -> set[int]:
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        return {block for block in block_ids if blocks[block].block_hash is not None}

    def evict(self, block_ids: set[int]) -> None:
        self._scheduler.kv_cache_manager.evict_blocks(block_ids)

    def limit_registered(self, request: Request, blocks_by_group: tuple[int, ...]) -> None:
        for manager, limit in zip(_managers(self._scheduler), blocks_by_group, strict=True):
            registered = manager.num_cached_block
            if request.request_id in registered:
                registered[request.request_id] = min(registered[request.request_id], limit)

    def first_block_in(self, request: Request, block_ids: set[int], before: int | None) -> int | None:
        firsts = [
            index
            for manager in _managers(self._scheduler)
            for index, block in enumerate(manager.req_to_blocks.get(request.request_id, ())[:before])
            if block.block_id in block_ids
        ]
        return min(firsts, default=None)

    def waiting_holders(self) -> list[Request]:
        return list(self._scheduler.kv_holding_waiting)

    def mark_prefilling(self, request: Request, prefilling: bool) -> None:
        request.is_prefill_chunk = prefilling
        if prefilling:
            self._scheduler._inflight_prefills.add(request)
        else:
            self._scheduler._inflight_prefills.discard(request)


Forward = Callable[..., Any]


def wrap_forward(runner: GPUModelRunner, wrapper: Callable[[Forward], Forward]) -> None:
    """Puts `wrapper` around the runner's forward pass, outside of wrappers that are there already.

    This is inside the connector's step: a forward pass that ends early still gets the step's reports out.
    """
    runner._model_forward = wrapper(runner._model_forward)


def empty_hidden_states(runner: GPUModelRunner, positions: Any) -> Any:
    """Stands in for the result of a forward pass that ended early; nothing is sampled from it."""
    import torch

    config = runner.model_config
    return torch.zeros(
        positions.shape[-1], config.get_hidden_size(), dtype=config.dtype, device=positions.device
    )


def nothing_sampled(runner: GPUModelRunner, scheduler_output: Any) -> ModelRunnerOutput:
    """The output of an iteration that ended early: no row has a token.

    The runner's sampling is skipped as a whole: it would advance random generators, and take the prompt
    logprobs of rows that have to be computed again.
    """
    runner.execute_model_state = None
    connector_output, runner.kv_connector_output = runner.kv_connector_output, None
    rows = list(scheduler_output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=rows,
        req_id_to_index={row: index for index, row in enumerate(rows)},
        kv_connector_output=connector_output,
    )


@contextmanager
def discarded_rows_unseeded(runner: GPUModelRunner) -> Iterator[None]:
    """Around sampling in the CPU build, which dies of rows that have a seed and get no token in this step.

    vLLM winds their generators back by an offset, which generators on the CPU do not have. Without a
    generator such a row is sampled like any other, and its own generator stays where it was.
    """
    generators = runner.input_batch.generators
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    put_aside = {int(row): generators.pop(int(row)) for row in discarded if int(row) in generators}
    try:
        yield
    finally:
        generators.update(put_aside)


def armed_epoch(scheduler_output: Any, part: str) -> int:
    """The epoch of a step that may be aborted; 0 if it may not."""
    orders = getattr(scheduler_output.kv_connector_metadata, "orders", {})
    order = orders.get(part)
    return int(order.epoch) if order is not None else 0


def extra_args(request: Request) -> dict[str, Any]:
    """What the client sent as `vllm_xargs`."""
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}


def iterate_scheduled(scheduler: Scheduler, scheduler_output: Any) -> Iterator[tuple[Request, int]]:
    """Rows of a step that still exist, with their tokens."""
    for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
        request = scheduler.requests.get(request_id)
        if request is not None:
            yield request, tokens
