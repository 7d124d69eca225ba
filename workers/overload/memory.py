"""Memory that changes its use: parameters of layers, which give way and come back, and KV, which grows.

A layer's parameters are in a range of pages of their own, and so is its KV, with address space for the
largest split from the start. A dropped layer's pages, those of its KV too, become rows of the layers that are
kept. Tensors stay where they are: every view that somebody has of a block is good while the block has memory
(transfers, the checkpoint, a captured graph), and nothing is copied to grow.

What must be had again meanwhile is on the host: parameters from the start, rows of KV of dropped layers while
an exchange lasts, until it is known whether it succeeds. Parameters come back either all at once, or layer by
layer in a thread beside serving (`ReturningWeights`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from workers.overload.config import OverloadConfigError
from workers.overload.pages import MappedRange, PhysicalMemory, RowsUnmapped

logger = logging.getLogger("conserve.workers.overload")

ROWS_AT_ONCE = 64  # of a layer's KV, in one copy and in one message
_ALIGNED = 256  # as CUDA's own allocations are


def pieces(rows: Sequence[int]) -> Iterator[list[int]]:
    return (list(rows[at : at + ROWS_AT_ONCE]) for at in range(0, len(rows), ROWS_AT_ONCE))


class MadeOfWeights:
    """What layers compute with that is made of their parameters, and has memory of its own. Here: nothing."""

    def drop(self, layer: int) -> None:
        """Its parameters leave."""

    def make(self, layer: int) -> None:
        """They are here again."""


class LayerWeights:
    """Parameters of a model's layers, moved into ranges, and a copy on the host that outlives a drop: no peer
    is needed to restore."""

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        memory: PhysicalMemory,
        made: MadeOfWeights | None = None,
    ) -> None:
        """Views of parameters that were taken before are of memory that is not the parameters' any more."""
        self._memory = memory
        self._made = made or MadeOfWeights()
        of_layers = [list(layer.parameters()) for layer in layers]
        for index, parameters in enumerate(of_layers):
            if any(one.untyped_storage().nbytes() != one.nbytes for one in parameters):
                raise OverloadConfigError(
                    f"parameters of layer {index} share memory with others: they cannot be dropped"
                )
        moved = [self._moved(parameters) for parameters in of_layers]
        self.ranges = [pages for pages, _ in moved]  # where the parameters of each layer are
        self._copies = [copy for _, copy in moved]

    def __len__(self) -> int:
        return len(self.ranges)

    def layer_bytes(self, index: int) -> int:
        """What dropping it gives: whole pages."""
        return self.ranges[index].pages * self._memory.page_bytes

    def drop(self, layers: Iterable[int]) -> None:
        for index in layers:
            self._made.drop(index)
            self.ranges[index].resize(0)

    def restore(self, layers: Iterable[int]) -> None:
        """Those that are dropped. Pages must be free for them: KV that grew has given them back."""
        missing = [index for index in layers if not self.ranges[index].mapped_bytes]
        for index in missing:
            pages = self.ranges[index]
            pages.resize(pages.tensor.nbytes)
            pages.tensor.copy_(self._copies[index], non_blocking=True)
        self._memory.driver.wait()
        for index in missing:
            self._made.make(index)

    def bring_back(self, index: int) -> bool:
        """The same for one of them while others compute; False where too few pages are free for it."""
        pages = self.ranges[index]
        if pages.mapped_bytes:
            return True
        if pages.pages > self._memory.free_pages:
            return False
        pages.resize(pages.tensor.nbytes)
        try:
            self._memory.driver.copy_beside(pages.tensor, self._copies[index])
            self._made.make(index)
        except BaseException:
            self.drop([index])  # or it would pass for one that is back
            raise
        return True

    def held_bytes(self) -> int:
        return sum(pages.mapped_bytes for pages in self.ranges)

    def _moved(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[MappedRange, torch.Tensor]:
        """A layer's parameters, one behind the other, and their copy on the host."""
        nbytes = sum(_aligned(one.nbytes) for one in parameters)
        pages = self._memory.reserve(nbytes)
        self._memory.create(nbytes)
        pages.resize(nbytes)
        at = 0
        for parameter in parameters:
            place = pages.tensor[at : at + parameter.nbytes].view(parameter.dtype)
            here = place.as_strided(parameter.shape, parameter.stride())
            parameter.data = here.copy_(parameter.data)
            at += _aligned(parameter.nbytes)
        copy = self._memory.driver.host(nbytes).copy_(pages.tensor)
        self._memory.driver.reclaim()
        return pages, copy


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class LayerKv:
    """KV of one layer, a row a block; its first rows have memory."""

    def __init__(self, like: torch.Tensor, rows: int, memory: PhysicalMemory) -> None:
        """`like`: the tensor that vLLM allocated, or one of its shape and type without memory."""
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
        """So many rows have memory: zeros where it is new, for what others left there may be no number."""
        self._pages.resize(rows * self.row_bytes, zero=True)

    def release(self, memory: PhysicalMemory) -> None:
        memory.release(self._pages)

    def close_up(self, start: int, target: int, count: int) -> None:
        """Rows from `start` on are from `target` on, which is before it."""
        for at in range(0, count, ROWS_AT_ONCE):
            some = min(ROWS_AT_ONCE, count - at)
            self._rows[target + at :][:some] = self._rows[start + at :][:some].clone()

    def read(self, rows: Sequence[int]) -> torch.Tensor:
        return self._rows[self._at(rows)]

    def write(self, rows: Sequence[int], values: torch.Tensor) -> None:
        self._rows[self._at(rows)] = values.to(self._rows.device)

    def _at(self, rows: Sequence[int]) -> list[int]:
        """The rows, if all of them have memory: another would end the process."""
        mapped = min(self._pages.mapped_bytes // self.row_bytes, len(self._rows))
        if rows and not 0 <= min(rows) <= max(rows) < mapped:
            raise RowsUnmapped(f"rows {min(rows)} to {max(rows)} of {mapped} that have memory")
        return list(rows)


class RowsAside:
    """Rows of a dropped layer's KV, on the host, in the pieces in which they came."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        self._places: dict[int, int] = {}  # row, and where it is in all pieces together

    @property
    def rows(self) -> list[int]:
        return list(self._places)

    def write(self, rows: Sequence[int], values: torch.Tensor) -> None:
        before = sum(map(len, self._pieces))
        self._pieces.append(values.to("cpu"))
        self._places.update((row, before + index) for index, row in enumerate(rows))

    def read(self, rows: Sequence[int]) -> torch.Tensor:
        if missing := [row for row in rows if row not in self._places]:
            raise RowsUnmapped(f"rows {missing[:5]} were not set aside")
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces)]
        return self._pieces[0][[self._places[row] for row in rows]]


class ReservedKv:
    """KV of all layers, in the order of the layers."""

    def __init__(self, like: Mapping[str, torch.Tensor], rows: int, memory: PhysicalMemory) -> None:
        """`rows`: of each layer in the largest split."""
        self.names = tuple(like)
        self.rows = rows
        self.memory = memory
        self._layers = [LayerKv(tensor, rows, memory) for tensor in like.values()]
        self._aside: dict[int, RowsAside] = {}  # of layers whose KV has no pages

    @property
    def row_bytes(self) -> int:
        return max(layer.row_bytes for layer in self._layers)

    def views(self, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, layer.view(rows)) for name, layer in zip(self.names, self._layers, strict=True))

    def read(self, layer: int, rows: Sequence[int]) -> torch.Tensor:
        return (self._aside.get(layer) or self._layers[layer]).read(rows)

    def write(self, layer: int, rows: Sequence[int], values: torch.Tensor) -> None:
        (self._aside.get(layer) or self._layers[layer]).write(rows, values)

    def move(self, layers: Iterable[int], moves: Mapping[int, int], offset: int = 0) -> None:
        source, target = [row + offset for row in moves], [row + offset for row in moves.values()]
        for index in layers:
            self.write(index, target, self.read(index, source))

    def narrow(self, layers: Iterable[int], regions: int, rows: int, fewer: int) -> None:
        """Each region of these layers had `rows`, and its first `fewer` are left."""
        for index in layers:
            for region in range(1, regions):
                self._layers[index].close_up(region * rows, region * fewer, fewer)
            self._layers[index].resize(regions * fewer)

    def set_aside(self, layers: Iterable[int], rows: Sequence[int]) -> None:
        """These rows of the layers go to the host, and the layers' pages to who grows."""
        for index in layers:
            aside = RowsAside()
            for some in pieces(rows):
                aside.write(some, self._layers[index].read(some))
            self._aside[index] = aside
            self._layers[index].resize(0)

    def forget_aside(self) -> None:
        """What was set aside is a peer's by now. What is written to these layers is on the host until they
        are put back."""
        self._aside = {index: RowsAside() for index in self._aside}

    def put_back(self, rows: int) -> None:
        """Layers that were set aside have so many rows of memory again, and in it what is on the host."""
        for index, aside in list(self._aside.items()):
            self._layers[index].resize(rows)
            for some in pieces(aside.rows):
                self._layers[index].write(some, aside.read(some))
            del self._aside[index]

    def resize(self, layers: Iterable[int], rows: int) -> None:
        for index in layers:
            self._layers[index].resize(rows)

    def release(self) -> None:
        """Its address space; its pages are free."""
        for layer in self._layers:
            layer.release(self.memory)


class ReturningWeights:
    """Parameters on their way back beside serving: a thread that brings dropped layers from their copies on
    the host, one behind the other, while the engine's batches still go through its peers."""

    def __init__(self, weights: LayerWeights, layers: Sequence[int], then: Callable[[float], None]) -> None:
        """`then`: in the thread, once they are here, with when this began."""
        self._weights, self._layers, self._then = weights, layers, then
        self._began = time.monotonic()
        self._stopped, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="overload-returning", daemon=True).start()

    def stop(self) -> None:
        """From now on it touches no memory. What is missing is somebody else's to bring."""
        self._stopped.set()
        self._done.wait()  # for one layer's copy at most

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._bring()
        except Exception:  # the last step of the restore brings what is missing
            logger.exception("parameters do not come back beside serving")
        finally:
            self._done.set()
        if not self._stopped.is_set():
            self._then(self._began)

    def _bring(self) -> None:
        for layer in self._layers:
            if self._stopped.is_set():
                return
            if not self._weights.bring_back(layer):  # of uneven parts: the longer one has pages for some only
                logger.info("layer %d and those behind it come back with the last step: no free pages", layer)
                return
