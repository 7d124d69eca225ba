"""Names of vLLM and LMCache that the connector relies on, checked in every engine before it serves.

Private names of vLLM appear only in the `compat` packages of `kvtransfer` and `workers/engine`, which a test
checks in the product's syntax trees. Each feature has a table. An engine on another vLLM stops and says what
changed.
"""

from collections.abc import Iterator
from typing import Any

from kvtransfer.compat.relied_on import ReliedOn, differences
from kvtransfer.config import ConnectorConfigError

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = f"{_V1}.base:KVConnectorBase_V1"
_MULTI = f"{_V1}.multi_connector:MultiConnector"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

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
            "has_pending_push_work": ("self",),
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
            "reset": ("self",),
            "aggregate": ("self", "other"),
            "reduce": ("self",),
            "is_empty": ("self",),
        },
        f"{_V1}.metrics:KVConnectorPromMetrics": {"observe": ("self", "transfer_stats_data", "engine_idx")},
        _POOL: {
            "touch": ("self", "blocks"),
            "free_blocks": ("self", "ordered_blocks"),
            "evict_blocks": ("self", "block_ids"),
            "get_cached_block": ("self", "block_hash", "kv_cache_group_ids"),
            "get_num_free_blocks": ("self",),
        },
        "vllm.v1.core.kv_cache_manager:KVCacheManager": {"get_block_ids": ("self", "request_id")},
    },
    attributes={
        _BASE: ("requires_kv_delivery",),
        _MULTI: ("sub_connectors",),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("block_pool",),
        _POOL: ("blocks", "free_block_queue", "hash_block_size", "num_gpu_blocks"),
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_id", "ref_cnt", "is_null", "block_hash"),
        "vllm.v1.request:Request": (
            "request_id",
            "priority",
            "status",
            "session_id",
            "kv_transfer_params",
            "block_hashes",
            "num_tokens",
            "num_prompt_tokens",
            "num_computed_tokens",
            "num_in_flight_tokens",
            "prompt_token_ids",
            "lora_request",
            "mm_features",
            "prefill_stats",
        ),
        "vllm.v1.metrics.stats:PrefillStats": ("num_cached_tokens", "num_local_cached_tokens"),
        "vllm.v1.request:RequestStatus": (
            "RUNNING",
            "PREEMPTED",
            "FINISHED_STOPPED",
            "FINISHED_LENGTH_CAPPED",
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "num_scheduled_tokens",
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "preempted_req_ids",
        ),
        "vllm.v1.core.sched.output:NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
        "vllm.v1.core.sched.output:CachedRequestData": (
            "req_ids",
            "resumed_req_ids",
            "new_block_ids",
            "num_computed_tokens",
        ),
        "vllm.v1.outputs:KVConnectorOutput": (
            "kv_connector_worker_meta",
            "finished_recving",
            "finished_sending",
            "invalid_block_ids",
        ),
    },
    uses={
        # Callers of the connector: a hook that vLLM no longer calls would otherwise be skipped silently.
        _SCHEDULER: {
            "__init__": ("bind_kv_cache_manager", "requires_kv_delivery"),
            "add_request": ("on_new_request",),
            "schedule": (
                "get_num_new_matched_tokens",
                "update_state_after_alloc",
                "get_external_cache_hit_sources",
            ),
            "_build_kv_connector_meta": ("build_connector_meta",),
            "_update_from_kv_xfer_finished": ("update_connector_output",),
            "update_from_output": ("get_kv_connector_stats",),
            "_connector_finished": ("request_finished_all_groups",),
            "reset_connector_cache": ("reset_cache",),
            "has_requests": ("has_pending_push_work",),
            "shutdown": ("shutdown",),
        },
        _MULTI: {"request_finished_all_groups": ("request_finished",)},
        _BASE: {"get_transfer_results": ("get_finished",)},  # LMCache's connector has `get_finished`
        "vllm.config.vllm:VllmConfig": {"__post_init__": ("requires_piecewise_for_cudagraph",)},
        "vllm.distributed.kv_transfer.kv_connector.utils": {
            "get_kv_connector_cache_layout": ("get_required_kvcache_layout",),
        },
        f"{_V1}.metrics:KVConnectorLogging": {"observe": ("build_kv_connector_stats",)},
        f"{_V1}.metrics:KVConnectorProm": {"__init__": ("build_prom_metrics",)},
    },
)


WORKER = ReliedOn(
    signatures={},
    attributes={},
    uses={
        # Worker sides get their orders in `handle_preemptions`, which vLLM calls once and first in a step.
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {
            "execute_model": ("handle_preemptions",),
            "initialize_kv_cache": ("register_kv_caches",),
        },
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin": {
            "_get_kv_connector_output": (
                "start_load_kv",
                "wait_for_save",
                "get_transfer_results",
                "get_block_ids_with_load_errors",
                "get_kv_connector_stats",
                "build_connector_worker_meta",
                "bind_connector_metadata",
            ),
        },
        "vllm.model_executor.layers.attention.kv_transfer_utils": {
            "maybe_transfer_kv_layer": ("wait_for_layer_load", "save_kv_layer"),
        },
    },
)


_LMCACHE = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPWorkerAdapter"
LMCACHE = ReliedOn(signatures={}, attributes={_LMCACHE: ("_health_event",)})


def verify_lmcache() -> None:
    for difference in differences(LMCACHE):
        raise ConnectorConfigError(
            f"{difference} in this LMCache: pip install --no-deps -r requirements/lmcache.txt"
        )


def free_queue(pool: Any) -> Iterator[Any]:
    """Iterate over the free blocks in the order in which vLLM takes them."""
    return iter(pool.free_block_queue.iter_blocks_after(None))


def lmcache_is_gone(adapter: Any) -> None:
    """Make LMCache's worker adapter continue without its server, as after a missed heartbeat."""
    adapter._health_event.clear()
