"""Access of a worker that drops layers to vLLM's private names, which are checked when its engine starts."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.forward_context import get_forward_context, is_forward_context_available, set_forward_context
from vllm.model_executor.layers import utils as layer_utils
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvtransfer.compat.relied_on import ReliedOn, verify
from workers.engine.overload.config import SPLIT_MODELS, OverloadConfigError

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

WORKING = ReliedOn(
    signatures={
        "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": ("layer", "remove_weight")},
        _RUNNER: {
            "initialize_kv_cache_tensors": (
                "self",
                "kv_cache_config",
                "kernel_block_sizes",
                "kv_cache_allocation_context",
            ),
        },
        "vllm.v1.worker.gpu_worker:Worker": {"initialize_from_config": ("self", "kv_cache_config")},
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": {
            "bind_kv_cache": ("self", "kv_cache"),
        },
    },
    attributes={
        _RUNNER: ("attn_groups", "kv_caches", "requests", "input_batch", "compilation_config", "device"),
    },
    # KV tensors are bound when they are allocated, and the connector gets the tensors that the method
    # returns.
    uses={_RUNNER: {"initialize_kv_cache": ("initialize_kv_cache_tensors", "register_kv_caches")}},
)

# Attention backends of engines that can share layers, by module: the builder, and the fields that are read.
_BUILDS = {"build": ("self", "common_prefix_len", "common_attn_metadata", "fast_build")}
_METADATA = (
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "slot_mapping",
)
ATTENTION = {
    module: ReliedOn(
        signatures={f"{module}:{name}MetadataBuilder": _BUILDS},
        attributes={f"{module}:{name}Metadata": _METADATA},
    )
    for module, name in (
        ("vllm.v1.attention.backends.cpu_attn", "CPUAttention"),
        ("vllm.v1.attention.backends.flash_attn", "FlashAttention"),
    )
}


@contextmanager
def weights_kept() -> Iterator[None]:
    """In this context, keep the weights that vLLM's CPU build deletes once it has packed a copy."""
    pack = layer_utils.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    layer_utils.dispatch_cpu_unquantized_gemm = pack_and_keep
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = pack


class PackedWeights:
    """Packed copies of weights, which the linear layers of the CPU build use; other builds have none."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._linear = [[one for one in layer.modules() if hasattr(one, "cpu_linear")] for layer in layers]

    def drop(self, layer: int) -> None:
        for linear in self._linear[layer]:
            linear.cpu_linear = torch.nn.functional.linear

    def make(self, layer: int) -> None:
        for linear in self._linear[layer]:
            layer_utils.dispatch_cpu_unquantized_gemm(linear, remove_weight=False)


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Parts of a model's forward pass. Every engine keeps the embedding and the last norm."""

    layers: list[torch.nn.Module]
    embed: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[..., Any]
    attention: list[str]  # name of each layer's attention module


def decoder_of(runner: Any) -> DecoderModel:
    """Return the parts of the runner's model, or raise if the model's layers cannot be shared."""
    if (name := type(runner.get_model()).__name__) not in SPLIT_MODELS:
        known = ", ".join(SPLIT_MODELS)
        raise OverloadConfigError(f"models that can be split are {known}, and this one is {name}")
    inner = getattr(runner.get_model(), "model", None)
    layers = list(getattr(inner, "layers", ()))
    embed, norm = getattr(inner, "embed_input_ids", None), getattr(inner, "norm", None)
    expected = ["positions", "hidden_states", "residual"]
    if not layers or embed is None or norm is None:
        raise OverloadConfigError("this model is not an embedding, layers and a norm: it cannot be split")
    if any(list(inspect.signature(one.forward).parameters) != expected for one in layers):
        raise OverloadConfigError(
            f"layers of this model do not take exactly {', '.join(expected)}: it cannot be split"
        )
    attentions = (getattr(getattr(one, "self_attn", None), "attn", None) for one in layers)
    names = [getattr(attention, "layer_name", "") for attention in attentions]
    if not all(names) or len(runner.kv_cache_config.kv_cache_groups) != 1:
        raise OverloadConfigError("layers of this model have different attention: it cannot be split")
    return DecoderModel(layers, embed, norm, names)


def verify_attention(runner: Any) -> None:
    """Check that the attention backend that the engine chose works with shared layers."""
    builder = runner.attn_groups[0][0].get_metadata_builder(0)
    relied = ATTENTION.get(type(builder).__module__)
    if relied is None:
        raise OverloadConfigError(
            f"batches of {type(builder).__name__} cannot be split: choose attention-backend FLASH_ATTN"
        )
    verify(relied)


