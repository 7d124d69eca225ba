"""Pages of GPU memory, made with the virtual memory management of CUDA's driver (cuMemCreate, cuMemMap, ...).

Structures and constants are those of CUDA 12's cuda.h, which the driver of version 13 accepts too. `python -m
benchmarks.gpu --only torch` checks the pages on a GPU.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_uint64, c_ulonglong
from typing import Any

import torch

from workers.engine.overload.pages.cpu_pages import PageError, bytes_at

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_AND_WRITE, _RECOMMENDED = 1, 1, 3, 1


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class CudaPageDriver:
    """Driver for pages of one GPU in torch's CUDA context, with the methods of `CpuPageDriver`."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        try:
            self._cuda: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise PageError(f"CUDA's driver cannot be loaded: {error}") from error
        place, size = Location(_ON_DEVICE, index), c_size_t()
        self._properties = AllocationProperties(type=_PINNED, location=place)
        self._access = AccessDescription(place, _READ_AND_WRITE)
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._properties), _RECOMMENDED)
        self.page_bytes = int(size.value)

    def reserve(self, nbytes: int) -> int:
        address = c_uint64()
        anywhere, flags = c_uint64(0), c_ulonglong(0)
        self._call("cuMemAddressReserve", byref(address), c_size_t(nbytes), c_size_t(0), anywhere, flags)
        return int(address.value)

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(nbytes))

    def create(self) -> int:
        """Create a page; if the device is full, let torch release unused memory and try once more."""
        handle = c_uint64()
        arguments = byref(handle), c_size_t(self.page_bytes), byref(self._properties), c_ulonglong(0)
        if self._result("cuMemCreate", *arguments) == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            self._call("cuMemCreate", *arguments)
        return int(handle.value)

    def destroy(self, handle: int) -> None:
        self._call("cuMemRelease", c_uint64(handle))

    def map(self, address: int, handles: Sequence[int]) -> None:
        mapped, page, none = 0, c_size_t(self.page_bytes), c_size_t(0)
        try:
            for handle in handles:
                place = c_uint64(address + mapped * self.page_bytes)
                self._call("cuMemMap", place, page, none, c_uint64(handle), c_ulonglong(0))
                mapped += 1
            size = c_size_t(mapped * self.page_bytes)
            self._call("cuMemSetAccess", c_uint64(address), size, byref(self._access), c_size_t(1))
        except PageError:
            self.unmap(address, mapped)
            raise

    def unmap(self, address: int, pages: int) -> None:
        """Unmap page by page, because the driver neither splits nor joins mappings."""
        for page in range(pages):
            self._call("cuMemUnmap", c_uint64(address + page * self.page_bytes), c_size_t(self.page_bytes))

    def zero(self, address: int, nbytes: int) -> None:
        """Zero the pages and wait, because torch's streams do not wait for the default stream."""
        self._call("cuMemsetD8_v2", c_uint64(address), ctypes.c_ubyte(0), c_size_t(nbytes))
        self.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return bytes_at(address, nbytes, self._device)

    def host_tensor(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _result(self, name: str, *arguments: Any) -> int:
        with torch.cuda.device(self._device):  # the calling thread may have another current device
            return int(getattr(self._cuda, name)(*arguments))

    def _call(self, name: str, *arguments: Any) -> None:
        if (result := self._result(name, *arguments)) != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(result), byref(text))
            reason = (text.value or b"unknown error").decode()
            raise PageError(f"{name} on {self._device}: {reason} ({result})")
