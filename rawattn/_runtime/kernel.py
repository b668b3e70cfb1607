"""Kernels loaded on a device, and their launch.

`cupy.RawModule` loads; the launch goes straight to the driver. CuPy's own converts one argument after the other, and takes
longer over a struct and three tensor maps than the driver over the launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rawattn._compile import compiler
from rawattn._compile.compiler import Cubin, Source
from rawattn._kernels.target import Target
from rawattn._runtime import driver

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class Arguments:
    """What a launch hands to the driver: pointers to the kernel's parameters, and behind them the parameters' bytes.

    data: all of it; view, words: the same by bytes, and by words of 8. at: where in it each parameter begins.
    address: of all of it, which does not move. patched: the addresses that were written to it last. early: of launches that
    are early.
    """

    __slots__ = ("_memory", "address", "at", "data", "early", "patched", "view", "words")

    def __init__(self, parameters: Sequence[bytes | bytearray]) -> None:
        count = len(parameters)
        self.patched: tuple[Any, ...] | None = None
        self.early: driver.EarlyLaunch | None = None
        self.data = bytearray(b"".join((bytes(8 * count), *parameters)))
        self.data += bytes(-len(self.data) % 8)
        self.view = memoryview(self.data)
        self.words = self.view.cast("Q")
        self._memory = ctypes.c_char.from_buffer(self.data)
        self.address = ctypes.addressof(self._memory)
        self.at: list[int] = []
        at = 8 * count
        for parameter in parameters:
            self.at.append(at)
            at += len(parameter)
        pointers = (self.address + offset for offset in self.at)
        struct.pack_into(f"<{count}Q", self.data, 0, *pointers)


class Kernel:
    """A kernel on one device. Launch it with that device current."""

    def __init__(self, function: Any) -> None:
        """function: a `cupy.RawKernel`, loaded on the device that is current now."""
        import cupy

        self._function = function  # as long as it is there, so is the handle
        self._handle: int = function.kernel.ptr
        self._enqueue = cupy.cuda.driver.launchKernel
        self._enqueue_early = driver.early_launcher()
        self._error = cupy.cuda.driver.CUDADriverError
        self._runtime = cupy.cuda.runtime

    def allow_shared_memory(self, nbytes: int) -> None:
        """A launch may ask for `nbytes` of dynamic shared memory; without this, for 48 KiB."""
        self._function.max_dynamic_shared_size_bytes = nbytes

    def launch(
        self,
        blocks: int,
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Arguments,
        early: bool = False,
    ) -> None:
        """Enqueues it on a stream. The arguments are read before this returns.

        early: it waits itself for the kernels before it (`Step.early`).
        """
        self.launcher(threads, shared_bytes, early)(blocks, stream, arguments)

    def launcher(
        self, threads: int, shared_bytes: int, early: bool
    ) -> Callable[[int, int, Arguments], None]:
        """`launch` of blocks of one form, from their number, the stream and the arguments."""
        return (self._launcher_early if early else self._launcher)(threads, shared_bytes)

    def _launcher(self, threads: int, shared_bytes: int) -> Callable[[int, int, Arguments], None]:
        handle, enqueue, failure = self._handle, self._enqueue, self._error

        def launch(blocks: int, stream: int, arguments: Arguments) -> None:
            pointers = arguments.address
            try:
                enqueue(handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)
            except failure as error:
                if error.status != _NO_CONTEXT:
                    raise
                self._make_context()
                enqueue(handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)

        return launch

    def _launcher_early(
        self, threads: int, shared_bytes: int
    ) -> Callable[[int, int, Arguments], None]:
        handle, enqueue = self._handle, self._enqueue_early

        def launch(blocks: int, stream: int, arguments: Arguments) -> None:
            early = arguments.early
            if early is None:
                early = arguments.early = driver.EarlyLaunch(threads, shared_bytes)
            if blocks != early.blocks or stream != early.stream:
                early.write(blocks, stream)
            status = enqueue(early.address, handle, arguments.address, None)
            if status == _NO_CONTEXT:
                self._make_context()
                status = enqueue(early.address, handle, arguments.address, None)
            if status:
                raise self._error(status)

        return launch

    def _make_context(self) -> None:
        """The runtime makes a thread's context when it needs it, the driver does not."""
        self._runtime.memGetInfo()


_functions: dict[tuple[Source, int], Any] = {}
_loading: dict[tuple[Source, int], threading.Lock] = {}


def load(source: Source, device: int) -> Kernel:
    """The kernel, compiled where it must be and loaded on a device.

    Later calls return the same object. Safe to call from several threads.
    """
    function = _functions.get((source, device))
    if function is None:
        with _loading.setdefault((source, device), threading.Lock()):
            function = _functions.get((source, device))
            if function is None:
                cubin = compiler.compile_source(source, compiler.device_arch(device))
                function = _functions[source, device] = _load(cubin, source.entry, device)
    return function


@functools.cache
def target(device: int) -> Target:
    """A device as kernels are chosen for it."""
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    _, memory = cupy.cuda.Device(device).mem_info
    return Target(
        arch=compiler.device_arch(device),
        shared_limit=attributes["MaxSharedMemoryPerBlockOptin"],
        multiprocessors=attributes["MultiProcessorCount"],
        memory=memory,
    )


def _load(cubin: Cubin, entry: str, device: int) -> Kernel:
    import cupy

    with contextlib.ExitStack() as stack:
        stack.enter_context(cupy.cuda.Device(device))
        path = cubin.path
        if path is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rawattn-"))
            path = Path(folder, "kernel.cubin")
            path.write_bytes(cubin.image)
        function = cupy.RawModule(path=str(path)).get_function(entry)
        # CuPy reads the file at first use: now, while it exists and its device is current.
        return Kernel(function)