def on_kv_allocated(
    runner: Any,
    released: Callable[[], None],
    replaced: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> None:
    """Patch the runner so that its KV tensors are replaced as soon as they are allocated.

    `replaced` gets tensors of the same shapes without memory, and returns the tensors to use instead. Before
    each allocation `released` is called, so that the tensors of an earlier allocation can be freed.
    """
    allocate = runner.initialize_kv_cache_tensors

    @functools.wraps(allocate)
    def initialize_kv_cache_tensors(
        kv_cache_config: Any, kernel_block_sizes: Any, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        if set(kernel_block_sizes) != {runner.cache_config.block_size}:
            raise OverloadConfigError(
                f"attention computes in blocks of {kernel_block_sizes}: set engine.args.block-size to that"
            )
        released()
        like = _without_memory(allocate(kv_cache_config, kernel_block_sizes, *args, **kwargs))
        for name, tensor in like.items():
            bind_kv(runner, name, tensor)
        runner.kv_caches.clear()
        own = replaced(like)
        for name, tensor in own.items():
            bind_kv(runner, name, tensor)
        runner.kv_caches[:] = own.values()
        return dict(own)

    runner.initialize_kv_cache_tensors = initialize_kv_cache_tensors


def _without_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same shapes and types on torch's meta device."""
    return {
        name: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        for name, one in tensors.items()
    }


def bind_kv(runner: Any, name: str, tensor: torch.Tensor) -> None:
    runner.compilation_config.static_forward_context[name].bind_kv_cache(tensor)


def connector() -> Any:
    """Return the KV connector of this worker."""
    return get_kv_transfer_group()


@dataclass(frozen=True, slots=True)
class BatchKv:
    """Positions of a batch's tokens in their requests and in the KV, as attention reads them."""

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    blocks: torch.Tensor  # block numbers, one row per request
    slots: torch.Tensor  # place in the KV, one per token
    tokens: int
    longest_query: int
    longest: int

    def entries_in_use(self, pool: int, block_tokens: int, rows: int) -> torch.Tensor | None:
        """Return a mask of the entries of `blocks` that belong to requests, or None if the batch is invalid.

        With an invalid batch, attention would read or write outside of `rows` rows, or of a pool of `pool`
        blocks. The entries at the end of a row that belong to no request are stale.
        """
        count, lens, slots, blocks = len(self.seq_lens), self.seq_lens, self.slots, self.blocks
        if blocks.shape[:1] != (count,) or blocks.dim() != 2 or len(self.query_start) != count + 1:
            return None
        width = blocks.shape[1] * block_tokens
        longest = max([0, *lens.tolist()])
        if min([0, *lens.tolist()]) < 0 or not longest <= self.longest <= width:
            return None
        starts = self.query_start.tolist()
        if starts != sorted(starts) or starts[0] < 0 or not starts[-1] <= self.tokens <= rows:
            return None
        if not 0 <= self.longest_query <= self.tokens or len(slots) > rows:
            return None
        named = torch.arange(blocks.shape[1])[None, :] * block_tokens < lens[:, None]
        inside = blocks[named].ge(0) & blocks[named].lt(pool)
        written = slots.ge(-1) & slots.lt(pool * block_tokens)
        return named if bool(inside.all()) and bool(written.all()) else None


def batch_in_model(block_tokens: int) -> BatchKv | None:
    """Return the batch of the current forward pass, or None if it has no KV, as in a warm-up."""
    context = get_forward_context() if is_forward_context_available() else None
    if context is None or not context.attn_metadata:
        return None
    seen = next(iter(context.attn_metadata.values()))
    width = -(-int(seen.max_seq_len) // block_tokens)
    return BatchKv(
        seen.query_start_loc,
        seen.seq_lens,
        seen.block_table[:, :width],
        seen.slot_mapping,
        int(seen.num_actual_tokens),
        int(seen.max_query_len),
        int(seen.max_seq_len),
    )


@contextmanager
def attention_on(runner: Any, names: list[str], batch: BatchKv, positions: torch.Tensor) -> Iterator[None]:
    """Make a pass through these attention modules use the KV of `batch`, on the device of `positions`."""
    builder = runner.attn_groups[0][0].get_metadata_builder(0)
    device = positions.device
    slots = batch.slots.to(device)
    common = CommonAttentionMetadata(
        query_start_loc=batch.query_start.to(device),
        query_start_loc_cpu=batch.query_start,
        seq_lens=batch.seq_lens.to(device),
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=batch.tokens,
        max_query_len=batch.longest_query,
        max_seq_len=batch.longest,
        block_table_tensor=batch.blocks.to(device),
        slot_mapping=slots,
        causal=True,
        positions=positions,
    )
    metadata = builder.build(0, common)
    with (
        torch.cuda.device_of(positions),  # the peer server's thread has no current device; no-op on a CPU
        set_forward_context(
            dict.fromkeys(names, metadata),
            runner.vllm_config,
            num_tokens=len(positions),
            slot_mapping=dict.fromkeys(names, slots),
            skip_compiled=True,
        ),
    ):
        yield


def rename_blocks(runner: Any, moves: Mapping[int, int]) -> None:
    """Change block numbers in the runner's records of requests: `moves` maps old numbers to new ones."""
    table = runner.input_batch.block_table[0].block_table.np
    for request_id, request in runner.requests.items():
        (blocks,) = request.block_ids
        row = runner.input_batch.req_id_to_index.get(request_id)
        for place, block in enumerate(blocks):
            if block in moves:
                blocks[place] = moves[block]
                if row is not None:
                    table[row, place] = moves[block]
