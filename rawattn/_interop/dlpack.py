"""Reads DLPack capsules into NumPy or CuPy views, and writes them for other frameworks, without copies.

The readers of NumPy and CuPy do not suffice: NumPy's knows no bfloat16, and CuPy's does not tell whether
a tensor is read-only. A capsule read here is never renamed to "used". It stays the owner of its memory,
which its producer's destructor frees when the last view dies.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import cupy

MAX_VERSION = (1, 0)
MANAGED = 13
HOST_TYPES = (1, 3)  # kDLCPU, kDLCUDAHost (pinned host memory)
DEVICE_TYPES = (2, MANAGED)  # kDLCUDA, kDLCUDAManaged

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BFLOAT_CODE = 4
# Of all formats of 8 bits, so that a call can refuse by name those that it does not read.
FLOAT8_CODES = {
    np.dtype(getattr(ml_dtypes, name)): code
    for name, code in (
        ("float8_e4m3b11fnuz", 9),
        ("float8_e4m3fn", 10),
        ("float8_e4m3fnuz", 11),
        ("float8_e5m2", 12),
        ("float8_e5m2fnuz", 13),
    )
}
_DTYPES = {
    **{(0, bits): np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{(1, bits): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{(2, bits): np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    (_BFLOAT_CODE, 16): BFLOAT16,
    **{(code, 8): dtype for dtype, code in FLOAT8_CODES.items()},
    **{(5, bits): np.dtype(f"complex{bits}") for bits in (64, 128)},
    (6, 8): np.dtype(bool),
}
# DLPack type codes of the dtypes that NumPy itself does not have.
_CODES = {BFLOAT16: _BFLOAT_CODE, **FLOAT8_CODES}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_READ_ONLY = 1

# Prototypes of our own, since argtypes set on the functions of ctypes.pythonapi would hold for the whole process.
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Tensor(NamedTuple):
    """The tensor that a capsule describes. The capsule owns the memory. Strides are in bytes, None for C order."""

    pointer: int
    device_type: int
    device_id: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    readonly: bool
    capsule: object


def _open(capsule: object) -> tuple[_DLTensor, bool]:
    """The tensor inside an unused capsule, and whether it is read-only."""
    name = _capsule_name(capsule)
    if name == b"dltensor":
        return _DLTensor.from_address(_capsule_pointer(capsule, name)), False
    if name != b"dltensor_versioned":
        raise BufferError(f"not an unused DLPack capsule: {capsule!r}")
    managed = _ManagedVersioned.from_address(_capsule_pointer(capsule, name))
    if managed.major > MAX_VERSION[0]:
        raise BufferError(f"DLPack version {managed.major}.{managed.minor}; 1.x is understood")
    return managed.tensor, bool(managed.flags & _READ_ONLY)


def read(capsule: object) -> Tensor:
    """The tensor of a capsule. TypeError for an unknown dtype; BufferError if it is used, of a newer major version, or without
    memory.
    """
    raw, readonly = _open(capsule)
    dtype = _DTYPES.get((raw.code, raw.bits)) if raw.lanes == 1 else None
    if dtype is None:
        raise TypeError(
            f"DLPack dtype code {raw.code}, {raw.bits} bits, {raw.lanes} lanes; accepted are "
            "float16, bfloat16, float32, float64, float8_e4m3fn, int, bool and complex"
        )
    ndim, itemsize = raw.ndim, dtype.itemsize
    if not raw.data and 0 not in raw.shape[:ndim]:
        raise BufferError(
            "it has no memory: this was freed, or the values are elsewhere, in an array that it wraps"
        )
    return Tensor(
        pointer=(raw.data or 0) + raw.byte_offset,
        device_type=raw.device_type,
        device_id=raw.device_id,
        dtype=dtype,
        shape=tuple(raw.shape[:ndim]),
        strides=tuple([s * itemsize for s in raw.strides[:ndim]]) if raw.strides else None,
        readonly=readonly,
        capsule=capsule,
    )


class _HostMemory:
    """An object with an array interface. NumPy keeps it, and so the capsule, as the base of the view."""

    __slots__ = ("__array_interface__", "_capsule")

    def __init__(self, tensor: Tensor, typestr: str) -> None:
        self._capsule = tensor.capsule
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.pointer, tensor.readonly),
            "typestr": typestr,
            "shape": tensor.shape,
            "strides": tensor.strides,
        }


def host_view(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A NumPy view of host memory."""
    if 0 in tensor.shape:  # the pointer may be null
        return np.empty(tensor.shape, tensor.dtype)
    if tensor.dtype in _CODES:  # an array interface has no typestr for it
        words = f"<u{tensor.dtype.itemsize}"
        return np.asarray(_HostMemory(tensor, words)).view(tensor.dtype)
    return np.asarray(_HostMemory(tensor, tensor.dtype.str))


def device_view(tensor: Tensor, owner: object) -> cupy.ndarray:
    """A CuPy view of device memory that keeps `owner` alive."""
    # A capsule of managed memory may say device 0; with -1 CuPy asks CUDA for the device that allocated it.
    managed = tensor.device_type == MANAGED and tensor.pointer
    device = -1 if managed else tensor.device_id
    return device_array(tensor.pointer, tensor.shape, tensor.dtype, tensor.strides, device, owner)


def device_array(
    pointer: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None,
    device: int,
    owner: object,
) -> cupy.ndarray:
    """A CuPy array over memory that `owner` keeps alive. device: -1 lets CuPy ask CUDA for it."""
    import cupy

    memory = cupy.cuda.UnownedMemory(pointer, math.prod(shape) * dtype.itemsize, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)


def write(array: Any, **keywords: Any) -> object:
    """A capsule of a NumPy or CuPy array, made by its own `__dlpack__(**keywords)`.

    A bfloat16 or float8 array, which NumPy refuses, is exported as integers, and the dtype in the capsule is then
    corrected. So ownership and the deleter stay those of NumPy's or CuPy's C code.
    """
    code = _CODES.get(array.dtype)
    if code is None:
        return array.__dlpack__(**keywords)
    capsule = array.view(f"u{array.dtype.itemsize}").__dlpack__(**keywords)
    raw, _ = _open(capsule)
    raw.code = code
    return capsule
