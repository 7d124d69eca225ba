"""How many blocks fit on the host."""

from typing import Any

from kvtransfer.config import ConnectorConfig

GIB = 1 << 30


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block over all layers, on one rank."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)


def host_slots(config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any) -> int:
    """`host_kv_gib` is of the whole engine: every rank holds its share of each block."""
    ranks = int(vllm_config.parallel_config.world_size)
    return int(config.host_kv_gib * GIB) // (block_bytes(kv_cache_config) * ranks)
