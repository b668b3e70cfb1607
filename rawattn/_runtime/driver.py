"""Functions of the CUDA driver that CuPy does not offer, called in the driver's library by ctypes.

CUDA's Python bindings have them too, but take 14 ms to import. That is half of the time that a process needs for its first
cached kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence

_LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"

# CUtensorMapDataType of cuda.h, by dtype. float8 is copied as bytes.
_DATA_TYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0}
# Enumerators of cuda.h for cuTensorMapEncodeTiled: interleave, swizzle, L2 promotion, fill of elements out of bounds.
# L2 promotion of 128 bytes fetches just what a box needs. Where a row of a head has 256 bytes, the other half belongs to a box
# that is requested at the same time. A larger promotion would fetch it twice, at the cost of a tenth of the DRAM bandwidth
# (docs/notes/decode.md).
_NOT_INTERLEAVED, _SWIZZLE_128B, _L2_PROMOTION_128B, _ZEROS_OUTSIDE = 0, 3, 2, 0

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# CUlaunchConfig: grid, block, bytes of shared memory, stream, address and number of attributes. Its one CUlaunchAttribute
# follows directly behind it.
_LAUNCH = struct.Struct("<7I4xQQI4x")
_LAUNCH_ATTRIBUTE = struct.Struct("<I4xi60x")
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


def encode_tensor_map(
    dtype: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
) -> bytes:
    """A tensor map for TMA with the 128-byte swizzle. Elements out of bounds are read as zeros.

    dims, strides, box: innermost axis first. strides: in bytes, without that of the innermost axis.
    """
    rank = len(dims)
    room = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    start = -ctypes.addressof(room) % _MAP_ALIGNMENT
    _call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(room, start),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        *(_NOT_INTERLEAVED, _SWIZZLE_128B, _L2_PROMOTION_128B, _ZEROS_OUTSIDE),
    )
    return room.raw[start : start + _MAP_BYTES]


class EarlyLaunch:
    """The CUlaunchConfig of a programmatic dependent launch, which may start before the kernels before it have finished.

    address: that of the CUlaunchConfig, which does not move. blocks, stream: the values that it holds now.
    """

    __slots__ = ("_form", "_memory", "_room", "address", "blocks", "stream")

    def __init__(self, threads: int, shared_bytes: int) -> None:
        self._form = threads, shared_bytes
        self._room = bytearray(_LAUNCH.size + _LAUNCH_ATTRIBUTE.size)
        self._memory = ctypes.c_char.from_buffer(self._room)
        self.address = ctypes.addressof(self._memory)
        self.blocks = self.stream = -1
        _LAUNCH_ATTRIBUTE.pack_into(self._room, _LAUNCH.size, _PROGRAMMATIC_STREAM_SERIALIZATION, 1)

    def write(self, blocks: int, stream: int) -> None:
        threads, shared_bytes = self._form
        attribute = self.address + _LAUNCH.size
        _LAUNCH.pack_into(
            self._room, 0, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, attribute, 1
        )
        self.blocks, self.stream = blocks, stream


@functools.cache
def early_launcher() -> Callable[[int, int, int, None], int]:
    """cuLaunchKernelEx. Takes the address of an `EarlyLaunch`, a kernel, the address of its arguments and None.

    Returns CUDA's error code.
    """
    launch = _library().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


@contextlib.contextmanager
def outside_capture() -> Iterator[None]:
    """Lets this thread allocate memory and wait for its own streams without invalidating a capture that is under way."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with CUDA error {status}")


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(_LIBRARY)
