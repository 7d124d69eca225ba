"""Disk behind host memory: a file with one row per slot.

The file has no name in its folder, so that nothing of it is left when the process ends, however it ends. Its
space is reserved at the start, so that a lack of space shows then and not in the middle of a conversation.
Rows bypass the page cache (direct I/O), which would use the memory that the disk is meant to save.
"""

import logging
import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtransfer.checkpoint.copy_orders import FIRST_DISK_SLOT
from kvtransfer.config import disk_row_bytes

logger = logging.getLogger("conserve.kvtransfer.checkpoint")

Row = npt.NDArray[np.uint8]


class DiskSlots:
    """Rows of one rank on the disk, in a file without a name. Several threads may read and write them."""

    def __init__(self, folder: Path, slots: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._row_bytes = disk_row_bytes(block_bytes)
        self._buffers = threading.local()  # one for each thread, aligned as direct I/O requires
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _unnamed_file(folder)
        try:
            os.posix_fallocate(self._file, 0, max(1, slots) * self._row_bytes)
        except OSError:
            self.close()
            raise

    def write(self, slot: int, row: Row) -> None:
        buffer = self._buffer()
        np.frombuffer(buffer, np.uint8)[: self._block_bytes] = row
        written = os.pwrite(self._file, buffer, self._offset(slot))
        if written != self._row_bytes:
            raise OSError(f"{written} of {self._row_bytes} bytes were written to the disk")

    def read(self, slot: int, row: Row) -> None:
        buffer = self._buffer()
        came = os.preadv(self._file, [buffer], self._offset(slot))
        if came != self._row_bytes:
            raise OSError(f"{came} of {self._row_bytes} bytes came from the disk")
        row[:] = np.frombuffer(buffer, np.uint8)[: self._block_bytes]

    def close(self) -> None:
        """Close the file, which frees its space. Reads and writes after this raise OSError."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _offset(self, slot: int) -> int:
        return (slot - FIRST_DISK_SLOT) * self._row_bytes

    def _buffer(self) -> mmap.mmap:
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = mmap.mmap(-1, self._row_bytes)
        memory: mmap.mmap = self._buffers.memory
        return memory


def _unnamed_file(folder: Path) -> int:
    """Open a new file, with direct I/O if the file system supports it, and remove its name."""
    file, name = tempfile.mkstemp(prefix="kv-", dir=folder)
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError as reason:
        logger.warning("no direct I/O in %s (%s): KV on this disk also takes page cache", folder, reason)
        return os.dup(file)
    finally:
        os.close(file)
        os.unlink(name)
