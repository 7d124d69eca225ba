"""Host memory for blocks, and what moves blocks there and back.

A row is a block: its bytes of each layer, one after the other. The copier's threads share Python's lock
with the model's: what copies or hashes bytes lets go of it meanwhile. NumPy's and xxhash's calls do, and they
start no threads, as torch's do.

*Registered* memory is what the GPU reads and writes itself, without a bounce buffer. It is mapped at once and
registered with the GPU's driver in chunks, each when a row of it is first used: to register many GiB takes
seconds and all of their pages. A chunk is whole pages and whole rows, since one copy must not reach into two
registrations, and one page must not be in two.
"""

import contextlib
import logging
import math
import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtransfer.checkpoint.copy_orders import BlockCopy

logger = logging.getLogger("conserve.kvtransfer.checkpoint")

CHUNK_BYTES = 256 << 20  # some tens of milliseconds, mostly for its pages
CLOSE_S = 1.0
Rows = npt.NDArray[np.uint8]


class Registry(Protocol):
    """Who has to know of memory before the GPU can use it."""

    def register(self, address: int, nbytes: int) -> str:
        """Empty, or why not."""

    def unregister(self, address: int) -> None:
        """By a thread that launches nothing any more."""


class CudaRegistry(Registry):
    """The driver of one GPU.

    CUDA keeps a call's error for the thread that made it, and torch's next launch in that thread would raise
    it: so each registration has a thread to itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> str:
        with ThreadPoolExecutor(1, "kv-register") as thread:
            return thread.submit(self._register, address, nbytes).result()

    def _register(self, address: int, nbytes: int) -> str:
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0).value)
        return f"cudaHostRegister returns {code}" if code else ""

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)


class RegisteredRows:
    """Rows of equal size. Those of a chunk that could not be registered can be used too: the driver copies
    them through memory of its own, and the thread that asks waits for it."""

    def __init__(self, rows: int, row_bytes: int, registry: Registry) -> None:
        self._registry = registry
        pages_fit = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)  # so many rows are whole pages
        self.chunk_rows = pages_fit * max(1, CHUNK_BYTES // (pages_fit * row_bytes))
        # Private, and not there in forked processes: a page that is shared with one is copied when it is
        # next written, and the GPU would go on with the old one.
        size = max(1, -(-rows * row_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages: then there are none
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
        self.rows = self._bytes[: rows * row_bytes].reshape(rows, row_bytes)
        self._lock = threading.Lock()
        self._known: set[int] = set()  # chunks that were registered, or refused
        self._registered: dict[int, int] = {}  # chunk -> address
        self._refused = 0
        self._told = 0

    def use(self, rows: Iterable[int]) -> None:
        """Before rows are copied to. May take as long as a registration."""
        for chunk in {row // self.chunk_rows for row in rows} - self._known:
            with self._lock:
                if chunk not in self._known:
                    self._register(chunk)

    def _register(self, chunk: int) -> None:
        size = self.chunk_rows * self.rows.shape[1]
        memory = self._bytes[chunk * size : (chunk + 1) * size]
        memory[:] = 0  # pages come here, without Python's lock, and not while the driver holds its own
        try:
            error = self._registry.register(memory.ctypes.data, memory.nbytes)
        except RuntimeError as raised:  # torch's, or no thread can be started
            error = repr(raised)
        if not error:
            self._registered[chunk] = memory.ctypes.data
        else:
            if not self._refused:
                logger.error(
                    "%d MiB of host memory cannot be registered with the GPU's driver (%s): KV is copied to "
                    "and from them more slowly. More of this is counted, not logged",
                    memory.nbytes >> 20,
                    error,
                )
            self._refused += 1
        self._known.add(chunk)

    def take_refused(self) -> int:
        """Chunks since the last call. Without the lock, which a registration has: each step asks."""
        refused = self._refused
        told, self._told = self._told, refused
        return refused - told

    def close(self) -> None:
        """Nothing is copied any more, and nothing launched by this thread. What it has no time for the driver
        takes back with the process."""
        end = time.monotonic() + CLOSE_S
        with self._lock:
            while self._registered and time.monotonic() < end:
                self._registry.unregister(self._registered.popitem()[1])


class HostSlots:
    """One row a slot, with what must be in it. Rows are plain memory, used page by page as slots fill; with a
    registry they are memory that a GPU copies to and from, used chunk by chunk (`RegisteredRows`).

    What a digest is of, and what is compared with it, its mover says.
    """

    def __init__(self, slots: int, block_bytes: int, registry: Registry | None = None) -> None:
        registered = RegisteredRows(slots, block_bytes, registry) if registry is not None else None
        self._registered = registered
        self.rows: Rows = registered.rows if registered else np.empty((slots, block_bytes), dtype=np.uint8)
        self.tensor = torch.from_numpy(self.rows)  # the same memory
        self.contents: dict[int, tuple[int, int]] = {}  # slot -> generation, digest

    def known(self, copies: list[BlockCopy]) -> list[BlockCopy]:
        """Those whose slots were last written for them."""
        return [c for c in copies if self.contents.get(c.slot, (None, 0))[0] == c.generation]

    def holds(self, copy: BlockCopy, digest: int) -> bool:
        """What came back is what was stored."""
        return self.contents[copy.slot][1] == digest

    def use(self, copies: list[BlockCopy]) -> None:
        """Before their slots are copied to."""
        if self._registered is not None:
            self._registered.use(copy.slot for copy in copies)

    def runs(self, copies: list[BlockCopy]) -> Iterator[tuple[int, int]]:
        """First slot and number of slots that follow one another, of copies in the order of their slots: what
        one copy moves. It ends where a registration ends."""
        chunk = self._registered.chunk_rows if self._registered is not None else len(self.rows)
        first, count = copies[0].slot, 0
        for copy in copies:
            if copy.slot != first + count or (count and copy.slot % chunk == 0):
                yield first, count
                first, count = copy.slot, 0
            count += 1
        yield first, count

    def seal(self, copies: list[BlockCopy]) -> None:
        """Their rows are written."""
        for copy in copies:
            self.contents[copy.slot] = copy.generation, self.digest(copy)

    def digest(self, copy: BlockCopy) -> int:
        """Of what its row holds now. One call a row: after each the thread must get Python's lock back."""
        return xxhash.xxh3_64_intdigest(self.rows[copy.slot])

    def take_refused(self) -> int:
        """Chunks that could not be registered, since the last call."""
        return self._registered.take_refused() if self._registered is not None else 0

    def close(self) -> None:
        """Nothing is copied any more, and nothing launched by this thread."""
        if self._registered is not None:
            self._registered.close()


HOST_PART_BYTES = 2 << 20  # a rest beside steps comes after so many
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
    cache.

    The digest is of the bytes as they came, before they are in the row, and what is compared is the copy that
    went back: whenever a row changes in between, it is found.
    """

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


def at_once(device: list[torch.Tensor], nbytes: int) -> int:
    """As many blocks as parts of so many bytes have, one for each thread."""
    return THREADS * max(1, nbytes // block_bytes(device))


def block_bytes(device: list[torch.Tensor]) -> int:
    return sum(layer[0].nbytes for layer in device)
