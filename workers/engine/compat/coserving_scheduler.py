"""Access of our schedulers to private names of vLLM, which are checked when an engine starts.

So an engine with another vLLM release refuses to start instead of misbehaving
(kvtransfer/compat/relied_on.py).
"""

import logging
import time
from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

from kvtransfer.compat.relied_on import ReliedOn
from workers.engine.compat.policy_queue import PolicyQueue
from workers.engine.coserving.iterations import ScheduledRequest
from workers.processes import WorkerError

logger = logging.getLogger("conserve.workers.coserving")

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_QUEUE = "vllm.v1.core.sched.request_queue:PriorityRequestQueue"

SCHEDULING = ReliedOn(
    signatures={
        _SCHEDULER: {
            "schedule": ("self", "throttle_prefills"),
            "update_from_output": ("self", "scheduler_output", "model_runner_output"),
            "finish_requests": ("self", "request_ids", "finished_status"),
            "add_request": ("self", "request"),
            "shutdown": ("self",),
            "_reserve_prefill_lookahead": ("self", "request", "num_computed_tokens", "num_new_tokens"),
            "_preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
            "_update_after_schedule": ("self", "scheduler_output"),
        },
        _QUEUE: {"peek_request": ("self",), "pop_request": ("self",), "remove_request": ("self", "request")},
        "vllm.v1.core.kv_cache_manager:KVCacheManager": {"evict_blocks": ("self", "block_ids")},
        "vllm.v1.core.block_pool:BlockPool": {
            "get_cached_block": ("self", "block_hash", "kv_cache_group_ids"),
            "get_num_free_blocks": ("self",),
        },
        "vllm.v1.engine.core:EngineCore": {
            "preprocess_add_request": ("self", "request"),
            "step_with_batch_queue": ("self",),
        },
    },
    attributes={
        _SCHEDULER: (
            "running",
            "waiting",
            "requests",
            "connector",
            "kv_cache_manager",
            "kv_holding_waiting",
            "_inflight_prefills",
            "block_size",
            "hash_block_size",
            "use_v2_model_runner",
            "pause_state",
            "max_num_active_reqs",
            "max_num_scheduled_tokens",
            "vllm_config",
            "failed_recving_kv_req_ids",
            "finished_req_ids",
            "deferred_frees",
            "prev_step_scheduled_req_ids",
            "requires_kv_delivery",
        ),
        _QUEUE: ("_heap",),
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": (
            "req_to_blocks",
            "num_cached_block",
            "block_size",
        ),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("coordinator", "block_pool"),
        "vllm.v1.request:Request": (
            "arrival_time",
            "is_prefill_chunk",
            "num_output_tokens",
            "num_output_placeholders",
            "sampling_params",
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": ("has_sync_kv_loads",),
    },
    uses={
        # Which blocks behind a window are freed depends on the tokens computed before the iteration, and an
        # abort does not change these.
        "vllm.v1.core.kv_cache_manager:KVCacheManager": {
            "allocate_slots": ("remove_skipped_blocks", "num_in_flight_tokens"),
        },
        # vLLM asks about every candidate (`tokens_for`), and takes each from the queue.
        _SCHEDULER: {
            "_update_waiting_for_remote_kv": ("failed_recving_kv_req_ids",),
            "schedule": ("_reserve_prefill_lookahead", "peek_request", "pop_request", "kv_holding_waiting"),
            "_update_after_schedule": ("num_computed_tokens",),
            "has_requests": ("has_unfinished_requests",),
        },
        # If there are no requests to schedule, the engine core waits for the iteration in flight.
        "vllm.v1.engine.core:EngineCore": {
            "step_with_batch_queue": ("has_requests", "batch_queue", "pop", "update_from_output"),
        },
        _ASYNC: {
            "_update_after_schedule": ("num_output_placeholders",),
            "_update_request_with_output": ("num_output_placeholders",),
        },
        # `preprocess_add_request` runs in the thread that receives requests, beside the model.
        "vllm.v1.engine.core:EngineCoreProc": {"process_input_sockets": ("preprocess_add_request",)},
    },
)


class UnsupportedEngineError(WorkerError, RuntimeError):
    """The engine has settings with which a policy cannot schedule it. The message names them."""


