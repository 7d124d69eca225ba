"""The KV cache groups of a model: layers that share a list of blocks, and what each keeps of a long prompt.

vLLM puts layers of one kind into groups. All groups take their blocks from one pool, and a block is one
group's at a time. Layers with full attention keep every block of a prompt; layers that attend to a window
keep the blocks of it, and what the window has left is given back. Without vLLM's hybrid manager, and for
models whose layers are all alike, there is one group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from kvtransfer.conversations import block_key
from kvtransfer.errors import ConnectorConfigError


@dataclass(frozen=True, slots=True)
class CacheGroup:
    layers: tuple[str, ...]
    block_tokens: int
    block_bytes: int  # of one block, over the layers, on one rank
    window: int = 0  # tokens that a layer attends to; 0: all

    def first_block(self, tokens: int) -> int:
        """The first block that what follows so many tokens attends to."""
        return max(0, tokens - self.window + 1) // self.block_tokens if self.window else 0

    def first_kept(self, blocks: int) -> int:
        return self.first_block(blocks * self.block_tokens)


def groups_of(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Raises a sentence about what cannot be cut into blocks of tokens."""
    groups = tuple(_group(one.layer_names, one.kv_cache_spec) for one in kv_cache_config.kv_cache_groups)
    lengths = {group.block_tokens for group in groups}
    if len(lengths) != 1:
        raise ConnectorConfigError(
            f"this model's layers have blocks of {sorted(lengths)} tokens, which are not moved together: "
            "start the engine with --disable-hybrid-kv-cache-manager, or serve it without the connector"
        )
    return groups


def block_bytes(groups: Iterable[CacheGroup]) -> int:
    """Of one block of the pool, on one rank: whichever group has it, it takes as much as the largest."""
    return max(group.block_bytes for group in groups)


def _group(layers: Sequence[str], spec: Any) -> CacheGroup:
    within = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    windows = {_window(one) for one in within}
    if len(windows) != 1:
        raise ConnectorConfigError(f"layers with windows of {sorted(windows)} tokens are in one group")
    pages = int(spec.page_size_bytes) * (1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(layers))
    return CacheGroup(tuple(layers), int(spec.block_size), pages, windows.pop())


def _window(spec: Any) -> int:
    if isinstance(spec, FullAttentionSpec):  # also where vLLM keeps all of a layer that attends to a window
        return 0
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    raise ConnectorConfigError(
        f"layers of this model keep something else than blocks of a prompt ({type(spec).__name__}), which is "
        "not moved or kept between turns: use a model with attention in all layers, or serve it without the "
        "connector"
    )


def key_of(block: Any) -> bytes:
    """Of a block that vLLM's prefix cache knows."""
    return block_key(get_block_hash(block.block_hash), get_group_id(block.block_hash))
