"""Host memory for blocks, and how their bytes leave the accelerator and return to it.

A *piece* is some blocks in host memory: a row a block, in it its bytes of each layer, one after the other.
The copier's thread shares Python's lock with the model's: what copies bytes lets go of it meanwhile. NumPy's
calls do, and they start no threads, as torch's do.
"""

from abc import ABC, abstractmethod
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtransfer.checkpoint.scheduler import BlockCopy
from kvtransfer.side_stream import SideStream, cuda_of
from kvtransfer.transfer.memory import byte_rows

Piece = npt.NDArray[np.uint8]


class HostSlots:
    """One row a slot, with what must be in it. Rows are plain memory, used page by page as slots fill.

    The digest is of the bytes as they came, before they are in the rows, and what is checked is the copy that
    goes back: whenever a row changes in between, it is found.
    """

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.rows: Piece = np.empty((slots, block_bytes), dtype=np.uint8)
        self.contents: dict[int, tuple[int, int]] = {}  # slot -> generation, digest

    def known(self, copies: list[BlockCopy]) -> list[BlockCopy]:
        """Those whose slots were last written for them."""
        return [c for c in copies if self.contents.get(c.slot, (None, 0))[0] == c.generation]

    def holds(self, copy: BlockCopy, digest: int) -> bool:
        """What came back is what was stored."""
        return self.contents[copy.slot][1] == digest

    def put(self, copies: list[BlockCopy], piece: Piece) -> None:
        digests = _digests(piece)
        whole(self.rows)[[copy.slot for copy in copies]] = whole(piece)
        for copy, digest in zip(copies, digests, strict=True):
            self.contents[copy.slot] = copy.generation, digest

    def take(self, copies: list[BlockCopy], bounce: Piece) -> list[BlockCopy]:
        """Those whose slots hold what they should; the first rows of `bounce` get their bytes."""
        known = self.known(copies)
        if not known:
            return []
        piece = bounce[: len(known)]
        np.take(whole(self.rows), [copy.slot for copy in known], out=whole(piece), mode="clip")
        digests = _digests(piece)
        good = [n for n, copy in enumerate(known) if self.holds(copy, digests[n])]
        if len(good) < len(known):
            piece[: len(good)] = piece[good]
        return [known[n] for n in good]


