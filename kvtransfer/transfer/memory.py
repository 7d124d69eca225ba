"""The bytes of KV blocks, as the transfer sees them."""

import ctypes
import hashlib
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class BlockMemory:
    """Where blocks are read from and written to. One block of one layer is one range of bytes."""

    layers: tuple[str, ...]
    layout: str

    def view(self, layer: int, block: int) -> memoryview:
        """The bytes of a block, to send or to receive into."""
        raise NotImplementedError

    def reserve(self, blocks: Sequence[int]) -> bool:
        """Before blocks are viewed; whether they fit: all or none."""
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """They are viewed no more."""

    def publish(self, layer: int, blocks: Sequence[int], done: Callable[[], None]) -> None:
        """A layer of these blocks was computed; `done` is called when `view` shows it."""
        done()

    def mark(self) -> None:
        """What was launched up to now comes before what `landed` writes from now on. Called by the thread
        that launches steps: the one before may still write to blocks that were freed and given to others."""

    def landed(self, blocks: Sequence[int]) -> None:
        """They were received; returns when the model can read them."""

    def close(self) -> None:
        """Nothing is published any more."""


class HostBlockMemory(BlockMemory):
    """KV tensors in host memory (CPU build), used in place: nothing is copied on either side."""

    def __init__(self, kv_caches: Mapping[str, Any], blocks: int) -> None:
        self.layers = tuple(kv_caches)
        self._places = [block_ranges(tensor, blocks) for tensor in kv_caches.values()]
        self._owners = list(kv_caches.values())  # the views below do not keep the tensors alive
        self.layout = layout_fingerprint(list(kv_caches.values()), blocks)

    def view(self, layer: int, block: int) -> memoryview:
        base, stride, size = self._places[layer]
        return memoryview((ctypes.c_char * size).from_address(base + block * stride)).cast("B")


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


class StagedBlockMemory(BlockMemory):
    """KV on a GPU: every block passes through a slot of pinned host memory.

    Written against the V1 runner. After a layer's attention, its newly complete blocks are gathered on a side
    stream that waits for the compute stream; the layer's watermark rises when the copy's event has completed.
    The copies read blocks that their request holds, and a request that loses its blocks gets a new
    generation, so a copy that comes too late is never announced. What only a GPU can show: that copies
    overlap the kernels. Also runs on the CPU, without streams, so that its bookkeeping can be tested there.
    """

    def __init__(self, kv_caches: Mapping[str, Any], blocks: int, staging_blocks: int) -> None:
        tensors = list(kv_caches.values())
        self.layers = tuple(kv_caches)
        self.layout = layout_fingerprint(tensors, blocks)
        self._device = [by_block_first(tensor, blocks) for tensor in tensors]
        self._cuda = bool(tensors[0].is_cuda)
        self._rows = [
            torch.empty((staging_blocks, *t.shape[1:]), dtype=t.dtype, pin_memory=self._cuda)
            for t in self._device
        ]
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._launched = torch.cuda.Event() if self._cuda else None
        self._lock = threading.Lock()
        self._free = list(range(staging_blocks))
        self._slots: dict[int, int] = {}  # block -> slot
        self._users: Counter[int] = Counter()  # block -> transfers that use its slot
        self._copies: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._announce, name="kv-staging", daemon=True).start()

    def reserve(self, blocks: Sequence[int]) -> bool:
        """A block two transfers share has one slot."""
        with self._lock:
            new = [block for block in set(blocks) if block not in self._slots]
            if len(new) > len(self._free):
                return False
            for block in new:
                self._slots[block] = self._free.pop()
            self._users.update(blocks)
            return True

    def release(self, blocks: Sequence[int]) -> None:
        with self._lock:
            for block in blocks:
                self._users[block] -= 1
                if not self._users[block]:
                    del self._users[block]
                    self._free.append(self._slots.pop(block))

    def view(self, layer: int, block: int) -> memoryview:
        row = self._rows[layer][self._slots[block]]
        size = row.numel() * row.element_size()
        return memoryview((ctypes.c_char * size).from_address(row.data_ptr())).cast("B")

    def publish(self, layer: int, blocks: Sequence[int], done: Callable[[], None]) -> None:
        if blocks:
            self._gather(layer, blocks)
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copies.put((event, done))

    def mark(self) -> None:
        if self._cuda:
            launched = torch.cuda.Event()
            launched.record()
            self._launched = launched

    def landed(self, blocks: Sequence[int]) -> None:
        if self._stream is not None:
            self._stream.wait_event(self._launched)
        slots = torch.tensor([self._slots[block] for block in blocks])
        with torch.cuda.stream(self._stream):
            for device, rows in zip(self._device, self._rows, strict=True):
                target = torch.tensor(blocks, device=device.device)
                device.index_copy_(0, target, rows.index_select(0, slots).to(device.device))
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        self._copies.put(None)

    def _gather(self, layer: int, blocks: Sequence[int]) -> None:
        device, rows = self._device[layer], self._rows[layer]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            gathered = device.index_select(0, torch.tensor(blocks, device=device.device))
            for index, block in enumerate(blocks):
                rows[self._slots[block]].copy_(gathered[index], non_blocking=True)

    def _announce(self) -> None:
        while (copy := self._copies.get()) is not None:
            event, done = copy
            if event is not None:
                event.synchronize()
            done()
