"""The calls of the CUDA driver that CuPy does not offer.

Straight from the driver's library: CUDA's Python bindings have them too, but take 14 ms to import, half of what a process
would wait for its first cached kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence

_LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"

# Of cuda.h.
_DATA_TYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0}  # the last one as bytes
# What a box asks for is fetched, and no more: where a row of a head is 256 bytes, its other half belongs to a box that is
# asked for at once, and to fetch it twice takes a tenth of the memory's bandwidth (docs/notes/decode.md).
_NOT_INTERLEAVED, _SWIZZLE_128B, _L2_PROMOTION_128B, _ZEROS_OUTSIDE = 0, 3, 2, 0

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_CAPTURE_MODE_RELAXED = 2
# CUlaunchConfig: grid, block, bytes of shared memory, stream, and its one CUlaunchAttribute, which lies behind it.
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
    """A map for TMA, innermost axis first, in the 128-byte swizzle; what lies outside is read as zeros.

    strides: in bytes, without the innermost axis's.
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
    """A launch that may begin before those before it in the stream are done, as `early_launcher` is given it.

    address: of it, which does not move. blocks, stream: those that are written there.
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
    """Takes the address of an `EarlyLaunch`, a kernel, the address of its arguments and None; returns CUDA's error."""
    launch = _library().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


@contextlib.contextmanager
def outside_capture() -> Iterator[None]:
    """What this thread allocates and waits for on streams of its own is no matter of a capture that is under way."""
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
