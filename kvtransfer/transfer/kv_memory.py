"""Gives access to KV tensors as bytes of blocks, for transfers and copies."""

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch

PIECE_BYTES = 4 << 20  # stays in a processor's cache from tagging to sending
ONE: Mapping[str, int] = {}  # all layers are in the first KV cache group


class BlockMemory:
    """Memory that blocks are sent from and received into. Each layer's block is one range of bytes."""

    layers: tuple[str, ...]
    groups: tuple[int, ...]  # KV cache group of each layer
    layout: str

    def view(self, layer: int, block: int) -> memoryview:
        """Return the bytes of a block, to be used in place."""
        raise NotImplementedError

    def views(self, layer: int, blocks: Sequence[int]) -> list[memoryview]:
        """Return the bytes of blocks in order, in as few views as possible."""
        return [self.view(layer, block) for block in blocks]

    piece_bytes = PIECE_BYTES  # most bytes that `outgoing` and `incoming` take at once, but at least a block

    def block_bytes(self, layer: int) -> int:
        return self.view(layer, 0).nbytes

    def piece_blocks(self, layer: int, piece_bytes: int) -> int:
        return max(1, piece_bytes // self.block_bytes(layer))

    def outgoing(
        self, layer: int, blocks: Sequence[int], wait_s: float
    ) -> AbstractContextManager[list[memoryview]]:
        """Provide the bytes of blocks for sending; waits at most `wait_s` for memory."""
        return nullcontext(self.views(layer, blocks))

    def incoming(
        self, layer: int, blocks: Sequence[int], wait_s: float
    ) -> AbstractContextManager[list[memoryview]]:
        """Provide memory to receive blocks into. When the context ends, the model can read them."""
        return nullcontext(self.views(layer, blocks))

    def publish(self, done: Callable[[], None]) -> None:
        """Call `done` as soon as the layer that was launched last can be sent."""
        done()

    def mark(self) -> None:
        """Write received bytes only after everything that the model's thread has launched so far.

        An aborted step may still write to blocks that were freed and given to another request.
        """

    def close(self) -> None:
        """Stop publishing layers to the transfer."""


class HostBlockMemory(BlockMemory):
    """KV tensors in host memory (CPU build), used in place."""

    def __init__(self, kv_caches: Mapping[str, Any], blocks: int, groups: Mapping[str, int] = ONE) -> None:
        self.layers = tuple(kv_caches)
        self.groups = tuple(groups.get(layer, 0) for layer in kv_caches)
        self._places = [block_ranges(tensor, blocks) for tensor in kv_caches.values()]
        self._bytes = [
            memoryview((ctypes.c_char * ((blocks - 1) * stride + size)).from_address(base)).cast("B")
            for base, stride, size in self._places
        ]
        self._owners = list(kv_caches.values())  # views of their memory do not keep the tensors alive
        self.layout = layout_fingerprint(list(kv_caches.values()), blocks)

    def view(self, layer: int, block: int) -> memoryview:
        _, stride, size = self._places[layer]
        return self._bytes[layer][block * stride : block * stride + size]

    def views(self, layer: int, blocks: Sequence[int]) -> list[memoryview]:
        """Return one view for each run of adjacent blocks, because each view costs extra calls."""
        _, stride, size = self._places[layer]
        if stride != size:
            return [self.view(layer, block) for block in blocks]
        ends = [at for at in range(1, len(blocks)) if blocks[at] != blocks[at - 1] + 1]
        return [
            self._bytes[layer][blocks[first] * size : (blocks[last - 1] + 1) * size]
            for first, last in pairwise([0, *ends, len(blocks)])
        ]


def block_ranges(tensor: Any, blocks: int) -> tuple[int, int, int]:
    """Return the address of block 0, the distance between blocks, and the size of a block."""
    rows = byte_rows(tensor, blocks)
    width = rows.element_size()
    return int(rows.data_ptr()), rows.stride(0) * width, rows.shape[1] * width


def byte_rows(tensor: Any, blocks: int) -> Any:
    """Return a view with one row per block, in the widest integer type, which is copied fastest."""
    by_block = by_block_first(tensor, blocks)
    one = by_block[0]
    if not one.is_contiguous():
        raise ValueError(
            f"a KV block of shape {tuple(one.shape)} has strides {one.stride()}: not one range of bytes. "
            "The connector asks vLLM for the layout LBHNC; this attention backend did not give it."
        )
    rows = by_block.flatten(1)
    width = rows.element_size()
    wide = all(n * width % 8 == 0 for n in (rows.shape[1], rows.stride(0), rows.storage_offset()))
    return rows.view(torch.int64 if wide else torch.uint8)


def by_block_first(tensor: Any, blocks: int) -> Any:
    """Return a view whose first dimension is that of blocks, wherever the attention backend has it."""
    sizes = list(tensor.shape)
    if blocks not in sizes:
        raise ValueError(f"KV tensor of shape {tuple(sizes)} has no dimension of {blocks} blocks")
    return tensor.movedim(sizes.index(blocks), 0)


def layout_fingerprint(tensors: Sequence[Any], blocks: int) -> str:
    """Return a fingerprint that is equal for engines whose blocks have the same layout."""
    shapes = [[str(t.dtype), *by_block_first(t, blocks).shape[1:]] for t in tensors]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
