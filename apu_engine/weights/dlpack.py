"""DLPack capsules over memory that numpy did not allocate: file pages on the CPU, their device addresses on a GPU.

numpy writes the capsule, since its deleter is C code that is safe in any thread and at exit; the fields it cannot know
(device, bfloat16, read-only) are set afterwards. Source of the layout: https://github.com/dmlc/dlpack, dlpack.h 1.0.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU, ROCM = 1, 10  # DLDeviceType
BFLOAT = 4  # DLDataTypeCode
READ_ONLY = 1  # flag of a versioned tensor
VERSIONED = (1, 0)


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer.restype = ctypes.c_void_p


class _Memory:
    """An address range as numpy takes it, and what keeps it valid."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def capsule(
    address: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    device: tuple[int, int],
    owner: object,
    bfloat16: bool = False,
    versioned: bool = True,
) -> Any:
    """A "dltensor_versioned" capsule that says that it is read-only, else a "dltensor", which cannot say so.

    `strides` are in bytes. `owner` is held until the consumer calls the deleter, or the capsule is dropped unused.
    Raises BufferError for an address or a stride that is no multiple of an element, and where numpy is too old to write
    versions (before 2.1).
    """
    interface = {
        "data": (address, False),  # numpy refuses what is read-only where it cannot say so
        "typestr": dtype.str,
        "shape": shape,
        "strides": strides,
        "version": 3,
    }
    memory = np.asarray(_Memory(interface, owner))
    if address % dtype.itemsize or any(stride % dtype.itemsize for stride in strides):
        raise BufferError(f"{address:#x} is no multiple of {dtype.itemsize} bytes; copy it: np.array(weight.numpy())")
    if not versioned:
        out = memory.__dlpack__()
        plain = DLManagedTensor.from_address(_pointer(out, b"dltensor"))
        tensor = plain.tensor
    else:
        try:
            out = memory.__dlpack__(max_version=VERSIONED)
        except TypeError:
            raise BufferError("read-only memory needs DLPack 1.0, which numpy has from 2.1 on") from None
        managed = DLManagedTensorVersioned.from_address(_pointer(out, b"dltensor_versioned"))
        managed.flags |= READ_ONLY
        tensor = managed.tensor
    tensor.device_type, tensor.device_id = device
    if bfloat16:
        tensor.code = BFLOAT
    return out