def whole(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Each row as one thing: numpy copies it in one go, and not byte by byte."""
    return rows.view(f"V{rows.shape[1]}")[:, 0]


def _digests(piece: Piece) -> list[int]:
    """One for each block."""
    return [xxhash.xxh3_64_intdigest(block.data) for block in piece]


HOST_PART_BYTES = 2 << 20  # a rest beside steps comes after so many
CUDA_PART_BYTES = 8 << 20  # a few tenths of a millisecond on the bus: starting one is little beside it
THREADS = 4  # digests keep up with the bus


class Mover(ABC):
    """What moves blocks between the accelerator and the host. Called from threads of the copier, each with
    blocks of its own, the first of which is number `at` of those that are moved at once."""

    at_once: int  # blocks, by all threads
    takes_cores: bool  # what moves bytes is what the model computes with

    @abstractmethod
    def mark(self) -> None:
        """What was launched up to now comes before what `load` writes from now on. Called by the thread that
        launches steps."""

    @abstractmethod
    def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
        """Returns when they are in their slots."""

    @abstractmethod
    def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
        """Those whose slots hold what they should: their bytes are there when it returns. Blocks of others
        may have been written, too."""


class HostMover(Mover):
    """KV in host memory already (CPU build): one pass, bytes are copied and hashed while they are in a core's
    cache."""

    takes_cores = True

    def __init__(self, device: list[torch.Tensor]) -> None:
        self._layers = [layer.view(len(layer), -1).view(torch.uint8).numpy() for layer in device]
        ends = list(accumulate(layer.shape[1] for layer in self._layers))
        self._places = [slice(*ends_at) for ends_at in pairwise([0, *ends])]  # of each layer in a row
        self.at_once = at_once(device, HOST_PART_BYTES)

    def mark(self) -> None:
        """What was launched is done."""

    def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
        for copy in copies:
            row, digest = memory.rows[copy.slot], xxhash.xxh3_64()
            for layer, place in zip(self._layers, self._places, strict=True):
                came = layer[copy.block]
                row[place] = came
                digest.update(came)  # the block itself, not its copy
            memory.contents[copy.slot] = copy.generation, digest.intdigest()

    def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
        good = []
        for copy in memory.known(copies):
            row, digest = memory.rows[copy.slot], xxhash.xxh3_64()
            for layer, place in zip(self._layers, self._places, strict=True):
                back = layer[copy.block]
                back[:] = row[place]
                digest.update(back)
            if memory.holds(copy, digest.intdigest()):
                good.append(copy)
        return good


class CudaMover(Mover):
    """Side streams gather blocks on the device and copy them to pinned memory in one piece, and back.

    What only a GPU can show: that the copies overlap the model's kernels, and the time a gather takes. Order:
    the blocks of a store were confirmed by a step whose results are back, and those of a load belong to a
    request that does not run yet.
    """

    takes_cores = False

    def __init__(self, device: list[torch.Tensor], cuda: Any | None) -> None:
        rows = [byte_rows(layer, len(layer)) for layer in device]
        unit = torch.int64 if all(layer.dtype == torch.int64 for layer in rows) else torch.uint8
        self._device = [layer.view(unit) for layer in rows]
        self._from, self._to = SideStream(cuda), SideStream(cuda)
        self.at_once = at_once(device, CUDA_PART_BYTES)
        shape = self.at_once, block_bytes(device)
        self._pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=device[0].is_cuda)
        self._together = torch.empty(shape, dtype=torch.uint8, device=device[0].device)
        self._indices = torch.empty(shape[0], dtype=torch.int64, pin_memory=device[0].is_cuda)
        widths = [layer.shape[1] for layer in self._device]
        self._layers = self._together.view(unit).split(widths, dim=1)  # of each row
        self._bounce: Piece = self._pinned.numpy()

    def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
        memory.put(copies, self.from_device([copy.block for copy in copies], at))

    def from_device(self, blocks: list[int], at: int = 0) -> Piece:
        """The rows: good until the next call for them."""
        rows = slice(at, at + len(blocks))
        with self._from.launching():
            source = self._index(blocks, rows)
            for layer, together in zip(self._device, self._layers, strict=True):
                together[rows].copy_(layer.index_select(0, source))
            self._pinned[rows].copy_(self._together[rows], non_blocking=True)
        return self._bounce[rows]

    def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
        good = memory.take(copies, self._bounce[at:])
        if good:
            self.to_device([copy.block for copy in good], at)
        return good

    def mark(self) -> None:
        self._to.mark()

    def to_device(self, blocks: list[int], at: int = 0) -> None:
        rows = slice(at, at + len(blocks))
        with self._to.launching(after_mark=True):
            self._together[rows].copy_(self._pinned[rows], non_blocking=True)
            target = self._index(blocks, rows)
            for layer, together in zip(self._device, self._layers, strict=True):
                layer.index_copy_(0, target, together[rows])

    def _index(self, blocks: list[int], rows: slice) -> torch.Tensor:
        """On the device; from memory of the rows' own, so that nobody waits for its copy."""
        self._indices[rows].numpy()[:] = blocks
        return self._indices[rows].to(self._together.device, non_blocking=True)


def at_once(device: list[torch.Tensor], nbytes: int) -> int:
    """As many blocks as parts of so many bytes have, one for each thread."""
    return THREADS * max(1, nbytes // block_bytes(device))


def block_bytes(device: list[torch.Tensor]) -> int:
    return sum(layer[0].nbytes for layer in device)


def mover_for(device: list[torch.Tensor]) -> Mover:
    cuda = cuda_of(device[0])
    return CudaMover(device, cuda) if cuda is not None else HostMover(device)
