"""`cuMemcpyBatchAsync` of the CUDA driver (12.8 or newer) through ctypes: many copies with one call."""

import ctypes
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Pointers = npt.NDArray[np.uint64]

IN_STREAM_ORDER, AT_ANY_TIME = 1, 3  # CUmemcpySrcAccessOrder: when the source may be read
_SYMBOL, _VERSION = b"cuMemcpyBatchAsync", 12080


class BatchMemcpyError(RuntimeError):
    """The driver has no batch memcpy, or refuses one; the message says which."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, two location hints of two fields each, flags."""

    _fields_ = (("source_access_order", ctypes.c_uint), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class BatchMemcpy:
    """Batch copies on one stream; `in_driver_s` is the time spent in the driver, without the GIL.

    On a CPU the copies are made by `memmove`, one after the other.
    """

    def __init__(self, stream: Any | None) -> None:
        self._stream = stream
        self._call = _resolved() if stream is not None else None
        self.in_driver_s = 0.0

    def copy(self, targets: Pointers, sources: Pointers, nbytes: int, order: int) -> None:
        """Launch copies of `nbytes` each."""
        if self._call is None:
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                ctypes.memmove(target, source, nbytes)
            return
        assert self._stream is not None
        sizes = np.full(len(targets), nbytes, dtype=np.uint64)
        attributes = _Attributes(source_access_order=order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        began = time.perf_counter()
        code = self._call(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(targets),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            self._stream.cuda_stream,
        )
        self.in_driver_s += time.perf_counter() - began
        if code:
            raise BatchMemcpyError(f"cuMemcpyBatchAsync returns {code}, for copy {failed.value}")

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def batch_memcpy(device: str) -> BatchMemcpy:
    return BatchMemcpy(torch.cuda.Stream() if device == "cuda" else None)


def pointers(tensor: torch.Tensor, rows: list[int]) -> Pointers:
    """Return the addresses of these rows of the first dimension, each with its pieces of the second one."""
    step = tensor.element_size()
    first = np.asarray(rows, dtype=np.uint64) * np.uint64(tensor.stride(0) * step)
    pieces = np.arange(tensor.shape[1], dtype=np.uint64) * np.uint64(tensor.stride(1) * step)
    return (np.uint64(tensor.data_ptr()) + first[:, None] + pieces[None, :]).ravel()


def _resolved() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        find = driver.cuGetProcAddress_v2
    except (OSError, AttributeError) as error:
        raise BatchMemcpyError(f"the CUDA driver cannot be asked for its functions: {error}") from error
    find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    entry = ctypes.c_void_p()
    if (code := find(_SYMBOL, ctypes.addressof(entry), _VERSION, 0, None)) or not entry.value:
        raise BatchMemcpyError(f"the CUDA driver has no cuMemcpyBatchAsync: cuGetProcAddress returns {code}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    arguments = pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    return ctypes.CFUNCTYPE(ctypes.c_uint, *arguments)(entry.value)
