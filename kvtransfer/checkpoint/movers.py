"""How the bytes of blocks leave the accelerator, and return to it."""

from collections.abc import Sequence
from typing import Protocol

import torch

BOUNCE_BLOCKS = 64


class Mover(Protocol):
    """Called from the copier's thread only. A *piece* is a copy of blocks of one layer, in host memory."""

    def from_device(self, blocks: list[int]) -> list[torch.Tensor]:
        """Pieces by layer; good until the next call."""

    def to_device(self, pieces: Sequence[torch.Tensor], blocks: list[int]) -> None:
        """Returns when the bytes are there."""


class HostMover:
    """KV in host memory already (CPU build)."""

    def __init__(self, device: list[torch.Tensor]) -> None:
        self._device = device

    def from_device(self, blocks: list[int]) -> list[torch.Tensor]:
        source = torch.tensor(blocks)
        return [layer.index_select(0, source) for layer in self._device]

    def to_device(self, pieces: Sequence[torch.Tensor], blocks: list[int]) -> None:
        target = torch.tensor(blocks)
        for layer, piece in zip(self._device, pieces, strict=True):
            layer.index_copy_(0, target, piece)


class CudaMover:
    """A side stream gathers blocks on the device and copies them to pinned memory in one piece a layer.

    Written against the V1 runner. What only a GPU can show: that the copies overlap the model's kernels, and
    the time a gather takes. Order: the blocks of a store were confirmed by a step whose results are back, and
    those of a load belong to a request that does not run yet, so neither races the compute stream.
    """

    def __init__(self, device: list[torch.Tensor]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream()
        self._bounce = [
            torch.empty((BOUNCE_BLOCKS, *layer.shape[1:]), dtype=layer.dtype, pin_memory=True)
            for layer in device
        ]

    def from_device(self, blocks: list[int]) -> list[torch.Tensor]:
        pieces = [bounce[: len(blocks)] for bounce in self._bounce]
        with torch.cuda.stream(self._stream):
            for layer, piece in zip(self._device, pieces, strict=True):
                source = torch.tensor(blocks, device=layer.device)
                piece.copy_(layer.index_select(0, source), non_blocking=True)
        self._stream.synchronize()
        return pieces

    def to_device(self, pieces: Sequence[torch.Tensor], blocks: list[int]) -> None:
        with torch.cuda.stream(self._stream):
            for layer, bounce, piece in zip(self._device, self._bounce, pieces, strict=True):
                pinned = bounce[: len(blocks)]
                pinned.copy_(piece)
                target = torch.tensor(blocks, device=layer.device)
                layer.index_copy_(0, target, pinned.to(layer.device, non_blocking=True))
        self._stream.synchronize()


def mover_for(device: list[torch.Tensor]) -> Mover:
    return CudaMover(device) if device[0].is_cuda else HostMover(device)
