"""vLLM's private names that our schedulers use; checked when an engine starts.

An engine with another vLLM release refuses to start instead of misbehaving (kvtransfer/compat/relied_on.py).
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
        # Blocks that a window has left are freed by what was computed before a step, which an abort keeps.
        "vllm.v1.core.kv_cache_manager:KVCacheManager": {
            "allocate_slots": ("remove_skipped_blocks", "num_in_flight_tokens"),
        },
        # The policy decides on every candidate, and the queue is asked before each.
        _SCHEDULER: {
            "_update_waiting_for_remote_kv": ("failed_recving_kv_req_ids",),
            "schedule": ("_reserve_prefill_lookahead", "peek_request", "pop_request", "kv_holding_waiting"),
            "_update_after_schedule": ("num_computed_tokens",),
            "has_requests": ("has_unfinished_requests",),
        },
        # Without requests to schedule it waits for the step in flight.
        "vllm.v1.engine.core:EngineCore": {
            "step_with_batch_queue": ("has_requests", "batch_queue", "pop", "update_from_output"),
        },
        _ASYNC: {
            "_update_after_schedule": ("num_output_placeholders",),
            "_update_request_with_output": ("num_output_placeholders",),
        },
        # It runs in the thread that receives requests, beside the model.
        "vllm.v1.engine.core:EngineCoreProc": {"process_input_sockets": ("preprocess_add_request",)},
    },
)


class UnsupportedEngineError(WorkerError, RuntimeError):
    """This engine cannot be scheduled by a policy; the message says why and what to do."""


class OpenScheduling:
    """Mixin for a scheduler of vLLM that adds hooks for a policy. By default the hooks change nothing."""

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
    finished_req_ids: set[str]  # since the last step was scheduled

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.managers = tuple(self.kv_cache_manager.coordinator.single_type_managers)
        self._refuse_unsupported()
        self.waiting = PolicyQueue()

    def unsupported(self) -> dict[str, bool]:
        """Return the settings that do not work with a policy, and whether the engine has them."""
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
        """Return the tokens for a candidate, running or waiting, after all of vLLM's limits."""
        return tokens

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        tokens = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        return self.tokens_for(request, num_computed_tokens, int(tokens))

    def ask_policy(self, asks: bool) -> None:
        """Have vLLM ask `tokens_for` about every candidate of the next step, or about none."""
        if asks:
            self.__dict__.pop("_reserve_prefill_lookahead", None)
        else:  # a call for each request would be a tenth of a step's time
            self.__dict__["_reserve_prefill_lookahead"] = super()._reserve_prefill_lookahead  # type: ignore[misc]

    def preempt(self, request: Request, now: float) -> None:
        """Take all blocks and the slot from a request, which vLLM resumes later."""
        raise NotImplementedError("vLLM's own rules preempt here")

    def recorded(
        self, request: Request, tokens: int, adopted: tuple[int, ...], admitted: bool
    ) -> ScheduledRequest:
        """Record a scheduled request. Its `num_computed_tokens` already includes the new tokens."""
        raise NotImplementedError("a step that cannot be aborted is not recorded")

    def plugin(self, name: str) -> Any | None:
        """Return the scheduler side of one of our connector's plugins, or None."""
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
        """Return how many tokens of an unstarted request are in the prefix cache.

        The thread that receives requests calls this too, while the scheduler works. It only looks up a dict,
        and an outdated answer costs speed, not correctness.
        """
        pool = self.kv_cache_manager.block_pool
        full = (n for n, manager in enumerate(self.managers) if isinstance(manager, FullAttentionManager))
        groups = [next(full, 0)]  # a window may have left the prompt's beginning
        hits = 0
        for block_hash in request.block_hashes:
            if pool.get_cached_block(block_hash, groups) is None:
                break
            hits += 1
        return min(hits * int(self.hash_block_size), int(request.num_tokens) - 1)

    def deferred_blocks(self) -> list[int]:
        """Return freed blocks that a step in flight may still write to."""
        return [block.block_id for _, blocks in list(self.deferred_frees) for block in blocks]

    def full_blocks(self, tokens: int) -> tuple[int, ...]:
        """Return how many full blocks these tokens make, by KV cache group."""
        return tuple(tokens // manager.block_size for manager in self.managers)

    def scheduled_requests(self, scheduler_output: Any) -> Iterator[tuple[Request, int]]:
        """Yield the requests of a step that still exist, with their token counts."""
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is not None:
                yield request, tokens

    def let_holders_go_first(self) -> None:
        """Move requests that lost their blocks in a failed load behind those that still hold blocks.

        vLLM leaves such a request in front of those that hold blocks and schedules none behind one that does
        not fit. Loads that have ended since would keep the blocks that it waits for.
        """
        for request in list(self.kv_holding_waiting) if self.kv_holding_waiting else ():
            if is_waiting(request) and not self.blocks_held(request):
                self.kv_holding_waiting.remove_request(request)
                self.waiting.add_request(request)

    def waits_or_prefills(self) -> bool:
        """Return whether any request has prompt tokens to compute or to load."""
        waits = bool(self.waiting) or bool(self.kv_holding_waiting)
        return waits or any(map(attrgetter("is_prefill_chunk"), self.running))


class SyncScheduler(OpenScheduling, Scheduler):
    """vLLM's synchronous scheduler, with hooks."""


class OverlappingScheduler(OpenScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler, which plans a step while the previous one runs, with hooks."""


class OpenScheduler(OverlappingScheduler):
    """Scheduler of a co-serving engine, with the records that a roll-back restores."""

    _only_result = False

    @property
    def armed_step_runs(self) -> bool:
        """Return whether an armed step is running, which is then the only one in flight."""
        return False

    def waits_for_result(self) -> bool:
        """Return whether to wait for the result of the step in flight before scheduling the next."""
        return False

    @contextmanager
    def only_result(self) -> Iterator[None]:
        """Schedule nothing while this context is open."""
        self._only_result = True
        try:
            yield
        finally:
            self._only_result = False

    def has_requests(self) -> bool:
        return not self._only_result and bool(super().has_requests())

    def unsupported(self) -> dict[str, bool]:
        """Add settings with which an abort cannot be undone."""
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
        """Hook: a request is about to lose its blocks to a policy or to vLLM."""

    def preempt(self, request: Request, now: float) -> None:
        self.running.remove(request)
        self._preempt_request(request, now, self.requires_kv_delivery)  # as vLLM's own preemption
        # The step that is being planned may resume the request. The worker then needs its tokens, which vLLM
        # leaves out if the request was in the step before.
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
        """Return the blocks that are registered in the prefix cache."""
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

        The request starts anew where it has no block before those that it took: of layers with a window, and
        from the first token on. vLLM takes one that waits, holds blocks and has computed nothing for one
        whose load failed, and frees the blocks when the load ends; left as it is, vLLM would admit it with
        blocks twice, and end the engine.
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
        """Return requests that hold blocks while they wait for KV from the host."""
        return list(self.kv_holding_waiting)

    def mark_prefilling(self, request: Request, prefilling: bool) -> None:
        request.is_prefill_chunk = prefilling
        if prefilling:
            self._inflight_prefills.add(request)
        else:
            self._inflight_prefills.discard(request)


def _nulls(blocks: Sequence[Any]) -> int:
    """Return with how many null blocks a request's list of blocks begins."""
    return bisect(blocks, False, key=lambda block: not block.is_null)


def is_running(request: Request) -> bool:
    return bool(request.status == RequestStatus.RUNNING)


def has_prompt_left(request: Request) -> bool:
    """Return whether the request has prompt tokens that no scheduled step computes."""
    return bool(request.is_prefill_chunk)


def is_waiting(request: Request) -> bool:
    """Return whether a request is only waiting to be given tokens."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def extra_args(request: Request) -> dict[str, Any]:
    """Return what the client sent as `vllm_xargs`."""
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}
