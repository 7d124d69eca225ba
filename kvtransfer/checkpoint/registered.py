"""Registered memory: host memory that the GPU reads and writes itself, without a bounce buffer.

It is mapped at once and registered with the GPU's driver in chunks, each when a row of it is first used: to
register many GiB takes seconds and all of their pages. A chunk is whole pages and whole rows, since one copy
must not reach into two registrations, and one page must not be in two.
"""

import contextlib
import logging
import math
import mmap
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger("conserve.kvtransfer.checkpoint")

CHUNK_BYTES = 256 << 20  # some tens of milliseconds, mostly for its pages
CLOSE_S = 1.0


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
