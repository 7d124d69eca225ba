"""Pages of host memory, for vLLM's CPU build.

An address range is reserved without access. Mapping makes addresses accessible, and the system gives them
memory when they are written. Unmapping reserves the addresses anew, which returns their memory to the system.
So a page is only a number here, which stands for an amount of memory.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from workers.processes import WorkerError

PAGE_BYTES = 64 << 10
# Flags of Linux: no access; memory is counted when it is written; exactly this address.
_NO_ACCESS, _NO_RESERVE, _FIXED = 0, 0x4000, 0x10
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_FAILED = ctypes.c_void_p(-1).value


class PageError(WorkerError, MemoryError):
    """Physical memory could not be created, mapped or unmapped. The message has the call and the reason."""


class DLManagedTensor(ctypes.Structure):
    """Descriptor of a tensor in DLPack, the public protocol with which torch adopts foreign memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),  # null: the memory is not freed with the tensor
    )


_DEVICE_TYPES, _UNSIGNED_INT = {"cpu": 1, "cuda": 2}, 1
_descriptors: list[Any] = []  # kept alive, because torch reads a descriptor as long as its tensor exists


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a tensor over the bytes at an address, whether or not they are mapped."""
    kind, index, shape = _DEVICE_TYPES[device.type], device.index or 0, (ctypes.c_int64 * 1)(nbytes)
    described = DLManagedTensor(address, kind, index, 1, _UNSIGNED_INT, 8, 1, shape, None, 0, None, None)
    _descriptors.append((described, shape))
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype = ctypes.py_object
    make_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.from_dlpack(make_capsule(ctypes.addressof(described), b"dltensor", None))


class CpuPageDriver:
    """Driver that makes the system calls for pages of host memory.

    `CudaPageDriver` has the same methods. Addresses and sizes are multiples of `page_bytes`, and a handle
    stands for a page of memory. A call that fails raises a PageError and changes nothing.
    """

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        if page_bytes <= 0 or page_bytes % mmap.PAGESIZE:
            raise PageError(f"page size {page_bytes} is not a multiple of the system's {mmap.PAGESIZE}")
        self.page_bytes = page_bytes
        self._handles = count()
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p

    def reserve(self, nbytes: int) -> int:
        """Reserve address space without memory, and return its address."""
        return self._reserve(None, nbytes, _RESERVED)

    def free(self, address: int, nbytes: int) -> None:
        """Release address space in which nothing is mapped."""
        self._call("munmap", ctypes.c_void_p(address), ctypes.c_size_t(nbytes))

    def create(self) -> int:
        return next(self._handles)

    def destroy(self, handle: int) -> None:
        """Release a page that is not mapped."""

    def map(self, address: int, handles: Sequence[int]) -> None:
        """Map the pages one after another, beginning at the address."""
        size = ctypes.c_size_t(len(handles) * self.page_bytes)
        self._call("mprotect", ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_WRITE)

    def unmap(self, address: int, pages: int) -> None:
        self._reserve(address, pages * self.page_bytes, _RESERVED | _FIXED)

    def zero(self, address: int, nbytes: int) -> None:
        """Fill newly mapped pages with zeros, which the system has already done here."""

    def synchronize(self) -> None:
        """Wait until no launched work reads or writes memory; on CPUs all work has ended."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a tensor over the bytes of an address range. Access to an unmapped part ends the process."""
        return bytes_at(address, nbytes, torch.device("cpu"))

    def host_tensor(self, nbytes: int) -> torch.Tensor:
        """Return a new tensor of `nbytes` bytes on the host, which the device can copy at full speed."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def _reserve(self, address: int | None, nbytes: int, flags: int) -> int:
        place, size, offset = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_long(0)
        found: int | None = self._libc.mmap(place, size, _NO_ACCESS, flags, -1, offset)
        if found is None or found == _FAILED:
            raise self._error(f"mmap of {nbytes} bytes")
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            raise self._error(name)

    def _error(self, call: str) -> PageError:
        return PageError(f"{call}: {os.strerror(ctypes.get_errno())} (see vm.max_map_count and ulimit -v)")
