"""Pages of physical memory behind address ranges: a page leaves one range and appears in another, and no
address changes.

A range is reserved address space with memory from its start up to some length, and one tensor that is good
for as long as the range is. `PhysicalMemory` decides which page is where; a `PageDriver` does it: `memfd.py`
on CPUs, `cuda_pages.py` through CUDA's driver.

Parameters that give way and KV that grows pass the same pages on. Nothing is freed and allocated in between,
so growing fails neither for want of memory nor in its fragments, as long as whole pages are counted.

A range's tensor is made by way of DLPack: the one public protocol by which torch takes memory of somebody
else's, a GPU's too, without asking the driver what is mapped there.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from workers.processes import WorkerError

_UNSIGNED = 1  # DLPack's numbers
_KINDS = {"cpu": 1, "cuda": 2}


class PageError(WorkerError, MemoryError):
    """Physical memory could not be mapped, unmapped, or had; says which call, and the system's own words."""


class RowsUnmapped(PageError):
    """Rows of KV that have no memory at present were named."""


class PageDriver(Protocol):
    """The system's side. Addresses and sizes are multiples of `page_bytes`; a handle is a page of memory.

    What fails raises a PageError, and has changed nothing.
    """

    page_bytes: int

    def reserve(self, nbytes: int) -> int:
        """Address space without memory; its address."""

    def free(self, address: int, nbytes: int) -> None:
        """Address space in which nothing is mapped."""

    def create(self) -> int: ...

    def destroy(self, handle: int) -> None:
        """Of a page that is mapped nowhere."""

    def map(self, address: int, handles: Sequence[int]) -> None:
        """One page behind the other. What is in them is undefined."""

    def unmap(self, address: int, pages: int) -> None: ...

    def zero(self, address: int, nbytes: int) -> None: ...

    def wait(self) -> None:
        """Until nothing that was launched reads or writes memory."""

    def settle(self) -> None:
        """Until what this thread has launched is done."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Bytes of an address range, whatever is mapped there; who touches what is unmapped faults."""

    def host(self, nbytes: int) -> torch.Tensor:
        """Bytes on the host for a copy that outlives a drop, and that the device reads at full speed."""

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """From the host, while other threads compute: over when this returns, and nobody waits for it."""

    def reclaim(self) -> None:
        """Memory that torch was given and does not use goes back to the system, so that pages can be had."""

    def close(self) -> None:
        """What the driver keeps for itself; ranges and pages were given back."""


class PhysicalMemory:
    """Pages, free or in one range each."""

    def __init__(self, driver: PageDriver) -> None:
        self.driver = driver
        self.page_bytes = driver.page_bytes
        self._free: list[int] = []
        self._ranges: list[MappedRange] = []

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def pages(self) -> int:
        return len(self._free) + sum(len(one.handles) for one in self._ranges)

    def pages_of(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)

    def create(self, nbytes: int) -> None:
        """So much more memory, in whole pages: all of it or none."""
        created: list[int] = []
        try:
            while len(created) < self.pages_of(nbytes):
                created.append(self.driver.create())
        except PageError:
            for handle in created:
                self.driver.destroy(handle)
            raise
        self._free += created

    def take(self, count: int) -> list[int]:
        """All of them or none; the lowest first, so that neighbours stay neighbours."""
        if count > len(self._free):
            raise PageError(f"{count} pages are wanted, and {len(self._free)} of {self.pages} are free")
        self._free.sort()
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def put(self, handles: Sequence[int]) -> None:
        self._free += handles

    def reserve(self, nbytes: int) -> "MappedRange":
        made = MappedRange(self, nbytes)
        self._ranges.append(made)
        return made

    def release(self, one: "MappedRange") -> None:
        """The range's address space; its tensor is dangling from now on."""
        one.resize(0)
        self._ranges.remove(one)
        self.driver.free(one.address, one.pages * self.page_bytes)

    def trim(self) -> None:
        """What is free is the system's again."""
        while self._free:
            self.driver.destroy(self._free.pop())

    def close(self) -> None:
        for one in list(self._ranges):
            self.release(one)
        self.trim()
        self.driver.close()


class MappedRange:
    """Reserved address space whose first pages have memory."""

    def __init__(self, memory: PhysicalMemory, nbytes: int) -> None:
        self._memory = memory
        self.pages = memory.pages_of(nbytes)
        self.address = memory.driver.reserve(self.pages * memory.page_bytes)
        try:
            self.tensor = memory.driver.tensor(self.address, nbytes)
        except PageError:
            memory.driver.free(self.address, self.pages * memory.page_bytes)
            raise
        self.handles: list[int] = []  # page after page

    @property
    def mapped_bytes(self) -> int:
        return len(self.handles) * self._memory.page_bytes

    def resize(self, nbytes: int, *, zero: bool = False) -> None:
        """Its first `nbytes` have memory, and what is behind their last page has none.

        What was there stays as it is; of what is new nothing is known, unless it is to be zero.
        """
        wanted, has = self._memory.pages_of(nbytes), len(self.handles)
        if wanted > self.pages:
            raise PageError(f"{nbytes} bytes are wanted in a range of {self.pages} pages")
        if wanted > has:
            self._grow(wanted - has, zero)
        elif wanted < has:
            self._shrink(has - wanted)

    def _grow(self, count: int, zero: bool) -> None:
        driver, at = self._memory.driver, self.address + self.mapped_bytes
        handles = self._memory.take(count)
        try:
            driver.map(at, handles)
        except PageError:
            self._memory.put(handles)
            raise
        self.handles += handles
        if zero:
            driver.zero(at, count * self._memory.page_bytes)

    def _shrink(self, count: int) -> None:
        driver, kept = self._memory.driver, len(self.handles) - count
        driver.wait()
        driver.unmap(self.address + kept * self._memory.page_bytes, count)
        self._memory.put(self.handles[kept:])
        del self.handles[kept:]


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_NAME = b"dltensor"  # the capsule keeps the pointer, not the text
_described: list[Any] = []  # torch reads them for as long as a tensor is there: a few for each engine


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A tensor of bytes at an address. Nobody frees the memory with it."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _Managed(
        _Tensor(
            address,
            _Device(_KINDS[device.type], device.index or 0),
            1,
            _Type(_UNSIGNED, 8, 1),
            ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
            None,
            0,
        ),
        None,
        None,
    )
    _described.append((managed, shape))
    capsule_of = ctypes.pythonapi.PyCapsule_New
    capsule_of.restype, capsule_of.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return torch.from_dlpack(capsule_of(ctypes.addressof(managed), _NAME, None))
