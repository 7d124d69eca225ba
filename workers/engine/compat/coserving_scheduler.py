"""Co-serving's contact with vLLM's internals, written for one release and checked at start.

Every private name, patch and signature that co-serving uses is here, in a table that engines check before
they serve (kvtransfer/compat/kv_connector.py): another vLLM stops with a sentence instead of misbehaving.
"""

import functools
import logging
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
from vllm.v1.request import Request, RequestStatus

from kvtransfer.compat.relied_on import ReliedOn
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
            "preprocess_add_request": ("self", "request"), "step_with_batch_queue": ("self",),
        },
    },
    attributes={
        _SCHEDULER: (
            "running", "waiting", "requests", "connector", "kv_cache_manager", "kv_holding_waiting",
            "_inflight_prefills", "block_size", "hash_block_size", "use_v2_model_runner", "pause_state",
            "max_num_active_reqs", "max_num_scheduled_tokens", "vllm_config", "failed_recving_kv_req_ids",
            "finished_req_ids", "deferred_frees",
        ),
        _QUEUE: ("_heap",),
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": (
            "req_to_blocks", "num_cached_block", "block_size",
        ),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("coordinator", "block_pool"),
        "vllm.v1.request:Request": (
            "arrival_time", "is_prefill_chunk", "num_output_tokens", "num_output_placeholders",
            "sampling_params",
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": ("has_sync_kv_loads",),
    },
    uses={
        # What a window has left is given back by what was computed before a step: the same if that is undone.
        "vllm.v1.core.kv_cache_manager:KVCacheManager": {
            "allocate_slots": ("remove_skipped_blocks", "num_in_flight_tokens"),
        },
        # Every candidate is offered to the policy, and the queue is asked before each.
        _SCHEDULER: {
            "_update_waiting_for_remote_kv": ("failed_recving_kv_req_ids",),
            "schedule": ("_reserve_prefill_lookahead", "peek_request", "pop_request", "kv_holding_waiting"),
            "_update_after_schedule": ("num_computed_tokens",),
            "has_requests": ("has_unfinished_requests",),
        },
        # A step whose result is taken first schedules nothing, and waits for what is in flight.
        "vllm.v1.engine.core:EngineCore": {
            "step_with_batch_queue": ("has_requests", "batch_queue", "pop", "update_from_output"),
        },
        _ASYNC: {
            "_update_after_schedule": ("num_output_placeholders",),
            "_update_request_with_output": ("num_output_placeholders",),
        },
        # An arrival is told in the thread that receives requests, beside the model.
        "vllm.v1.engine.core:EngineCoreProc": {"process_input_sockets": ("preprocess_add_request",)},
    },
)  # fmt: skip


class UnsupportedEngineError(WorkerError, RuntimeError):
    """This engine cannot co-serve; the message says what stands in the way and what to do."""


