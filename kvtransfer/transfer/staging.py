"""Staging: KV transferred to or from an accelerator passes through a few slots of pinned memory.

A slot holds some blocks of one layer: when sending, from gathering until they are sent; when receiving, until
they are on the accelerator. So a prompt of any length passes through a window of a few hundred MiB.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvtransfer.config import ConnectorConfigError
from kvtransfer.metrics import Reason
from kvtransfer.side_stream import SideStream
from kvtransfer.transfer.kv_memory import (
    ONE,
    PIECE_BYTES,
    BlockMemory,
    byte_rows,
    layout_fingerprint,
)
from kvtransfer.transfer.wire import TransferRefused

SLOT_BYTES = PIECE_BYTES  # a few tenths of a millisecond on the bus, much longer than starting a copy
SLOTS = 8  # least number of slots, unless a block needs a larger slot: this many peers may be slow
ALIGNED = 4096


class SlotWindow:
    """Assigns slots in the order in which threads ask. It has neither memory nor locks.

    Each thread asks for one slot at a time, so that long transfers do not delay short ones. The last quarter
    of the slots is for receivers. A sender keeps its slot until the receiver has one, so two engines that
    send to each other would otherwise block each other.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._sends = slots - max(1, slots // 4)  # most slots of senders
        self._sending = 0
        self._asked: dict[int, bool] = {}  # ticket -> whether it sends, in the order of asking
        self._held: dict[int, tuple[int, bool]] = {}
        self._tickets = 0

    def ask(self, sends: bool) -> int:
        """Ask for a slot; return a ticket, which has to be given back with `end`."""
        self._tickets += 1
        self._asked[self._tickets] = sends
        self._hand_out()
        return self._tickets

    def slot_of(self, ticket: int) -> int | None:
        """Return the slot of a ticket, or None while it waits."""
        held = self._held.get(ticket)
        return held[0] if held is not None else None

    def end(self, ticket: int) -> None:
        """Give back a ticket, and free its slot if it has one."""
        if ticket in self._held:
            slot, sends = self._held.pop(ticket)
            self._free.append(slot)
            self._sending -= sends
        else:
            del self._asked[ticket]
        self._hand_out()

    def _hand_out(self) -> None:
        for ticket, sends in list(self._asked.items()):
            if not self._free:
                return
            if sends and self._sending == self._sends:
                continue
            del self._asked[ticket]
            self._held[ticket] = self._free.pop(), sends
            self._sending += sends


class StagedBlockMemory(BlockMemory):
    """KV memory of an accelerator whose transfers pass through pinned slots.

    Tests run it on the CPU, without streams. A layer's hook only records an event. When the event has
    completed, the layer's blocks may be read; their request or the lease keeps them until they are sent.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, Any],
        blocks: int,
        window_bytes: int,
        cuda: Any | None = None,
        groups: Mapping[str, int] = ONE,
    ) -> None:
        tensors = list(kv_caches.values())
        self.layers = tuple(kv_caches)
        self.groups = tuple(groups.get(layer, 0) for layer in kv_caches)
        self.layout = layout_fingerprint(tensors, blocks)
        self._device = [byte_rows(tensor, blocks) for tensor in tensors]
        self._sizes = [rows.shape[1] * rows.element_size() for rows in self._device]
        pinned = bool(tensors[0].is_cuda)
        self.piece_bytes = slot_bytes(window_bytes, max(self._sizes))
        self.slots = window_bytes // self.piece_bytes
        if self.slots < 2:
            raise ConnectorConfigError(
                f"{window_bytes} bytes of staging hold less than two of this model's blocks of "
                f"{max(self._sizes)} bytes a layer and rank: raise staging_gib"
            )
        most = self.piece_bytes // min(self._sizes)
        self._memory = torch.empty((self.slots, self.piece_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._views = [memoryview(slot.numpy()) for slot in self._memory]
        self._indices = torch.empty((self.slots, most), dtype=torch.int64, pin_memory=pinned)
        self._window = SlotWindow(self.slots)
        self._changed = threading.Condition()
        self._to_slots, self._to_device = (SideStream(cuda) for _ in range(2))
        # Device memory in which the blocks of one call are contiguous, so that one copy crosses the bus. Work
        # on a stream runs in order, so the memory is free again when the next call uses it.
        self._leaving, self._arriving = (
            torch.empty(self.piece_bytes, dtype=torch.uint8, device=tensors[0].device) for _ in range(2)
        )
        self._computed: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._announce, name="kv-staging", daemon=True).start()

    def block_bytes(self, layer: int) -> int:
        return int(self._sizes[layer])

    def publish(self, done: Callable[[], None]) -> None:
        self._computed.put((self._to_slots.launched(), done))

    def mark(self) -> None:
        self._to_device.mark()

    @contextmanager
    def outgoing(self, layer: int, blocks: Sequence[int], wait_s: float) -> Iterator[list[memoryview]]:
        with self._slot(True, wait_s) as slot:
            rows, together = self._piece(layer, len(blocks), slot, self._leaving)
            with self._to_slots.launching():
                index = self._index(slot, blocks)
                torch.index_select(self._device[layer], 0, index, out=together)
                rows.copy_(together, non_blocking=True)
            yield self._filled(layer, len(blocks), slot)

    @contextmanager
    def incoming(self, layer: int, blocks: Sequence[int], wait_s: float) -> Iterator[list[memoryview]]:
        with self._slot(False, wait_s) as slot:
            yield self._filled(layer, len(blocks), slot)
            rows, together = self._piece(layer, len(blocks), slot, self._arriving)
            with self._to_device.launching(after_mark=True):
                together.copy_(rows, non_blocking=True)
                self._device[layer].index_copy_(0, self._index(slot, blocks), together)

    def close(self) -> None:
        self._computed.put(None)

    @contextmanager
    def _slot(self, sends: bool, wait_s: float) -> Iterator[int]:
        with self._changed:
            ticket = self._window.ask(sends)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._window.slot_of(ticket) is not None, wait_s)
                slot = self._window.slot_of(ticket)
            if slot is None:
                raise TransferRefused(
                    Reason.NO_CAPACITY, f"no slot of the staging window in {wait_s:g} s: raise staging_gib"
                )
            yield slot
        finally:
            with self._changed:
                self._window.end(ticket)
                self._changed.notify_all()

    def _piece(
        self, layer: int, count: int, slot: int, together: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory for `count` blocks, a row each: in the slot, and on the accelerator."""
        device, end = self._device[layer], count * self._sizes[layer]
        rows, piece = (
            memory[:end].view(device.dtype).view(count, -1) for memory in (self._memory[slot], together)
        )
        return rows, piece

    def _filled(self, layer: int, count: int, slot: int) -> list[memoryview]:
        return [self._views[slot][: count * self._sizes[layer]]]

    def _index(self, slot: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return block ids as a tensor on the accelerator, without waiting for its copy."""
        index = self._indices[slot, : len(blocks)]
        index.numpy()[:] = blocks
        return index.to(self._device[0].device, non_blocking=True)

    def _announce(self) -> None:
        self._to_slots.adopt_thread()
        while (computed := self._computed.get()) is not None:
            event, done = computed
            if event is not None:
                event.synchronize()
            done()


def slot_bytes(window_bytes: int, block_bytes: int) -> int:
    """Return the size of a slot, given the window's size and the largest block."""
    usual = min(SLOT_BYTES, window_bytes // SLOTS // ALIGNED * ALIGNED)
    return max(usual, -(-block_bytes // ALIGNED) * ALIGNED)
