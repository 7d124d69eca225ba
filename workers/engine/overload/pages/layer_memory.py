"""Memory of a model's layers: parameters that are dropped and restored, and KV that grows and shrinks.

The parameters of a layer are in one range of pages and its KV in another, with address space for the largest
split from the start. The pages of a dropped layer become KV rows of the kept layers. Tensors never move, so
that views of them stay valid (for transfers, the checkpoint and captured graphs), and growing copies nothing.

The host holds a copy of all parameters from the start, and a copy of the KV of dropped layers while it is
moved. So an engine can always restore its whole model without a peer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from workers.engine.overload.config import OverloadConfigError
from workers.engine.overload.pages.cpu_pages import PageError
from workers.engine.overload.pages.physical_memory import MappedRange, PhysicalMemory

ROWS_PER_MESSAGE = 64  # KV rows of a layer that are copied, or sent to a peer, at once
HostRows = tuple[list[int], torch.Tensor]  # numbers and content of rows
_ALIGNED = 256  # alignment of parameters in bytes, as in CUDA's own allocations


class PackedCopies(Protocol):
    """Copies of parameters in another format, with which layers compute on some devices."""

    def drop(self, layer: int) -> None:
        """Free the packed copies of a layer whose parameters are about to be dropped."""

    def make(self, layer: int) -> None:
        """Pack the parameters of a layer again after they were restored."""


class LayerWeights:
    """Parameters of all layers, kept in page ranges, with a copy on the host."""

    def __init__(
        self, layers: Sequence[torch.nn.Module], memory: PhysicalMemory, packed: PackedCopies | None = None
    ) -> None:
        """Move the parameters into pages. Views that were taken before still refer to the old memory."""
        self.memory, self._packed = memory, packed
        of_layers = [list(layer.parameters()) for layer in layers]
        for index, parameters in enumerate(of_layers):
            if any(one.untyped_storage().nbytes() != one.nbytes for one in parameters):
                raise OverloadConfigError(
                    f"parameters of layer {index} share memory with others: they cannot be dropped"
                )
        moved = [self._move(parameters) for parameters in of_layers]
        self.ranges = [pages for pages, _ in moved]
        self._copies = [copy for _, copy in moved]

    def __len__(self) -> int:
        return len(self.ranges)

    def layer_bytes(self, index: int) -> int:
        """Return the bytes that dropping a layer frees, in whole pages."""
        return self.ranges[index].pages * self.memory.page_bytes

    def drop(self, layers: Iterable[int]) -> None:
        for index in layers:
            if self._packed is not None:
                self._packed.drop(index)
            self.ranges[index].resize(0)

    def restore(self, layers: Iterable[int]) -> None:
        """Copy those of the layers that were dropped back from the host. Enough pages must be free."""
        missing = [index for index in layers if not self.ranges[index].mapped_bytes]
        for index in missing:
            pages = self.ranges[index]
            pages.resize(pages.tensor.nbytes)
            pages.tensor.copy_(self._copies[index], non_blocking=True)
        self.memory.driver.synchronize()
        if self._packed is not None:
            for index in missing:
                self._packed.make(index)

    def mapped_bytes(self) -> int:
        return sum(pages.mapped_bytes for pages in self.ranges)

    def _move(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[MappedRange, torch.Tensor]:
        """Move a layer's parameters into a new range, and return the range and the copy on the host."""
        nbytes = sum(_aligned(one.nbytes) for one in parameters)
        pages = self.memory.reserve(nbytes)
        self.memory.create(nbytes)
        pages.resize(nbytes)
        at = 0
        for parameter in parameters:
            place = pages.tensor[at : at + parameter.nbytes].view(parameter.dtype)
            here = place.as_strided(parameter.shape, parameter.stride())
            parameter.data = here.copy_(parameter.data)
            at += _aligned(parameter.nbytes)
        return pages, self.memory.driver.host_tensor(nbytes).copy_(pages.tensor)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class RowsUnmapped(PageError):
    """Error: a call named KV rows that have no memory now."""


