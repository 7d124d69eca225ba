"""KV on a GPU, as the transfer sees it: every block passes through a slot of pinned host memory.

Written against the V1 runner. After a layer's attention, its newly complete blocks are gathered on a side
stream that waits for the compute stream; the layer's watermark rises when the copy's event has completed. The
copies read blocks that their request holds, and a request that loses its blocks gets a new generation, so a
copy that comes too late is never announced. What only a GPU can show: that copies overlap the kernels.
"""

import ctypes
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvtransfer.transfer.memory import by_block_first, layout_fingerprint


class StagedBlockMemory:
    """Also runs on the CPU, without streams, so that its bookkeeping can be tested there."""

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
        self._lock = threading.Lock()
        self._free = list(range(staging_blocks))
        self._slots: dict[int, int] = {}  # block -> slot
        self._users: Counter[int] = Counter()  # block -> transfers that use its slot
        self._copies: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._announce, name="kv-staging", daemon=True).start()

    def reserve(self, blocks: Sequence[int]) -> bool:
        """Slots for these blocks; all or none. A block two transfers share has one slot."""
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
        """Copies a layer's blocks to their slots; `done` is called when they are there."""
        if blocks:
            self._gather(layer, blocks)
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copies.put((event, done))

    def landed(self, blocks: Sequence[int]) -> None:
        """Received blocks are in their slots: returns when they are on the device."""
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
