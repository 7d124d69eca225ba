"""Host memory for blocks, the interface of movers, and the CPU build's mover.

A row holds one block: its bytes of each layer, one after the other. The copier's threads share Python's lock
with the model. NumPy and xxhash release it while they copy or hash, and unlike torch they start no threads.

The GPU reads and writes *registered* memory itself, without a bounce buffer. All of it is registered with the
GPU's driver before the engine is ready, because no kernel can be launched meanwhile. It is registered in
chunks by several threads, because touching many GiB takes seconds. A chunk consists of whole pages and whole
rows: a copy must not span two registrations, and a page must not be in two.
"""

import contextlib
import logging
import math
import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtransfer.checkpoint.copy_orders import FIRST_DISK_SLOT, BlockCopy, DiskMove
from kvtransfer.checkpoint.disk_slots import DiskSlots

logger = logging.getLogger("conserve.kvtransfer.checkpoint")

CHUNK_BYTES = 256 << 20  # takes 0.13 s on an H200's host, mostly to touch its pages
CLOSE_S = 1.0
Rows = npt.NDArray[np.uint8]


class PinnedMemoryRegistrar(Protocol):
    """Registers host memory with a GPU's driver."""

    def register(self, address: int, nbytes: int) -> str:
        """Register a range of memory; return an error text, or an empty text on success."""

    def unregister(self, address: int) -> None:
        """Unregister a range of memory. The calling thread must not launch GPU work afterwards."""


class CudaRegistrar(PinnedMemoryRegistrar):
    """Registers host memory with the CUDA driver of one GPU.

    CUDA keeps a failed call's error for its thread, and torch's next launch in that thread would raise it. So
    each registration runs in a thread of its own.
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
    """Rows of equal size in registered memory.

    Rows of a chunk that could not be registered are usable, but slower: the driver copies through its own
    memory while the calling thread waits.
    """

    def __init__(self, rows: int, row_bytes: int, registry: PinnedMemoryRegistrar) -> None:
        self._registry = registry
        pages_fit = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)  # rows that make up whole pages
        self.chunk_rows = pages_fit * max(1, CHUNK_BYTES // (pages_fit * row_bytes))
        # Private and absent in forks: a page shared with a fork is copied at the next write, and the GPU
        # would keep using the old one.
        size = max(1, -(-rows * row_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
        self.rows = self._bytes[: rows * row_bytes].reshape(rows, row_bytes)
        self._registered: list[int] = []  # addresses of chunks
        self._refused = 0  # chunks refused since the last call of `take_refused`
        size = self.chunk_rows * row_bytes
        chunks = [self._bytes[at : at + size] for at in range(0, rows * row_bytes, size)]
        with ThreadPoolExecutor(THREADS, "kv-touch") as threads:
            for _ in threads.map(_touch, chunks):
                pass
        for chunk in chunks:
            self._register(chunk)

    def _register(self, memory: npt.NDArray[np.uint8]) -> None:
        try:
            error = self._registry.register(memory.ctypes.data, memory.nbytes)
        except RuntimeError as raised:  # from torch, or because no thread could be started
            error = repr(raised)
        if not error:
            self._registered.append(memory.ctypes.data)
        else:
            if not self._refused:
                logger.error(
                    "%d MiB of host memory cannot be registered with the GPU's driver (%s): KV is copied to "
                    "and from them more slowly. Further chunks are counted, not logged",
                    memory.nbytes >> 20,
                    error,
                )
            self._refused += 1

    def take_refused(self) -> int:
        """Return how many chunks could not be registered since the last call."""
        refused, self._refused = self._refused, 0
        return refused

    def close(self) -> None:
        """Unregister chunks for at most `CLOSE_S`; the driver releases the rest with the process.

        No copy may be under way, and the calling thread must launch nothing afterwards.
        """
        end = time.monotonic() + CLOSE_S
        while self._registered and time.monotonic() < end:
            self._registry.unregister(self._registered.pop())


def _touch(memory: npt.NDArray[np.uint8]) -> None:
    memory[:] = 0  # without Python's lock


class HostSlots:
    """Host memory with one row per slot, and the digest of each row's content.

    Without a registrar, rows are plain memory whose pages are touched as slots fill; with one, they are
    registered memory (`RegisteredRows`). The mover decides what a digest covers. A row that moves to the disk
    keeps its digest. On its way back to the accelerator it passes through one of the last `scratch` rows.
    """

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        registry: PinnedMemoryRegistrar | None = None,
        disk: DiskSlots | None = None,
        scratch: int = 0,
    ) -> None:
        self.disk, self._first_scratch, slots = disk, slots, slots + scratch
        registered = RegisteredRows(slots, block_bytes, registry) if registry is not None else None
        self._registered = registered
        self.rows: Rows = registered.rows if registered else np.empty((slots, block_bytes), dtype=np.uint8)
        self.tensor = torch.from_numpy(self.rows)  # the same memory
        self.contents: dict[int, tuple[int, int]] = {}  # slot -> generation, digest

    def move_to_disk(self, move: DiskMove) -> None:
        """Write a row to the disk. Raises OSError if that fails or the slot holds other contents by now."""
        generation, digest = self.contents.get(move.slot, (0, 0))
        if self.disk is None or generation != move.generation:
            raise OSError("there is no disk" if self.disk is None else f"slot {move.slot} was changed")
        self.disk.write(move.disk_slot, self.rows[move.slot])
        self.contents[move.disk_slot] = move.disk_generation, digest

    def staged(self, copies: list[BlockCopy], at: int) -> dict[BlockCopy, BlockCopy]:
        """Read the blocks of `copies` that are on the disk into scratch rows, from row `at` on.

        Returns the copies to make from host memory, each mapped to the copy that was ordered.
        """
        found: dict[BlockCopy, BlockCopy] = {}
        for row, copy in enumerate(copies, self._first_scratch + at):
            if copy.slot < FIRST_DISK_SLOT:
                found[copy] = copy
            elif self.disk is not None and copy.slot in self.contents:
                self.disk.read(copy.slot, self.rows[row])
                self.contents[row] = self.contents[copy.slot]
                found[replace(copy, slot=row)] = copy
        return found

    def known(self, copies: list[BlockCopy]) -> list[BlockCopy]:
        """Return the copies whose slots still hold the contents that were to be copied."""
        return [c for c in copies if self.contents.get(c.slot, (None, 0))[0] == c.generation]

    def holds(self, copy: BlockCopy, digest: int) -> bool:
        """Return whether `digest` is the one recorded when the copy's slot was stored."""
        return self.contents[copy.slot][1] == digest

    def runs(self, copies: list[BlockCopy]) -> Iterator[tuple[int, int]]:
        """Yield runs of consecutive slots, each as its first slot and its length.

        A run ends where a registered chunk ends. The copies must be in the order of their slots.
        """
        chunk = self._registered.chunk_rows if self._registered is not None else len(self.rows)
        first, count = copies[0].slot, 0
        for copy in copies:
            if copy.slot != first + count or (count and copy.slot % chunk == 0):
                yield first, count
                first, count = copy.slot, 0
            count += 1
        yield first, count

    def seal(self, copies: list[BlockCopy]) -> None:
        """Record the digests of rows, once the copies to them are complete."""
        for copy in copies:
            self.contents[copy.slot] = copy.generation, self.digest(copy)

    def digest(self, copy: BlockCopy) -> int:
        """Return the digest of the slot's current bytes."""
        return xxhash.xxh3_64_intdigest(self.rows[copy.slot])

    def take_refused(self) -> int:
        """Return how many chunks could not be registered since the last call."""
        return self._registered.take_refused() if self._registered is not None else 0

    def close(self) -> None:
        """Release the registered memory and close the disk's file, after the last copy has ended."""
        if self._registered is not None:
            self._registered.close()
        if self.disk is not None:
            self.disk.close()


