"""Pages on a GPU, by the virtual memory of CUDA's driver (cuMemCreate, cuMemMap and theirs).

`python -m benchmarks.gpu --only torch` is what shows it. Layouts and numbers are of CUDA 12's cuda.h, and
hold for 13's driver.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from workers.overload.pages import PageError, bytes_at

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


class CudaDriver:
    """Of one GPU, in the context that torch has there."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        try:
            self._cuda: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise PageError(f"CUDA's driver is not here: {error}") from error
        place = Location(_ON_DEVICE, self._device.index)
        self._properties = AllocationProperties(type=_PINNED, location=place)
        self._access = AccessDescription(place, _READ_AND_WRITE)
        size = ctypes.c_size_t()
        properties = ctypes.byref(self._properties)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), properties, _RECOMMENDED)
        self.page_bytes = int(size.value)

    def reserve(self, nbytes: int) -> int:
        address, size = ctypes.c_uint64(), ctypes.c_size_t(nbytes)
        anywhere, plain = ctypes.c_uint64(0), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), anywhere, plain)
        return int(address.value)

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def create(self) -> int:
        """Where the device has no more, torch gives back what it does not use, once."""
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self.page_bytes)
        arguments = ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_ulonglong(0)
        if self._result("cuMemCreate", *arguments) == _OUT_OF_MEMORY:
            self.reclaim()
            self._call("cuMemCreate", *arguments)
        return int(handle.value)

    def destroy(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, handles: Sequence[int]) -> None:
        mapped = 0
        try:
            for handle in handles:
                place, size = (
                    ctypes.c_uint64(address + mapped * self.page_bytes),
                    ctypes.c_size_t(self.page_bytes),
                )
                plain = ctypes.c_ulonglong(0)
                self._call("cuMemMap", place, size, ctypes.c_size_t(0), ctypes.c_uint64(handle), plain)
                mapped += 1
            whole = ctypes.c_size_t(mapped * self.page_bytes)
            access = ctypes.byref(self._access)
            self._call("cuMemSetAccess", ctypes.c_uint64(address), whole, access, ctypes.c_size_t(1))
        except PageError:
            self.unmap(address, mapped)
            raise

    def unmap(self, address: int, pages: int) -> None:
        """Each as it was mapped: the driver does not cut what was mapped in one piece, nor join pieces."""
        for page in range(pages):
            place = ctypes.c_uint64(address + page * self.page_bytes)
            self._call("cuMemUnmap", place, ctypes.c_size_t(self.page_bytes))

    def zero(self, address: int, nbytes: int) -> None:
        """And wait: torch's streams do not wait for the one that this is launched on."""
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        self.wait()

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def settle(self) -> None:
        """Not the whole device: a layer that comes back beside it would be waited for in each step."""
        torch.cuda.current_stream(self._device).synchronize()

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return bytes_at(address, nbytes, self._device)

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = torch.cuda.Stream(self._device)  # what peers' batches are launched on would wait for a layer
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    def reclaim(self) -> None:
        torch.cuda.empty_cache()

    def close(self) -> None:
        return

    def _result(self, name: str, *arguments: Any) -> int:
        """In torch's context of this device, whichever thread it is."""
        with torch.cuda.device(self._device):
            return int(getattr(self._cuda, name)(*arguments))

    def _call(self, name: str, *arguments: Any) -> None:
        if (result := self._result(name, *arguments)) != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
            said = (text.value or b"an error it has no words for").decode()
            raise PageError(f"{name} on {self._device}: {said} ({result})")
