"""Pages on a CPU: physical memory is a file without a name in memory, and a page is a place in it.

Mapping a page is mapping that place of the file over reserved address space; unmapping it is reserving the
space again. Memory is taken when a page is first written, and given back to the system when it is zeroed.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from workers.overload.pages import PageError, bytes_at

SMALLEST_PAGE = 64 << 10
MOST_PAGES = 16_384  # Linux: a process has at most 65,530 areas, and each page may be one
_NO_ACCESS, _NO_RESERVE, _FIXED = 0, 0x4000, 0x10  # Linux: not counted before it is written; exactly there
_REMOVE = 9  # madvise: the file's own pages go, and read as zero
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value


def page_for(nbytes: int) -> int:
    """Bytes of a page, so that so much memory has not too many of them."""
    page = SMALLEST_PAGE
    while nbytes > page * MOST_PAGES:
        page *= 2
    return page


class MemfdDriver:
    """Nothing runs behind its back: what is launched on a CPU is done."""

    def __init__(self, page_bytes: int = SMALLEST_PAGE) -> None:
        if page_bytes <= 0 or page_bytes % mmap.PAGESIZE:
            raise PageError(f"a page of {page_bytes} bytes is no multiple of the system's {mmap.PAGESIZE}")
        self.page_bytes = page_bytes
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._file = os.memfd_create("conserve-pages")
        self._pages = 0  # places in the file
        self._holes: list[int] = []  # places that are no page at present
        self._spare = self._an_area()  # for who has as many as may be, and wants to have fewer

    def reserve(self, nbytes: int) -> int:
        return self._mmap(None, nbytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)

    def free(self, address: int, nbytes: int) -> None:
        self._call("munmap", ctypes.c_void_p(address), ctypes.c_size_t(nbytes))

    def create(self) -> int:
        if self._holes:
            return self._holes.pop()
        try:
            os.ftruncate(self._file, (self._pages + 1) * self.page_bytes)
        except OSError as error:
            raise PageError(f"a page of {self.page_bytes} bytes cannot be had: {error}") from error
        self._pages += 1
        return self._pages - 1

    def destroy(self, handle: int) -> None:
        place, size = ctypes.c_long(handle * self.page_bytes), ctypes.c_long(self.page_bytes)
        self._call("fallocate", self._file, _KEEP_SIZE | _PUNCH_HOLE, place, size)
        self._holes.append(handle)

    def map(self, address: int, handles: Sequence[int]) -> None:
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
        for done, handle in enumerate(handles):
            at = address + done * self.page_bytes
            try:
                self._mmap(at, self.page_bytes, access, flags, handle * self.page_bytes)
            except PageError:
                self.unmap(address, done)
                raise

    def unmap(self, address: int, pages: int) -> None:
        """The system refuses this too where there are as many areas as may be, though fewer come of it."""
        if not pages:
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | _FIXED
        try:
            self._mmap(address, pages * self.page_bytes, _NO_ACCESS, flags)
        except PageError:
            self.free(self._spare, mmap.PAGESIZE)
            self._mmap(address, pages * self.page_bytes, _NO_ACCESS, flags)
            self._spare = self._an_area()

    def _an_area(self) -> int:
        return self._mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("madvise", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _REMOVE)

    def wait(self) -> None:
        return

    def settle(self) -> None:
        return

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return bytes_at(address, nbytes, torch.device("cpu"))

    def host(self, nbytes: int) -> torch.Tensor:
        """A file without a name: the system may write its pages out."""
        handle, path = tempfile.mkstemp(prefix="conserve-layers-")
        try:
            os.posix_fallocate(handle, 0, nbytes)  # or a full disk would end the process when it is written
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        except OSError as error:
            raise PageError(f"{nbytes} bytes of the host cannot be had: {error}") from error
        finally:
            os.close(handle)
            os.unlink(path)

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def reclaim(self) -> None:
        return

    def used_bytes(self) -> int:
        """That the system has given, and not been given back."""
        return os.fstat(self._file).st_blocks * 512

    def close(self) -> None:
        self.free(self._spare, mmap.PAGESIZE)
        os.close(self._file)

    def _mmap(self, address: int | None, nbytes: int, access: int, flags: int, offset: int = 0) -> int:
        file = self._file if flags & mmap.MAP_SHARED else -1
        place, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        found: int | None = self._libc.mmap(place, size, access, flags, file, ctypes.c_long(offset))
        if found is None or found == _FAILED:
            raise self._error(f"mmap of {nbytes} bytes")
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            raise self._error(name)

    def _error(self, what: str) -> PageError:
        said = os.strerror(ctypes.get_errno())
        return PageError(f"{what}: {said} (areas of a process: vm.max_map_count)")
