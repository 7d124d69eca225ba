"""Host memory for blocks, and how their bytes leave the accelerator and return to it.

A *piece* is some blocks in host memory: a row a block, in it its bytes of each layer, one after the other.
The copier's thread shares Python's lock with the model's: it makes few calls for many bytes, which let go of
the lock meanwhile. NumPy's do, and they start no threads, as torch's do.
"""

import itertools
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtransfer.checkpoint.scheduler import BlockCopy

Piece = npt.NDArray[np.uint8]


class HostSlots:
    """One row a slot, with what must be in it. Rows are plain memory, used page by page as slots fill.

    The digest is of the bytes as they came, before they are in the rows, and what is checked is the copy that
    goes back: whenever a row changes in between, it is found.
    """

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.rows: Piece = np.empty((slots, block_bytes), dtype=np.uint8)
        self.contents: dict[int, tuple[int, int]] = {}  # slot -> generation, digest

    def put(self, copies: list[BlockCopy], piece: Piece) -> None:
        digests = _digests(piece)
        self.rows[[copy.slot for copy in copies]] = piece
        for copy, digest in zip(copies, digests, strict=True):
            self.contents[copy.slot] = copy.generation, digest

    def take(self, copies: list[BlockCopy], bounce: Piece) -> list[BlockCopy]:
        """Those whose slots hold what they should; the first rows of `bounce` get their bytes."""
        known = [c for c in copies if self.contents.get(c.slot, (None, 0))[0] == c.generation]
        if not known:
            return []
        piece = self.gather(known, bounce)
        digests = _digests(piece)
        good = [n for n, copy in enumerate(known) if self.contents[copy.slot][1] == digests[n]]
        if len(good) < len(known):
            piece[: len(good)] = piece[good]
        return [known[n] for n in good]

    def gather(self, copies: list[BlockCopy], bounce: Piece) -> Piece:
        slots = [copy.slot for copy in copies]
        return np.take(self.rows, slots, axis=0, out=bounce[: len(slots)], mode="clip")


def _digests(piece: Piece) -> list[int]:
    """One for each block."""
    return [xxhash.xxh3_64_intdigest(block.data) for block in piece]


HOST_PIECE_BYTES = 4 << 20  # stays in the caches between its two copies
CUDA_PIECE_BYTES = 32 << 20  # a millisecond on the bus, so that starting one is little beside it


class Mover(ABC):
    """What moves blocks between the accelerator and a piece. Called from the copier's thread only."""

    bounce: Piece  # as many blocks as are moved at once
    takes_cores: bool  # what moves bytes is what the model computes with

    @abstractmethod
    def mark(self) -> None:
        """What was launched up to now comes before what `to_device` writes from now on. Called by the thread
        that launches steps."""

    @abstractmethod
    def from_device(self, blocks: list[int]) -> Piece:
        """In the first rows of `bounce`: good until the next call."""

    @abstractmethod
    def to_device(self, blocks: list[int]) -> None:
        """From the first rows of `bounce`. Returns when the bytes are there."""


class HostMover(Mover):
    """KV in host memory already (CPU build)."""

    takes_cores = True

    def __init__(self, device: list[torch.Tensor]) -> None:
        self._layers = [layer.view(len(layer), -1).view(torch.uint8).numpy() for layer in device]
        self._places = places(device)
        self.bounce = np.empty(bounce_shape(device, HOST_PIECE_BYTES), dtype=np.uint8)

    def mark(self) -> None:
        """What was launched is done."""

    def from_device(self, blocks: list[int]) -> Piece:
        piece: Piece = self.bounce[: len(blocks)]
        for layer, place in zip(self._layers, self._places, strict=True):
            piece[:, place] = layer[blocks]
        return piece

    def to_device(self, blocks: list[int]) -> None:
        piece = self.bounce[: len(blocks)]
        target = np.array(blocks)
        for layer, place in zip(self._layers, self._places, strict=True):
            layer[target] = piece[:, place]


class CudaMover(Mover):
    """A side stream gathers blocks on the device and copies them to pinned memory in one piece.

    Written against the V1 runner. What only a GPU can show: that the copies overlap the model's kernels, and
    the time a gather takes. Order: the blocks of a store were confirmed by a step whose results are back, and
    those of a load belong to a request that does not run yet. But the step before may still write there for
    the request that had them: a load waits until what was launched before it has been done.
    """

    takes_cores = False

    def __init__(self, device: list[torch.Tensor]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream()
        self._launched = torch.cuda.Event()
        shape = bounce_shape(device, CUDA_PIECE_BYTES)
        self._pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self.gathered = torch.empty(shape, dtype=torch.uint8, device=device[0].device)
        self._places = places(device)
        self.bounce: Piece = self._pinned.numpy()

    def from_device(self, blocks: list[int]) -> Piece:
        gathered = self.gathered[: len(blocks)]
        with torch.cuda.stream(self._stream):
            source = torch.tensor(blocks, device=gathered.device)
            for layer, place in zip(self._device, self._places, strict=True):
                _as_blocks(gathered[:, place], layer).copy_(layer.index_select(0, source))
            self._pinned[: len(blocks)].copy_(gathered, non_blocking=True)
        self._stream.synchronize()
        return self.bounce[: len(blocks)]

    def mark(self) -> None:
        launched = torch.cuda.Event()
        launched.record()
        self._launched = launched

    def to_device(self, blocks: list[int]) -> None:
        gathered = self.gathered[: len(blocks)]
        self._stream.wait_event(self._launched)
        with torch.cuda.stream(self._stream):
            gathered.copy_(self._pinned[: len(blocks)], non_blocking=True)
            target = torch.tensor(blocks, device=gathered.device)
            for layer, place in zip(self._device, self._places, strict=True):
                layer.index_copy_(0, target, _as_blocks(gathered[:, place], layer))
        self._stream.synchronize()


def _as_blocks(rows: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    return rows.view(layer.dtype).view(-1, *layer.shape[1:])


def places(device: list[torch.Tensor]) -> list[slice]:
    """Of each layer in a row."""
    ends = list(itertools.accumulate(layer[0].nbytes for layer in device))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def bounce_shape(device: list[torch.Tensor], nbytes: int) -> tuple[int, int]:
    block = block_bytes(device)
    return max(1, nbytes // block), block


def block_bytes(device: list[torch.Tensor]) -> int:
    return sum(layer[0].nbytes for layer in device)


def mover_for(device: list[torch.Tensor]) -> Mover:
    return CudaMover(device) if device[0].is_cuda else HostMover(device)