class OpenScheduling:
    """Mixin that adds hooks for a policy to a scheduler of vLLM. By default the hooks change nothing."""

    running: list[Any]
    waiting: PolicyQueue
    requests: dict[str, Any]
    vllm_config: Any
    kv_cache_manager: Any
    connector: Any
    block_size: int
    hash_block_size: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    pause_state: Any
    kv_holding_waiting: Any
    prev_step_scheduled_req_ids: set[str]
    deferred_frees: deque[tuple[int, list[Any]]]
    requires_kv_delivery: bool
    failed_recving_kv_req_ids: set[str]
    finished_req_ids: set[str]  # requests that ended since the last iteration was scheduled

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.managers = tuple(self.kv_cache_manager.coordinator.single_type_managers)
        self._refuse_unsupported()
        self.waiting = PolicyQueue()

    def unsupported(self) -> dict[str, bool]:
        """Return, for each setting that does not work with a policy, whether the engine has it."""
        return {
            "first-come scheduling (start with --scheduling-policy priority)": not isinstance(
                self.waiting, PriorityRequestQueue
            ),
        }

    def _refuse_unsupported(self) -> None:
        named = [what for what, present in self.unsupported().items() if present]
        if named:
            raise UnsupportedEngineError(f"this scheduler does not work with {'; '.join(named)}")

    def tokens_for(self, request: Request, computed: int, tokens: int) -> int:
        """Return how many tokens a running or waiting request gets; `tokens` is the most that vLLM allows."""
        return tokens

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        tokens = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        return self.tokens_for(request, num_computed_tokens, int(tokens))

    def ask_policy(self, asks: bool) -> None:
        """Let vLLM call `tokens_for` for every request in the next iteration if `asks`, or else for none."""
        if asks:
            self.__dict__.pop("_reserve_prefill_lookahead", None)
        else:  # the calls for all requests would take a tenth of an iteration's time
            self.__dict__["_reserve_prefill_lookahead"] = super()._reserve_prefill_lookahead  # type: ignore[misc]

    def preempt(self, request: Request, now: float) -> None:
        """Preempt a request: it loses all blocks and its slot in the batch, and vLLM resumes it later."""
        raise NotImplementedError("vLLM's own rules preempt here")

    def recorded(
        self, request: Request, tokens: int, adopted: tuple[int, ...], admitted: bool
    ) -> ScheduledRequest:
        """Return the record of a request that was given `tokens`, which `num_computed_tokens` now includes.

        `adopted` are the numbers of cached blocks, by KV cache group, with which an `admitted` request began.
        """
        raise NotImplementedError("an iteration that cannot be aborted is not recorded")

    def plugin(self, name: str) -> Any | None:
        """Return the scheduler side of the connector plugin with this name, or None if it is not loaded."""
        side_of = getattr(self.connector, "scheduler_side", None)
        return side_of(name) if side_of is not None else None

    def blocks_held(self, request: Request) -> int:
        """Return how many blocks a request holds, not counting null blocks outside its window."""
        held = 0
        for manager in self.managers:
            blocks = manager.req_to_blocks.get(request.request_id)
            if blocks:
                held += len(blocks) - (_nulls(blocks) if blocks[0].is_null else 0)
        return held

    def cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a request that has not started are in the prefix cache.

        The thread that receives requests calls this too, while the scheduler works. This is safe, because it
        only looks up a dict, and an outdated answer costs speed but not correctness.
        """
        pool = self.kv_cache_manager.block_pool
        full = (n for n, manager in enumerate(self.managers) if isinstance(manager, FullAttentionManager))
        groups = [next(full, 0)]  # groups with a window may lack the prompt's beginning
        hits = 0
        for block_hash in request.block_hashes:
            if pool.get_cached_block(block_hash, groups) is None:
                break
            hits += 1
        return min(hits * int(self.hash_block_size), int(request.num_tokens) - 1)

    def deferred_blocks(self) -> list[int]:
        """Return the freed blocks to which an iteration in flight may still write."""
        return [block.block_id for _, blocks in list(self.deferred_frees) for block in blocks]

    def full_blocks(self, tokens: int) -> tuple[int, ...]:
        """Return how many full blocks `tokens` tokens make in each KV cache group."""
        return tuple(tokens // manager.block_size for manager in self.managers)

    def scheduled_requests(self, scheduler_output: Any) -> Iterator[tuple[Request, int]]:
        """Yield the requests of an iteration that still exist, each with its number of scheduled tokens."""
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is not None:
                yield request, tokens

    def let_holders_go_first(self) -> None:
        """Move requests that lost their blocks in a failed load behind the requests that still hold blocks.

        vLLM leaves them in front. If the first of them does not fit, vLLM schedules none behind it, and the
        requests behind it keep the blocks that it waits for.
        """
        for request in list(self.kv_holding_waiting) if self.kv_holding_waiting else ():
            if is_waiting(request) and not self.blocks_held(request):
                self.kv_holding_waiting.remove_request(request)
                self.waiting.add_request(request)

    def waits_or_prefills(self) -> bool:
        """Return whether any request waits, or has prompt tokens left to compute."""
        waits = bool(self.waiting) or bool(self.kv_holding_waiting)
        return waits or any(map(attrgetter("is_prefill_chunk"), self.running))


class SyncScheduler(OpenScheduling, Scheduler):
    """vLLM's synchronous scheduler with the hooks of `OpenScheduling`."""


