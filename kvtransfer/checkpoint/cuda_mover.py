"""Mover for GPUs: gathers blocks on the device, and copies them to and from their rows on the host.

Each launch takes Python's lock from the model, so launches per byte must be few. A unit of many blocks takes
one launch for each layer and one for each run of consecutive slots.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from kvtransfer.checkpoint.copy_orders import BlockCopy
from kvtransfer.checkpoint.disk_slots import DiskSlots
from kvtransfer.checkpoint.host_slots import THREADS, CudaRegistrar, HostMover, HostSlots, Mover, block_bytes
from kvtransfer.side_stream import Launched, SideStream, cuda_of
from kvtransfer.transfer.kv_memory import byte_rows

UNIT_BYTES = 32 << 20  # takes as long on the bus as a hundred launches
UNITS_A_THREAD = 2  # in each piece (see `Mover`), which ends when its slowest thread has ended
LANES = 2  # one gathers or scatters on the device while the other copies over the bus

Placed = tuple[list[BlockCopy], int]  # a unit, and the index of its first block in the piece


class Lane:
    """Side stream, with device memory for one *unit*: blocks that are copied together.

    Work on the stream runs in order, so the memory is free again when the next unit uses it.
    """

    def __init__(self, cuda: Any | None, layers: list[torch.Tensor], blocks: int) -> None:
        like = layers[0]
        widths = [layer.shape[1] for layer in layers]
        rows = torch.empty((blocks, sum(widths)), dtype=like.dtype, device=like.device)
        self.stream = SideStream(cuda)
        self._index = torch.empty(blocks, dtype=torch.int64, device=like.device)
        self._layers = layers
        self._bytes = rows.view(torch.uint8)
        self._places = rows.split(widths, dim=1)  # for each layer, its part of all rows
        self._first: dict[int, list[torch.Tensor]] = {}  # count -> the first `count` rows of each place

    def down(self, blocks: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Launch the copies of a unit from the device to its rows on the host."""
        index = self._indexed(blocks)
        for layer, place in zip(self._layers, self._places_of(len(blocks)), strict=True):
            torch.index_select(layer, 0, index, out=place)
        at = 0
        for run in rows:
            run.copy_(self._bytes[at : at + len(run)], non_blocking=True)
            at += len(run)

    def up(self, blocks: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Launch the copies of a unit from its rows on the host to the device."""
        at = 0
        for run in rows:
            self._bytes[at : at + len(run)].copy_(run, non_blocking=True)
            at += len(run)
        index = self._indexed(blocks)
        for layer, place in zip(self._layers, self._places_of(len(blocks)), strict=True):
            layer.index_copy_(0, index, place)

    def _indexed(self, blocks: torch.Tensor) -> torch.Tensor:
        index = self._index[: len(blocks)]
        index.copy_(blocks, non_blocking=True)
        return index

    def _places_of(self, count: int) -> list[torch.Tensor]:
        """Return each layer's part of the first `count` rows, as cached views: a new view costs a call."""
        if count not in self._first:
            self._first[count] = [place[:count] for place in self._places]
        return self._first[count]


class CudaMover(Mover):
    """Moves units of blocks on side streams.

    A digest covers a row on the host. A store computes it when the bytes have arrived; a load computes it
    again while the row is being copied. So a load notices that host memory has changed, or that a row holds
    another block or an older one. Changes on the bus or the device are left to their own checks (CRC, ECC).

    A store does not wait for the model, because its blocks were confirmed by a step whose results are back. A
    load waits for the kernels launched before its order: those of an aborted step may still write its blocks.
    """

    takes_cores = False

    def __init__(self, device: list[torch.Tensor], cuda: Any | None) -> None:
        rows = [byte_rows(layer, len(layer)) for layer in device]
        number = torch.int64 if all(layer.dtype == torch.int64 for layer in rows) else torch.uint8
        layers = [layer.view(number) for layer in rows]
        self._unit = max(1, UNIT_BYTES // block_bytes(device))
        self.at_once = THREADS * UNITS_A_THREAD * self._unit
        self._lanes = [Lane(cuda, layers, self._unit) for _ in range(LANES)]
        self._turns = itertools.count()
        # One entry for each block of a piece, so that none is overwritten before its copy is done.
        self._indices = torch.empty(self.at_once, dtype=torch.int64, pin_memory=device[0].is_cuda)
        self._index_rows = self._indices.numpy()

    def mark(self) -> None:
        for lane in self._lanes:
            lane.stream.mark()

    def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
        """Copy blocks to the host in units. While one unit is copied, the previous one is hashed."""
        under_way: deque[tuple[list[BlockCopy], Launched]] = deque()
        try:
            for unit, place in self._units(copies, at):
                lane, blocks, rows = self._prepared(memory, unit, place)
                with lane.stream.launched_here() as launched:
                    lane.down(blocks, rows)
                under_way.append((unit, launched))
                if len(under_way) > 1:
                    self._arrive(memory, *under_way.popleft())
            while under_way:
                self._arrive(memory, *under_way.popleft())
        finally:
            for _, launched in under_way:  # after an exception: the rows will be reused
                launched.wait()

    def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
        good: set[BlockCopy] = set()
        under_way: list[Launched] = []
        try:
            for unit, place in self._units(memory.known(copies), at):
                lane, blocks, rows = self._prepared(memory, unit, place)
                with lane.stream.launched_here(after_mark=True) as launched:
                    lane.up(blocks, rows)
                under_way.append(launched)
                good.update(copy for copy in unit if memory.holds(copy, memory.digest(copy)))
        finally:
            for launched in under_way:
                launched.wait()
        return [copy for copy in copies if copy in good]

    def _units(self, copies: list[BlockCopy], at: int) -> Iterator[Placed]:
        """Split `copies` into units in the order of slots, because consecutive slots need only one copy."""
        ordered = sorted(copies, key=lambda copy: copy.slot)
        for first in range(0, len(ordered), self._unit):
            yield ordered[first : first + self._unit], at + first

    def _prepared(
        self, memory: HostSlots, unit: list[BlockCopy], place: int
    ) -> tuple[Lane, torch.Tensor, list[torch.Tensor]]:
        """Return the next lane, the unit's block ids and its runs of rows. Takes no stream's lock."""
        end = place + len(unit)
        self._index_rows[place:end] = [copy.block for copy in unit]
        rows = [memory.tensor[first : first + count] for first, count in memory.runs(unit)]
        return self._lanes[next(self._turns) % LANES], self._indices[place:end], rows

    def _arrive(self, memory: HostSlots, unit: list[BlockCopy], launched: Launched) -> None:
        launched.wait()
        memory.seal(unit)


def mover_for(device: list[torch.Tensor]) -> Mover:
    cuda = cuda_of(device[0])
    return CudaMover(device, cuda) if cuda is not None else HostMover(device)


def memory_for(
    device: list[torch.Tensor], slots: int, disk: DiskSlots | None = None, scratch: int = 0
) -> HostSlots:
    registry = CudaRegistrar(device[0].device) if device[0].is_cuda else None
    return HostSlots(slots, block_bytes(device), registry, disk, scratch)