class PolicyQueue(PriorityRequestQueue):
    """vLLM's queue of waiting requests, in which a policy says which are first: online, and then offline.

    Online requests that it does not name come before those it does: they wait for something, and are passed
    over. Offline requests that it does not name come last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._online: deque[Request] = deque()
        self._offline: deque[Request] = deque()

    def name_online(self, requests: Iterable[Request]) -> None:
        named = list(requests)
        known = {request.request_id for request in named}
        rest = sorted(r for r in self._heap if r.priority <= 0 and r.request_id not in known)
        self._online = deque([*rest, *named])

    def name_offline(self, requests: Iterable[Request]) -> None:
        self._offline = deque(requests)

    def peek_request(self) -> Request:
        head = super().peek_request()
        named = self._offline if head.priority > 0 else self._online
        while named and named[0] not in self._heap:  # ended, or started
            named.popleft()
        return named[0] if named else head

    def pop_request(self) -> Request:
        first = self.peek_request()
        if first is self._heap[0]:
            return super().pop_request()
        self.remove_request(first)
        return first


class OpenScheduling:
    """In front of a scheduler of vLLM: the steps open that a policy decides. The defaults are vLLM's own."""

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
    deferred_frees: deque[tuple[int, list[Any]]]
    failed_recving_kv_req_ids: set[str]
    finished_req_ids: set[str]  # since the last step was scheduled

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.managers = tuple(self.kv_cache_manager.coordinator.single_type_managers)
        self._refuse_unsupported()
        self.waiting = PolicyQueue()

    def unsupported(self) -> dict[str, bool]:
        """Settings under which the plan could not be kept, and whether the engine has them."""
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
        """Asked for every candidate, running or waiting, after all of vLLM's own caps."""
        return tokens

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        tokens = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        return self.tokens_for(request, num_computed_tokens, int(tokens))

    def preempt(self, request: Request, now: float) -> None:
        """Takes all blocks and the place in the batch; the request waits and resumes by itself."""
        raise NotImplementedError("vLLM's own rules preempt here")

    def noted(
        self, request: Request, tokens: int, adopted: tuple[int, ...], admitted: bool
    ) -> ScheduledRequest:
        """Right after scheduling, when `num_computed_tokens` already counts the new tokens."""
        raise NotImplementedError("a step that cannot be aborted is not noted")

    def plugin(self, name: str) -> Any | None:
        """The scheduler side of one of our connector's plugins, if the engine has it."""
        ours = getattr(self.connector, "scheduler_side", None)
        return ours(name) if ours is not None else None

    def blocks_held(self, request: Request) -> int:
        """What a window has left is null in its list, from the first block on."""
        held = 0
        for manager in self.managers:
            blocks = manager.req_to_blocks.get(request.request_id)
            if blocks:
                held += len(blocks) - (_nulls(blocks) if blocks[0].is_null else 0)
        return held

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a request that has not started which the prefix cache holds now.

        Also called from the thread that receives requests, while the scheduler works: it only looks up a
        dict, and an answer that is out of date costs speed, not correctness.
        """
        pool = self.kv_cache_manager.block_pool
        full = (n for n, manager in enumerate(self.managers) if isinstance(manager, FullAttentionManager))
        groups = [next(full, 0)]  # of layers with a window nothing may be left of the prompt's start
        hits = 0
        for block_hash in request.block_hashes:
            if pool.get_cached_block(block_hash, groups) is None:
                break
            hits += 1
        return min(hits * int(self.hash_block_size), int(request.num_tokens) - 1)

    def deferred_blocks(self) -> list[int]:
        """Blocks that nobody has any more, and that a step in flight may still write."""
        return [block.block_id for _, blocks in list(self.deferred_frees) for block in blocks]

    def full_blocks(self, tokens: int) -> tuple[int, ...]:
        """Blocks that this many tokens fill, by KV cache group."""
        return tuple(tokens // manager.block_size for manager in self.managers)

    def scheduled_requests(self, scheduler_output: Any) -> Iterator[tuple[Request, int]]:
        """Requests of a step that still exist, with their tokens."""
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is not None:
                yield request, tokens

    def let_holders_go_first(self) -> None:
        """A request whose load failed has given its blocks back, and waits like those that never had any.

        vLLM leaves it in front of those that hold blocks, and looks at nobody behind one that does not fit:
        loads that have ended since would never be taken, and keep the blocks that it waits for.
        """
        for request in list(self.kv_holding_waiting):
            if is_waiting(request) and not self.blocks_held(request):
                self.kv_holding_waiting.remove_request(request)
                self.waiting.add_request(request)

    def waits_or_prefills(self) -> bool:
        """Whether any request has a prompt, or a part of one, to compute or to load."""
        waits = bool(self.waiting) or bool(self.kv_holding_waiting)
        return waits or any(request.is_prefill_chunk for request in self.running)


class SyncScheduler(OpenScheduling, Scheduler):
    """The one that vLLM takes without asynchronous scheduling, with its steps open."""


class OverlappingScheduler(OpenScheduling, AsyncScheduler):
    """The one that vLLM takes with asynchronous scheduling: a step is planned while the one before runs."""


class OpenScheduler(OverlappingScheduler):
    """A co-serving engine's: also with the records that a roll-back corrects."""

    _only_result = False

    @property
    def armed_step_runs(self) -> bool:
        """A step that may be aborted is in flight, and nothing else is."""
        return False

    def waits_for_result(self) -> bool:
        """Whether the result of the step in flight is taken before the next step is scheduled."""
        return False

    @contextmanager
    def only_result(self) -> Iterator[None]:
        """Nothing is scheduled within."""
        self._only_result = True
        try:
            yield
        finally:
            self._only_result = False

    def has_requests(self) -> bool:
        return not self._only_result and bool(super().has_requests())

    def unsupported(self) -> dict[str, bool]:
        """Settings under which an abort could not be undone, too."""
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
        """The request is about to lose its blocks, by our preemption or one of vLLM's own."""

    def preempt(self, request: Request, now: float) -> None:
        self.running.remove(request)
        self._preempt_request(request, now, drop_stale_output=True)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.before_preemption(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def noted(
        self, request: Request, tokens: int, adopted: tuple[int, ...], admitted: bool
    ) -> ScheduledRequest:
        start = request.num_computed_tokens - tokens
        before = self.full_blocks(start)
        written = tuple(
            tuple(block.block_id for block in manager.req_to_blocks[request.request_id][first:])
            for manager, first in zip(self.managers, before, strict=True)
        )
        return ScheduledRequest(request, tokens, start, written, tuple(map(max, before, adopted)), admitted)

    def hashed(self, block_ids: set[int]) -> set[int]:
        """Those that are registered in the prefix cache."""
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
        """Have a request that was admitted with KV which nobody computed compute it from `tokens` on.

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
        """Requests that hold blocks and wait: for KV from the host."""
        return list(self.kv_holding_waiting)

    def mark_prefilling(self, request: Request, prefilling: bool) -> None:
        request.is_prefill_chunk = prefilling
        if prefilling:
            self._inflight_prefills.add(request)
        else:
            self._inflight_prefills.discard(request)


def _nulls(blocks: Sequence[Any]) -> int:
    """Of blocks that begin with one."""
    return bisect(blocks, False, key=lambda block: not block.is_null)


def is_running(request: Request) -> bool:
    return bool(request.status == RequestStatus.RUNNING)


def has_prompt_left(request: Request) -> bool:
    """Return whether the request has prompt tokens that no scheduled step computes."""
    return bool(request.is_prefill_chunk)


def is_waiting(request: Request) -> bool:
    """Waiting for tokens of an iteration, and not for something that only comes between iterations."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class _Arrivals:
    """Who is told of arrivals in this process."""

    told: Callable[[Request], None] | None = None


def tell_of_arrivals(told: Callable[[Request], None]) -> None:
    """A patch: requests are told of in the thread that receives them, while an iteration runs.

    Without it an arrival is seen only when the iteration is over, which is what a safepoint is there to
    prevent. vLLM is patched once a process; who asked last is told.
    """
    _Arrivals.told = told
    original = EngineCore.preprocess_add_request
    if getattr(original, "tells_of_arrivals", False):
        return

    @functools.wraps(original)
    def preprocess_add_request(self: EngineCore, request: Any) -> Any:
        result = original(self, request)
        if _Arrivals.told is not None:
            _Arrivals.told(result[0])
        return result

    preprocess_add_request.tells_of_arrivals = True  # type: ignore[attr-defined]
    EngineCore.preprocess_add_request = preprocess_add_request


StepResult = tuple[dict[int, Any] | None, bool]


def keep_armed_steps_alone() -> None:
    """A patch of this process: a step that may be aborted is the only one in flight.

    With asynchronous scheduling vLLM schedules a step while the one before runs. Where the next step may be
    armed, the result of the one in flight is taken first; and that of an armed step is taken before anything
    else happens, so that no other step, request or command meets one that may yet be undone.
    """
    original = EngineCore.step_with_batch_queue
    if hasattr(original, "__wrapped__"):
        return

    def result(core: EngineCore) -> StepResult:
        """Not an empty step: those make vLLM sleep, and run the connector."""
        with core.scheduler.only_result():
            outputs, _ = original(core)
        # Ranks of a mixture of experts must run as many steps as the others: theirs is an idle one.
        return outputs, not isinstance(core, DPEngineCoreProc)

    @functools.wraps(original)
    def step_with_batch_queue(self: EngineCore) -> StepResult:
        scheduler = self.scheduler
        if not isinstance(scheduler, OpenScheduler):
            plain: StepResult = original(self)
            return plain
        if self.batch_queue and scheduler.waits_for_result():
            return result(self)
        outputs, executed = original(self)
        if outputs is None and scheduler.armed_step_runs:
            outputs, _ = result(self)
        return outputs, executed

    EngineCore.step_with_batch_queue = step_with_batch_queue


def extra_args(request: Request) -> dict[str, Any]:
    """What the client sent as `vllm_xargs`."""
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}