class OverlappingScheduler(OpenScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler, which works one iteration ahead, with the hooks of `OpenScheduling`."""


class OpenScheduler(OverlappingScheduler):
    """Scheduler of a co-serving engine, with access to the records that a roll-back restores."""

    _only_result = False

    @property
    def armed_step_runs(self) -> bool:
        """Return whether an armed iteration is running; then no other iteration is in flight."""
        return False

    def waits_for_result(self) -> bool:
        """Return whether the next iteration may be scheduled only after the one in flight has its result."""
        return False

    @contextmanager
    def only_result(self) -> Iterator[None]:
        """Return a context in which the engine core takes results but schedules no iteration."""
        self._only_result = True
        try:
            yield
        finally:
            self._only_result = False

    def has_requests(self) -> bool:
        return not self._only_result and bool(super().has_requests())

    def unsupported(self) -> dict[str, bool]:
        """Return the unsupported settings, with those that make it impossible to roll an iteration back."""
        config = self.vllm_config
        return {
            **super().unsupported(),
            "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
            "speculative decoding": config.speculative_config is not None,
            "the V2 model runner (set VLLM_USE_V2_MODEL_RUNNER=0)": self.use_v2_model_runner,
            "models whose layers have other than full or sliding attention": not all(
                isinstance(manager, FullAttentionManager | SlidingWindowManager) for manager in self.managers
            ),
        }

    def before_preemption(self, request: Request) -> None:
        """Hook that is called before a policy or vLLM takes the blocks of a request."""

    def preempt(self, request: Request, now: float) -> None:
        self.running.remove(request)
        self._preempt_request(request, now, self.requires_kv_delivery)  # as vLLM's own preemption
        # The iteration that is being planned may resume the request. The worker then needs its tokens, which
        # vLLM leaves out if the request was in the previous iteration.
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.before_preemption(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def recorded(
        self, request: Request, tokens: int, adopted: tuple[int, ...], admitted: bool
    ) -> ScheduledRequest:
        start = request.num_computed_tokens - tokens
        before = self.full_blocks(start)
        written = tuple(
            tuple(block.block_id for block in manager.req_to_blocks[request.request_id][first:])
            for manager, first in zip(self.managers, before, strict=True)
        )
        return ScheduledRequest(request, start, written, tuple(map(max, before, adopted)), admitted)

    def hashed(self, block_ids: set[int]) -> set[int]:
        """Return the blocks of `block_ids` that are registered in the prefix cache."""
        blocks = self.kv_cache_manager.block_pool.blocks
        return {block for block in block_ids if blocks[block].block_hash is not None}

    def limit_registered(self, request: Request, blocks_by_group: tuple[int, ...]) -> None:
        for manager, limit in zip(self.managers, blocks_by_group, strict=True):
            registered = manager.num_cached_block
            if request.request_id in registered:
                registered[request.request_id] = min(registered[request.request_id], limit)

    def first_block_in(self, request: Request, block_ids: set[int], before: int | None) -> int | None:
        firsts = [
            index
            for manager in self.managers
            for index, block in enumerate(manager.req_to_blocks.get(request.request_id, ())[:before])
            if block.block_id in block_ids
        ]
        return min(firsts, default=None)

    def compute_again_from(self, request: Request, tokens: int) -> None:
        """Make a request compute from `tokens` on, because KV that it was admitted with was never computed.

        The request starts anew if the model has layers with a window, or if `tokens` is 0 and the request
        waits. A running request is then preempted. A waiting request is marked as if its load had failed, so
        that vLLM frees its blocks when the load ends. Otherwise vLLM would give it blocks a second time, and
        the engine would end.
        """
        full = all(isinstance(manager, FullAttentionManager) for manager in self.managers)
        if full and (tokens or is_running(request)):
            request.num_computed_tokens = min(request.num_computed_tokens, tokens)
        elif is_running(request):
            self.preempt(request, time.monotonic())
        else:
            request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids.add(request.request_id)

    def waiting_holders(self) -> list[Request]:
        """Return the waiting requests that hold blocks, for KV that is being loaded or was loaded."""
        return list(self.kv_holding_waiting)

    def mark_prefilling(self, request: Request, prefilling: bool) -> None:
        request.is_prefill_chunk = prefilling
        if prefilling:
            self._inflight_prefills.add(request)
        else:
            self._inflight_prefills.discard(request)


def _nulls(blocks: Sequence[Any]) -> int:
    """Return how many null blocks are at the beginning of a request's list of blocks."""
    return bisect(blocks, False, key=lambda block: not block.is_null)


def is_running(request: Request) -> bool:
    return bool(request.status == RequestStatus.RUNNING)


def has_prompt_left(request: Request) -> bool:
    """Return whether the request has prompt tokens that no scheduled iteration computes."""
    return bool(request.is_prefill_chunk)


def is_waiting(request: Request) -> bool:
    """Return whether a request only waits to be given tokens, and not for KV or a grammar."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def extra_args(request: Request) -> dict[str, Any]:
    """Return the arguments that the client sent as `vllm_xargs`."""
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}
