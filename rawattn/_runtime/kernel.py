"""A loaded kernel and its launch.

`cupy.RawModule` loads; the launch goes straight to the driver. CuPy's own converts one argument after the other, and takes
longer over a struct and three tensor maps than the driver over the launch.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any


class Kernel:
    """A kernel on one device. Launch it with that device current."""

    def __init__(self, function: Any) -> None:
        """function: a `cupy.RawKernel`, loaded on the device that is current now."""
        import cupy

        self._function = function  # as long as it is there, so is the handle
        self._handle: int = function.kernel.ptr
        self._current_stream = cupy.cuda.get_current_stream
        self._enqueue = cupy.cuda.driver.launchKernel

    def allow_shared_memory(self, nbytes: int) -> None:
        """A launch may ask for `nbytes` of dynamic shared memory; without this, for 48 KiB."""
        self._function.max_dynamic_shared_size_bytes = nbytes

    def __call__(
        self, blocks: int, threads: int, *arguments: bytes | bytearray, shared_bytes: int = 0
    ) -> None:
        """Launches on CuPy's current stream. arguments: the bytes of each parameter of the kernel, read before this returns."""
        if not _thread.bound:
            _thread.bind()
        # The driver wants an array of pointers to the arguments: here it stands before them.
        count = len(arguments)
        buffer = bytearray(b"".join((bytes(8 * count), *arguments)))
        first = ctypes.c_char.from_buffer(buffer)
        address = ctypes.addressof(first)
        pointers, at = [], address + 8 * count
        for argument in arguments:
            pointers.append(at)
            at += len(argument)
        struct.pack_into(f"<{count}Q", buffer, 0, *pointers)
        stream: int = self._current_stream().ptr
        self._enqueue(self._handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, address, 0)


class _Thread(threading.local):
    """Whether the calling thread has a context. The runtime makes one when it needs it, the driver does not."""

    bound = False

    def bind(self) -> None:
        import cupy

        cupy.cuda.runtime.memGetInfo()  # needs one
        self.bound = True


_thread = _Thread()
