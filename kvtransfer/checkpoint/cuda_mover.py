"""The mover of a GPU: blocks are gathered on the device, and cross the bus between there and their rows.

Python's lock is the model's too, and a launch takes it: what counts is launches a byte. A unit of many blocks
takes one launch a layer, and one for each run of slots that follow one another.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from kvtransfer.checkpoint.copy_orders import BlockCopy
from kvtransfer.checkpoint.host_slots import THREADS, CudaRegistry, HostMover, HostSlots, Mover, block_bytes
from kvtransfer.side_stream import Launched, SideStream, cuda_of
from kvtransfer.transfer.kv_memory import byte_rows

UNIT_BYTES = 32 << 20  # as long on the bus as a hundred launches take
UNITS_A_THREAD = 2  # in a piece: it is over when the slowest thread is
LANES = 2  # one gathers or scatters while the other has the bus

Placed = tuple[list[BlockCopy], int]  # a unit, and which of the blocks moved at once its first one is


class Lane:
    """A side stream, and memory of a unit's blocks on the device. The stream keeps its order: the next unit
    finds the memory free, whichever way it goes."""

    def __init__(self, cuda: Any | None, layers: list[torch.Tensor], blocks: int) -> None:
        like = layers[0]
        widths = [layer.shape[1] for layer in layers]
        rows = torch.empty((blocks, sum(widths)), dtype=like.dtype, device=like.device)
        self.stream = SideStream(cuda)
        self._index = torch.empty(blocks, dtype=torch.int64, device=like.device)
        self._layers = layers
        self._bytes = rows.view(torch.uint8)
        self._places = rows.split(widths, dim=1)  # of each layer in a row
        self._first: dict[int, list[torch.Tensor]] = {}  # so many rows of each place

    def down(self, blocks: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Launches a unit's way to its rows on the host."""
        index = self._indexed(blocks)
        for layer, place in zip(self._layers, self._places_of(len(blocks)), strict=True):
            torch.index_select(layer, 0, index, out=place)
        at = 0
        for run in rows:
            run.copy_(self._bytes[at : at + len(run)], non_blocking=True)
            at += len(run)

    def up(self, blocks: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Launches a unit's way from its rows."""
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
        """Views are calls of torch too, one a layer: they are kept."""
        if count not in self._first:
            self._first[count] = [place[:count] for place in self._places]
        return self._first[count]


class CudaMover(Mover):
    """Units of blocks on side streams.

    Digests are of rows on the host: of a store when its bytes have arrived there, of a load while the row is
    on its way. So what changes in host memory between them is found, also a row of another block or of
    another time. Not found is what changes on the bus or on the device, whose own checks (CRC, ECC) are for
    that, and what changes in a row between the digest's reading of it and the bus's.

    Order: the blocks of a store were confirmed by a step whose results are back, and those of a load belong
    to a request that does not run yet.
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
        # A place for each block that is moved at once: none is written again before its copy is done.
        self._indices = torch.empty(self.at_once, dtype=torch.int64, pin_memory=device[0].is_cuda)
        self._index_rows = self._indices.numpy()

    def mark(self) -> None:
        for lane in self._lanes:
            lane.stream.mark()

    def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
        """A unit is on its way while the one before is hashed."""
        memory.use(copies)
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
            for _, launched in under_way:  # it raised: their rows are others' next
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
        """In the order of slots: those that follow one another are one copy."""
        ordered = sorted(copies, key=lambda copy: copy.slot)
        for first in range(0, len(ordered), self._unit):
            yield ordered[first : first + self._unit], at + first

    def _prepared(
        self, memory: HostSlots, unit: list[BlockCopy], place: int
    ) -> tuple[Lane, torch.Tensor, list[torch.Tensor]]:
        """Whose turn it is, the blocks, and the runs of rows; before the stream's lock is taken."""
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


def memory_for(device: list[torch.Tensor], slots: int) -> HostSlots:
    registry = CudaRegistry(device[0].device) if device[0].is_cuda else None
    return HostSlots(slots, block_bytes(device), registry)
