"""Memory that changes its use: parameters of layers, which give way and come back, and KV, which grows.

A dropped parameter keeps its tensor, without bytes. A layer's KV has address space for the largest split from
the start, and pages only where something was written. So every view that somebody has of a block stays good
(transfers, the checkpoint), and nothing is copied to grow.

On the CPU build. A GPU needs the same of the driver's virtual memory; that is not written.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from workers.overload.errors import OverloadConfigError

_ALIGNED = 64
_NO_RESERVE = 0x4000  # Linux: address space that is not counted before it is written


class LayerWeights:
    """Parameters of a model's layers, and a copy of them that outlives a drop: a file without a name, whose
    pages the system may write out. So no peer is needed to restore."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = [list(layer.parameters()) for layer in layers]
        for index, parameters in enumerate(self._layers):
            if any(one.untyped_storage().nbytes() != one.nbytes for one in parameters):
                raise OverloadConfigError(
                    f"parameters of layer {index} share memory with others: they cannot be dropped"
                )
        sizes = [_aligned(one.nbytes) for parameters in self._layers for one in parameters]
        self._copies = _copies_of([p for parameters in self._layers for p in parameters], sum(sizes))

    def __len__(self) -> int:
        return len(self._layers)

    def layer_bytes(self, index: int) -> int:
        return sum(copy.nbytes for copy in self._copies_of_layer(index))

    def drop(self, layers: Iterable[int]) -> None:
        for index in layers:
            for parameter in self._layers[index]:
                parameter.untyped_storage().resize_(0)

    def restore(self, layers: Iterable[int]) -> None:
        for index in layers:
            for parameter, copy in zip(self._layers[index], self._copies_of_layer(index), strict=True):
                parameter.untyped_storage().resize_(copy.nbytes)
                parameter.data.copy_(copy)

    def held_bytes(self) -> int:
        return sum(p.untyped_storage().nbytes() for parameters in self._layers for p in parameters)

    def _copies_of_layer(self, index: int) -> list[torch.Tensor]:
        before = sum(map(len, self._layers[:index]))
        return self._copies[before : before + len(self._layers[index])]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _copies_of(parameters: Sequence[torch.Tensor], nbytes: int) -> list[torch.Tensor]:
    handle, path = tempfile.mkstemp(prefix="conserve-layers-")
    try:
        os.ftruncate(handle, nbytes)
        whole = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        os.close(handle)
        os.unlink(path)
    copies, at = [], 0
    for parameter in parameters:
        place = whole[at : at + parameter.nbytes]
        copies.append(place.view(parameter.dtype).view(parameter.shape).copy_(parameter.data))
        at += _aligned(parameter.nbytes)
    return copies


class LayerKv:
    """KV of one layer, a row a block, in reserved address space."""

    def __init__(self, first: torch.Tensor, rows: int) -> None:
        """`first`: the tensor that vLLM allocated, from which shape and type are taken."""
        if not first[0].is_contiguous():
            raise OverloadConfigError("this attention backend does not keep a block of a layer in one piece")
        self.row_bytes = int(first[0].nbytes)
        self._map = mmap.mmap(
            -1, rows * self.row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        )
        plain = torch.frombuffer(self._map, dtype=torch.uint8)
        self._rows = plain.view(first.dtype).view(rows, *first.shape[1:])

    def view(self, rows: int) -> torch.Tensor:
        return self._rows[:rows]

    def forget(self, first: int, end: int) -> None:
        """Rows from `first` up to `end`: their pages go back to the system."""
        start = -(-first * self.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = end * self.row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


class ReservedKv:
    """KV of all layers, in the order of the layers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rows: int) -> None:
        """`rows`: of each layer in the largest split."""
        self.names = tuple(tensors)
        self.rows = rows
        self._layers = [LayerKv(tensor, rows) for tensor in tensors.values()]

    @property
    def row_bytes(self) -> int:
        return max(layer.row_bytes for layer in self._layers)

    def views(self, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, layer.view(rows)) for name, layer in zip(self.names, self._layers, strict=True))

    def read(self, layer: int, rows: Sequence[int]) -> torch.Tensor:
        return self._layers[layer].view(self.rows)[list(rows)]

    def write(self, layer: int, rows: Sequence[int], values: torch.Tensor) -> None:
        self._layers[layer].view(self.rows)[list(rows)] = values

    def move(self, layers: Iterable[int], moves: Mapping[int, int], offset: int = 0) -> None:
        source, target = [row + offset for row in moves], [row + offset for row in moves.values()]
        for index in layers:
            self.write(index, target, self.read(index, source))

    def forget(self, layers: Iterable[int], first: int, end: int) -> None:
        for index in layers:
            self._layers[index].forget(first, end)
