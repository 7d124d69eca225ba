"""A tensor of bytes at an address, by way of DLPack: the one public protocol by which torch takes memory of
somebody else's, a GPU's too, without asking the driver what is mapped there."""

import ctypes
from typing import Any

import torch

_UNSIGNED = 1
_KINDS = {"cpu": 1, "cuda": 2}


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
    """Nobody frees the memory with it."""
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
