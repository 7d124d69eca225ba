"""KV cache groups of a model, read from vLLM's configuration."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtransfer.config import ConnectorConfigError
from kvtransfer.retention.retained_conversations import STATE_WINDOW, CacheGroup


def groups_of(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Return the model's groups. Raises ConnectorConfigError if KV is not kept in equal blocks of tokens."""
    groups = tuple(_group(one.layer_names, one.kv_cache_spec) for one in kv_cache_config.kv_cache_groups)
    if all(group.state for group in groups):
        raise ConnectorConfigError(
            "no layer of this model has attention, which vLLM's prefix cache needs: use a model with such "
            "layers, or serve this one without the connector"
        )
    lengths = {group.block_tokens for group in groups}
    if len(lengths) != 1:
        raise ConnectorConfigError(
            f"this model's layers have blocks of {sorted(lengths)} tokens, which are not moved together: "
            "start the engine with --disable-hybrid-kv-cache-manager, or serve it without the connector"
        )
    return groups


def _group(layers: Sequence[str], spec: Any) -> CacheGroup:
    within = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    windows = {_window(one) for one in within}
    if len(windows) != 1:
        raise ConnectorConfigError(f"layers with windows of {sorted(windows)} tokens are in one group")
    pages = int(spec.page_size_bytes) * (1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(layers))
    state = isinstance(within[0], MambaSpec)
    return CacheGroup(tuple(layers), int(spec.block_size), pages, windows.pop(), state)


def _window(spec: Any) -> int:
    if isinstance(spec, FullAttentionSpec):  # also a layer with a window, if vLLM keeps all of its KV
        return 0
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode == "align":
            return STATE_WINDOW
        raise ConnectorConfigError(
            "vLLM keeps no states of this model at the ends of blocks: start the engine with "
            "--enable-prefix-caching and --mamba-cache-mode align, or serve it without the connector"
        )
    raise ConnectorConfigError(
        f"layers of this model keep their context as {type(spec).__name__}, which the connector cannot move "
        "or retain: use a model with attention in all layers, or serve this one without the connector"
    )
