"""Registers restored blocks in vLLM's prefix cache, reports arriving requests, and wakes an idle engine."""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore

from kvtransfer.compat.relied_on import ReliedOn, verify

_POOL = "vllm.v1.core.block_pool:BlockPool"
_CORE = "vllm.v1.engine.core:EngineCoreProc"

PREFETCHING = ReliedOn(
    signatures={
        _POOL: {
            "get_new_blocks": ("self", "num_blocks"),
            "cache_full_blocks": (
                "self",
                "request",
                "blocks",
                "num_cached_blocks",
                "num_full_blocks",
                "block_size",
                "kv_cache_group_id",
                "block_mask",
            ),
        },
    },
    attributes={_POOL: ("null_block", "enable_kv_cache_events")},
    uses={},
)

WAKING = ReliedOn(
    signatures={"vllm.v1.engine.core:EngineCore": {"preprocess_add_request": ("self", "request")}},
    attributes={
        _CORE: ("input_queue",),
        "vllm.v1.engine:EngineCoreRequestType": ("WAKEUP",),
    },
    uses={_CORE: {"_process_input_queue": ("has_work", "input_queue")}},
)


def cache_blocks(
    pool: Any, chain: list[bytes], blocks: Mapping[int, Any], block_tokens: int, group: int
) -> None:
    """Register blocks in the prefix cache of one group. The keys of `blocks` are indices in `chain`."""
    if not blocks:
        return
    end = max(blocks) + 1
    listed = [blocks.get(at, pool.null_block) for at in range(end)]  # vLLM skips null blocks
    pool.cache_full_blocks(SimpleNamespace(block_hashes=chain), listed, 0, end, block_tokens, group)


class _EngineCoreOfProcess:
    """Holds the engine core of this process, and the function to call for arriving requests.

    The engine core is known once a request has arrived.
    """

    core: Any = None
    on_arrival: Callable[[Any], None] | None = None


def remember_engine_core() -> None:
    """Patch vLLM so that an idle engine can be woken after its first request (the warm-up)."""
    verify(WAKING)
    original = EngineCore.preprocess_add_request
    if getattr(original, "remembers_core", False):
        return

    @functools.wraps(original)
    def preprocess_add_request(self: EngineCore, request: Any) -> Any:
        _EngineCoreOfProcess.core = self
        result = original(self, request)
        if _EngineCoreOfProcess.on_arrival is not None:
            _EngineCoreOfProcess.on_arrival(result[0])
        return result

    preprocess_add_request.remembers_core = True  # type: ignore[attr-defined]
    EngineCore.preprocess_add_request = preprocess_add_request


def notify_of_arrivals(on_arrival: Callable[[Any], None]) -> None:
    """Call `on_arrival` for each request that arrives during an iteration, in the receiving thread.

    vLLM itself looks for arrivals only after the iteration, too late for a safepoint to abort it. A second
    call replaces the function of the first.
    """
    _EngineCoreOfProcess.on_arrival = on_arrival
    remember_engine_core()


def wake_engine() -> None:
    """Make the engine core step although it has no requests."""
    queue = getattr(_EngineCoreOfProcess.core, "input_queue", None)
    if queue is not None:
        queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
