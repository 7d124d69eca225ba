"""Access to private names of vLLM that resize its block pool, which are checked when an engine starts."""

import time
from collections import deque
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from kvtransfer.compat.kv_connector import free_queue
from kvtransfer.compat.relied_on import ReliedOn

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"

SCHEDULING = ReliedOn(
    signatures={
        _SCHEDULER: {
            "has_requests": ("self",),
            "reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
            "_preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
        },
        _POOL: {
            "touch": ("self", "blocks"),
            "free_blocks": ("self", "ordered_blocks"),
            "evict_blocks": ("self", "block_ids"),
            "move_block_hashes": ("self", "src_block", "dst_block"),
        },
        _QUEUE: {"prepend_n": ("self", "blocks"), "remove": ("self", "block")},
    },
    attributes={
        _POOL: ("blocks", "free_block_queue", "num_gpu_blocks", "null_block"),
        _SCHEDULER: (
            "running",
            "kv_cache_manager",
            "cache_config",
            "kv_cache_config",
            "prev_step_scheduled_req_ids",
            "kv_holding_waiting",
            "finished_recving_kv_req_ids",
        ),
        "vllm.v1.outputs:ModelRunnerOutput": ("kv_connector_output",),
        "vllm.v1.outputs:KVConnectorOutput": ("kv_connector_worker_meta",),
    },
)


def connector_meta(model_runner_output: Any) -> Any:
    """Return what the connector's worker side reports about an iteration, or None without a report."""
    outcome = model_runner_output.kv_connector_output
    return outcome.kv_connector_worker_meta if outcome is not None else None


def grow_pool(scheduler: Any, blocks: int) -> None:
    """Grow the pool to `blocks` blocks. New blocks are allocated before cached blocks are evicted."""
    pool = scheduler.kv_cache_manager.block_pool
    new = [KVCacheBlock(number, pool=pool) for number in range(len(pool.blocks), blocks)]
    pool.blocks += new
    pool.free_block_queue.prepend_n(new)
    _set_size(scheduler, blocks)


def shrink_pool(scheduler: Any, blocks: int) -> dict[int, int]:
    """Shrink the pool to `blocks` blocks, and return the new number of each block whose number was too high.

    The blocks of requests move first, and cached blocks move as long as empty blocks are left. Requests that
    do not fit are preempted, the youngest first.
    """
    pool = scheduler.kv_cache_manager.block_pool
    while sum(1 for block in pool.blocks if block.ref_cnt and not block.is_null) >= blocks:
        request = max(scheduler.running, key=lambda one: (one.priority, one.arrival_time))
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    free = list(free_queue(pool))
    places = deque(sorted((one for one in free if one.block_id < blocks), key=_is_cached))
    held = [block for block in pool.blocks[blocks:] if block.ref_cnt]
    cached = [block for block in reversed(free) if block.block_id >= blocks and _is_cached(block)]
    moved: list[tuple[KVCacheBlock, KVCacheBlock]] = []
    for block in (*held, *cached):
        if not places or (not block.ref_cnt and _is_cached(places[0])):
            break
        moved.append((block, places.popleft()))
        _take_place(pool, *moved[-1])
    kept = [new for _, new in moved if not new.ref_cnt]
    pool.touch(kept)
    pool.free_blocks(reversed(kept))  # the block that was used last is evicted last
    new_places = {old.block_id: new for old, new in moved}
    for of_request in scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks.values():
        of_request[:] = [new_places.get(block.block_id, block) for block in of_request]
    _cut(scheduler, blocks)
    return {old: new.block_id for old, new in new_places.items()}


def _is_cached(block: KVCacheBlock) -> bool:
    return block.block_hash is not None


def _take_place(pool: Any, old: KVCacheBlock, new: KVCacheBlock) -> None:
    """Move the hash and the reference count of block `old` to block `new`, and free `old`."""
    held = old.ref_cnt
    pool.evict_blocks({new.block_id})
    if old.block_hash is not None:
        pool.move_block_hashes(old, new)
    if held:
        pool.touch([new])
        new.ref_cnt, old.ref_cnt = held, 1
        pool.free_blocks([old])


def start_over(scheduler: Any, blocks: int) -> None:
    """Recompute all requests in a pool of `blocks` blocks, because the KV of all blocks is lost.

    vLLM itself frees only the blocks of running requests. It raises if a waiting request holds blocks, for
    example with loaded KV. So the blocks of waiting requests are freed here.
    """
    for request in scheduler.kv_holding_waiting:
        scheduler.kv_cache_manager.free(request)
        scheduler.finished_recving_kv_req_ids.discard(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
    scheduler.reset_prefix_cache(reset_running_requests=True)
    _cut(scheduler, blocks)


def _cut(scheduler: Any, blocks: int) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks[blocks:]})
    for block in pool.blocks[blocks:]:
        pool.free_block_queue.remove(block)
    del pool.blocks[blocks:]
    _set_size(scheduler, blocks)


def _set_size(scheduler: Any, blocks: int) -> None:
    scheduler.kv_cache_manager.block_pool.num_gpu_blocks = blocks
    scheduler.cache_config.num_gpu_blocks = scheduler.kv_cache_config.num_blocks = blocks


def used_blocks(pool: Any) -> tuple[list[int], list[int]]:
    """Return the blocks that requests hold, and the blocks that only the prefix cache holds.

    The blocks of the prefix cache are sorted: the block that would be evicted last comes first.
    """
    held = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    return held, [block.block_id for block in reversed(list(free_queue(pool))) if _is_cached(block)]


def evict_blocks(pool: Any, blocks: list[int]) -> None:
    """Evict these blocks from the prefix cache."""
    pool.evict_blocks(set(blocks))