HOST_PART_BYTES = 2 << 20  # copied by one thread between two rests
THREADS = 4  # together they hash as fast as the bus copies


class Mover(ABC):
    """Moves blocks between the accelerator and the host.

    The copier copies at most `at_once` blocks together, a *piece*. Its threads call the mover at the same
    time, each with a part of the piece; `at` is the index of the part's first block in the piece.
    """

    at_once: int  # most blocks in a piece, for all threads together
    takes_cores: bool  # True if moving bytes takes cores from the model

    @abstractmethod
    def mark(self) -> None:
        """Make loads wait for everything that the model's thread has launched so far."""

    @abstractmethod
    def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
        """Copy blocks to their slots, and return when the copies are complete."""

    @abstractmethod
    def load(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> list[BlockCopy]:
        """Copy blocks from their slots; return the copies whose digest was right.

        The blocks of copies with a wrong digest may have been written, too.
        """


class HostMover(Mover):
    """Mover of the CPU build. It copies and hashes in one pass, while the bytes are in a core's cache.

    A store hashes the source, and a load hashes what it wrote, so that any change of a row is found.
    """

    takes_cores = True

    def __init__(self, device: list[torch.Tensor]) -> None:
        self._layers = [layer.view(len(layer), -1).view(torch.uint8).numpy() for layer in device]
        ends = list(accumulate(layer.shape[1] for layer in self._layers))
        self._places = [slice(*ends_at) for ends_at in pairwise([0, *ends])]  # of each layer within a row
        self.at_once = at_once(device, HOST_PART_BYTES)

    def mark(self) -> None:
        """Do nothing, because on the CPU each call returns when its work is done."""

    def store(self, memory: HostSlots, copies: list[BlockCopy], at: int = 0) -> None:
        for copy in copies:
            row, digest = memory.rows[copy.slot], xxhash.xxh3_64()
            for layer, place in zip(self._layers, self._places, strict=True):
                came = layer[copy.block]
                row[place] = came
                digest.update(came)  # the source, not its copy
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
    """Return how many blocks a piece has if each thread gets `nbytes` of it."""
    return THREADS * max(1, nbytes // block_bytes(device))


def block_bytes(device: list[torch.Tensor]) -> int:
    return sum(layer[0].nbytes for layer in device)
