"""Kernels loaded on a device, and their launch.

`cupy.RawModule` loads them, but launches call the driver directly. CuPy's own launch converts arguments one by one, and for a
struct and three tensor maps that takes longer than the driver's launch.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rawattn._compile import compiler
from rawattn._compile.compiler import Cubin, Source
from rawattn._kernels.target import Target
from rawattn._runtime import driver

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class Arguments:
    """The parameters of a launch, in one buffer that does not move: pointers to the parameters, then the parameters' bytes.

    data: the buffer. view: its bytes. words: its 8-byte words. at: offsets of the parameters in it, in bytes.
    address: that of the buffer. patched: the addresses that were last written into it. early: the launch's configuration if
    it is an early launch, once there was one.
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
    """A kernel loaded on one device, which must be current when it is launched."""

    def __init__(self, function: Any) -> None:
        """function: a `cupy.RawKernel`, loaded on the device that is current now."""
        import cupy

        self._function = function  # keeps the handle valid
        self._handle: int = function.kernel.ptr
        self._enqueue = cupy.cuda.driver.launchKernel
        self._enqueue_early = driver.early_launcher()
        self._error = cupy.cuda.driver.CUDADriverError
        self._runtime = cupy.cuda.runtime

    def allow_shared_memory(self, nbytes: int) -> None:
        """Allows launches with `nbytes` of dynamic shared memory. The default limit is 48 KiB."""
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
        """Enqueues the kernel on a stream. The arguments are read before this returns.

        early: the kernel itself waits for those before it in the stream, so it may start early (`Step.early`).
        """
        self.launcher(threads, shared_bytes, early)(blocks, stream, arguments)

    def launcher(
        self, threads: int, shared_bytes: int, early: bool
    ) -> Callable[[int, int, Arguments], None]:
        """`launch` for blocks of one size: a function of the number of blocks, the stream and the arguments."""
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
        """Makes the device's context current in this thread: CUDA's runtime does so when needed, the driver does not."""
        self._runtime.memGetInfo()


_functions: dict[tuple[Source, int], Kernel] = {}
_loading: dict[tuple[Source, int], threading.Lock] = {}


def load(source: Source, device: int) -> Kernel:
    """The kernel of a source, compiled if no cache has it, and loaded on a device.

    Later calls return the same object. Safe to call from several threads.
    """
    return _functions.get((source, device)) or _load_once(source, device, None)


def load_all(sources: Iterable[Source], device: int) -> None:
    """Loads the kernels of a call, as `load` does. Those that no cache has are compiled at the same time."""
    missing = [each for each in dict.fromkeys(sources) if (each, device) not in _functions]
    if len(missing) < 2:
        return
    arch = compiler.device_arch(device)
    with ThreadPoolExecutor(len(missing)) as pool:
        try:
            found = [pool.submit(compiler.compile_source, source, arch) for source in missing]
        except RuntimeError:
            # No thread can be started while Python ends, or if the process has as many as it may. `load` needs none.
            return
        cubins = [each.result() for each in found]
    for source, cubin in zip(missing, cubins, strict=True):
        _load_once(source, device, cubin)


def _load_once(source: Source, device: int, cubin: Cubin | None) -> Kernel:
    with _loading.setdefault((source, device), threading.Lock()):
        function = _functions.get((source, device))
        if function is None:
            if cubin is None:
                cubin = compiler.compile_source(source, compiler.device_arch(device))
            function = _functions[source, device] = _load(cubin, source.entry, device)
    return function


@functools.cache
def target(device: int) -> Target:
    """The properties of a device by which kernels are chosen."""
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

    def load(path: Path) -> Kernel:
        # CuPy loads the file at first use. `Kernel` uses it at once, while the file exists and the device is current.
        return Kernel(cupy.RawModule(path=str(path)).get_function(entry))

    with cupy.cuda.Device(device):
        if cubin.path is not None:
            try:
                return load(cubin.path)
            except UnicodeEncodeError:  # CuPy takes only paths that are UTF-8
                pass
            except Exception:
                if cubin.path.exists():
                    raise
                # Another process has cleared the cache since the file was read.
        with tempfile.TemporaryDirectory(prefix="rawattn-") as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(cubin.image)
            return load(path)
