"""The bytes of KV blocks, as the transfer sees them."""

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class BlockMemory(Protocol):
    """Where blocks are read from and written to. One block of one layer is one range of bytes."""

    layers: tuple[str, ...]
    layout: str

    def view(self, layer: int, block: int) -> memoryview:
        """The bytes of a block, to send or to receive into."""

    def reserve(self, blocks: Sequence[int]) -> bool:
        """Before blocks are viewed; whether there is room."""

    def release(self, blocks: Sequence[int]) -> None:
        """They are viewed no more."""

    def publish(self, layer: int, blocks: Sequence[int], done: Callable[[], None]) -> None:
        """A layer of these blocks was computed; `done` is called when `view` shows it."""

    def landed(self, blocks: Sequence[int]) -> None:
        """They were received; returns when the model can read them."""

    def close(self) -> None: ...


class HostBlockMemory:
    """KV tensors in host memory (CPU build), used in place: nothing is copied on either side."""

    def __init__(self, kv_caches: Mapping[str, Any], blocks: int) -> None:
        self.layers = tuple(kv_caches)
        self._places = [block_ranges(tensor, blocks) for tensor in kv_caches.values()]
        self._owners = list(kv_caches.values())  # the views below do not keep the tensors alive
        self.layout = layout_fingerprint(list(kv_caches.values()), blocks)

    def view(self, layer: int, block: int) -> memoryview:
        base, stride, size = self._places[layer]
        return memoryview((ctypes.c_char * size).from_address(base + block * stride)).cast("B")

    def reserve(self, blocks: Sequence[int]) -> bool:
        return True

    def release(self, blocks: Sequence[int]) -> None:
        return

    def publish(self, layer: int, blocks: Sequence[int], done: Callable[[], None]) -> None:
        done()

    def landed(self, blocks: Sequence[int]) -> None:
        return

    def close(self) -> None:
        return


def block_ranges(tensor: Any, blocks: int) -> tuple[int, int, int]:
    """Address of block 0, distance between blocks, and bytes of a block."""
    by_block = by_block_first(tensor, blocks)
    one = by_block[0]
    if not one.is_contiguous():
        raise ValueError(
            f"a KV block of shape {tuple(one.shape)} has strides {one.stride()}: not one range of bytes. "
            "The connector asks vLLM for the layout LBHNC; this attention backend did not give it."
        )
    size = one.numel() * one.element_size()
    return int(by_block.data_ptr()), by_block.stride(0) * by_block.element_size(), size


def by_block_first(tensor: Any, blocks: int) -> Any:
    """A view with the block dimension first; where it is depends on the attention backend."""
    sizes = list(tensor.shape)
    if blocks not in sizes:
        raise ValueError(f"KV tensor of shape {tuple(sizes)} has no dimension of {blocks} blocks")
    return tensor.movedim(sizes.index(blocks), 0)


def layout_fingerprint(tensors: Sequence[Any], blocks: int) -> str:
    """Equal for engines whose blocks hold the same thing; their number of blocks may differ."""
    shapes = [[str(t.dtype), *by_block_first(t, blocks).shape[1:]] for t in tensors]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