class LayerKv:
    """KV of one layer with a row for each block, of which only the first rows have memory."""

    def __init__(self, like: torch.Tensor, rows: int, memory: PhysicalMemory) -> None:
        """Reserve `rows` rows of the shape and type of `like`, and map as many rows as `like` has."""
        if not like[0].is_contiguous():
            raise OverloadConfigError("this attention backend does not keep a block of a layer in one piece")
        self.row_bytes = int(like[0].nbytes)
        self._pages = memory.reserve(rows * self.row_bytes)
        self._rows = self._pages.tensor.view(like.dtype).view(rows, *like.shape[1:])
        memory.create(len(like) * self.row_bytes)
        self.resize(len(like))

    def view(self, rows: int) -> torch.Tensor:
        return self._rows[:rows]

    def resize(self, rows: int) -> None:
        """Map memory to the first `rows` rows. New rows are zero, because random bytes could be NaN."""
        self._pages.resize(rows * self.row_bytes, zero=True)

    def release(self, memory: PhysicalMemory) -> None:
        memory.release(self._pages)

    def read(self, rows: Sequence[int]) -> torch.Tensor:
        return self._rows[self._checked(rows)]

    def write(self, rows: Sequence[int], values: torch.Tensor) -> None:
        self._rows[self._checked(rows)] = values.to(self._rows.device)

    def _checked(self, rows: Sequence[int]) -> list[int]:
        """Return the rows, or raise if one has no memory, because access to it would end the process."""
        mapped = min(self._pages.mapped_bytes // self.row_bytes, len(self._rows))
        if rows and not 0 <= min(rows) <= max(rows) < mapped:
            raise RowsUnmapped(f"rows {min(rows)} to {max(rows)}: only {mapped} rows have memory")
        return list(rows)


class ReservedKv:
    """KV of all layers in their order. The KV of dropped layers may be on the host."""

    def __init__(self, like: Mapping[str, torch.Tensor], rows: int, memory: PhysicalMemory) -> None:
        """Reserve `rows` rows for each layer, as many as the largest split needs."""
        self.names, self.rows, self.memory = tuple(like), rows, memory
        self._layers = [LayerKv(tensor, rows, memory) for tensor in like.values()]
        self.row_bytes = max(layer.row_bytes for layer in self._layers)
        self.on_host: dict[int, list[HostRows]] = {}  # dropped layer -> rows that are on the host

    def views(self, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, layer.view(rows)) for name, layer in zip(self.names, self._layers, strict=True))

    def read(self, layer: int, rows: Sequence[int]) -> torch.Tensor:
        return self._layers[layer].read(rows)

    def write(self, layer: int, rows: Sequence[int], values: torch.Tensor) -> None:
        self._layers[layer].write(rows, values)

    def move(self, layers: Iterable[int], moves: Mapping[int, int]) -> None:
        for index in layers:
            self.write(index, list(moves.values()), self.read(index, list(moves)))

    def drop(self, layers: Iterable[int], rows: Sequence[int]) -> None:
        """Copy these rows of the layers to the host, and free the layers' pages."""
        for index in layers:
            pieces = (list(rows[at : at + ROWS_PER_MESSAGE]) for at in range(0, len(rows), ROWS_PER_MESSAGE))
            self.on_host[index] = [(piece, self.read(index, piece).to("cpu")) for piece in pieces]
            self._layers[index].resize(0)

    def forget_host(self) -> None:
        """Forget the rows on the host, because other members have them now."""
        self.on_host = {index: [] for index in self.on_host}

    def restore(self, rows: int) -> None:
        """Map `rows` rows to each dropped layer again, and fill in the rows that are on the host."""
        for index, pieces in self.on_host.items():
            self._layers[index].resize(rows)
            for piece, values in pieces:
                self.write(index, piece, values)
        self.on_host.clear()

    def resize(self, layers: Iterable[int], rows: int) -> None:
        for index in layers:
            self._layers[index].resize(rows)

    def release(self) -> None:
        """Release the address space of all layers, so that its pages become free."""
        for layer in self._layers:
            layer.release(self.memory)
