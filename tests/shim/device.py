"""A stand-in for CuPy under rawattn's launch code: its memory is the shim's, its kernels are built by g++.

The launch code itself (parameters, sizes, order of launches) thus runs unchanged, without a GPU.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn._call.layout import Lengths, Side
from rawattn._compile import compiler
from rawattn._kernels.steps import Geometry
from rawattn._kernels.target import Target
from rawattn._runtime import driver, kernel
from rawattn._runtime.kernel import Arguments
from tests.shim.launch import Machine
from tests.shim.shim import POISON, Memory
from tests.shim.tensor_map import encode

MakeDevice = Callable[..., "Device"]
Launch = Callable[[], None]

# The shared memory of an H100, in bytes, and three SMs.
ATTRIBUTES = {"shared_limit": 232448, "multiprocessors": 3}


class Device:
    """While it is installed, each launch runs on `machine` and is complete when it returns. Those that a stream captures run
    when their graph is launched.

    arch: the architecture that launch code sees; sm_90a makes it choose Hopper's kernels.
    """

    def __init__(self, machine: Machine, arch: str = "sm_80") -> None:
        self._machine, self._arch = machine, arch
        self.memory: list[Memory] = []  # all that kernels may touch
        self.launched: list[str] = []  # entries of the launched kernels, in order
        self.summaries: list[str] = []  # summaries of the launched kernels, in order
        self.launched_early: list[str] = []  # entries of those that earlier kernels may run beside
        # Names of arrays that a kernel before these writes at its end, and what all of their elements are until then.
        self.late: dict[str, int] = {}
        self._captured: list[Launch] | None = None  # while a stream captures
        self._graphs: list[list[Launch]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def memset(address: int, value: int, nbytes: int, stream: int) -> None:
            (memory,) = (each for each in self.memory if each.address == address)
            memory.write(np.full(nbytes, value, np.uint8).view(memory.dtype))

        def launch_graph(handle: int, stream: int) -> None:
            for launch in self._graphs[handle]:
                launch()

        runtime = SimpleNamespace(
            memsetAsync=memset, graphLaunch=launch_graph, streamCaptureModeRelaxed=2
        )
        cuda = SimpleNamespace(runtime=runtime, Stream=self._stream)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        target = Target(self._arch, **ATTRIBUTES, wave=self._machine.wave)
        monkeypatch.setattr(kernel, "target", lambda device: target)
        monkeypatch.setattr(kernel, "load", lambda source, device: _Kernel(self, source))
        monkeypatch.setattr(kernel, "load_all", lambda sources, device: None)
        monkeypatch.setattr(driver, "encode_tensor_map", _encode)
        monkeypatch.setattr(driver, "outside_capture", nullcontext)

    def _stream(self, non_blocking: bool) -> Any:
        """A stream that captures a graph."""

        def begin(mode: int) -> None:
            self._captured = []

        def end() -> Any:
            assert self._captured is not None
            self._graphs.append(self._captured)
            self._captured = None
            return SimpleNamespace(graphExec=len(self._graphs) - 1, upload=lambda stream: None)

        return SimpleNamespace(
            ptr=64, begin_capture=begin, end_capture=end, synchronize=lambda: None
        )

    def enqueue(self, launch: Launch) -> None:
        """Runs a launch, or adds it to the graph that is being captured."""
        if self._captured is None:
            launch()
        else:
            self._captured.append(launch)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> _Array:
        count = math.prod(shape) if isinstance(shape, tuple) else shape
        raw = np.full(count * np.dtype(dtype).itemsize, POISON, np.uint8)
        memory = self.keep(Memory("scratch", raw.view(dtype), readonly=False))
        array = _Array(memory)
        # No kernel may touch an array that is no longer referenced. (A kernel is complete when its launch returns.)
        weakref.finalize(array, memory.free)
        return array

    def lengths(self, lengths: Lengths) -> Lengths:
        """The same lengths as arrays on the device, which the host does not read."""

        def side(each: Side) -> Side:
            start, length, position = (
                x if x is None else _Array(self.keep(Memory("lengths", x)))
                for x in (each.start, each.length, each.position)
            )
            return replace(each, start=start, length=length, position=position, padded=True)

        q = side(lengths.q)
        k = q if lengths.k is lengths.q else side(lengths.k)
        return replace(lengths, q=q, k=k, on_host=False, memo={})

    @contextmanager
    def telling(self, side: str = "k", **wild: Any) -> Iterator[None]:
        """Puts integers of one side that the host would refuse in the device's memory, in place of the valid ones."""
        lengths = self.lengths

        def changed(given: Lengths) -> Lengths:
            own = getattr(given, side)
            return lengths(replace(given, **{side: replace(own, max_seqlen=own.rows, **wild)}))

        self.lengths = changed  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.lengths = lengths  # type: ignore[method-assign]

    def keep(self, memory: Memory) -> Memory:
        self.memory.append(memory)
        return memory


class Allocator:
    """The functions that launch code calls of the framework whose memory it uses."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        array = self._device.empty(nbytes, np.uint8)
        return array, array.data.ptr

    keep = allocate

    def keeps_captured(self) -> bool:
        return False


def _encode(
    dtype: str,
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> bytes:
    return encode(Geometry(dtype, dims, strides, box, origin=0), address).tobytes()


class _Array:
    def __init__(self, memory: Memory) -> None:
        self._memory, self.dtype = memory, memory.dtype
        self.data = SimpleNamespace(ptr=memory.address, device_id=0)


class _Kernel:
    def __init__(self, device: Device, source: compiler.Source) -> None:
        self._device, self._source = device, source
        self._allowed = 48 << 10

    def allow_shared_memory(self, nbytes: int) -> None:
        self._allowed = nbytes

    def launcher(self, threads: int, shared_bytes: int, early: bool) -> Any:
        return lambda blocks, stream, arguments: self.launch(
            blocks, threads, shared_bytes, stream, arguments, early
        )

    def launch(
        self,
        blocks: int,
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Arguments,
        early: bool = False,
    ) -> None:
        assert blocks > 0, f"{self._source.entry}: a GPU refuses a grid of no blocks"
        assert shared_bytes <= self._allowed
        ends = [*arguments.at[1:], len(arguments.data)]
        params = [bytes(arguments.data[a:b]) for a, b in zip(arguments.at, ends, strict=True)]

        def run() -> None:
            self._device.launched.append(self._source.entry)
            self._device.summaries.append(self._source.summary)
            if early:
                self._device.launched_early.append(self._source.entry)
            self._device._machine.run(
                self._source,
                *(np.frombuffer(each, np.dtype((np.void, len(each)))) for each in params),
                grid=blocks,
                threads=threads,
                shared_bytes=shared_bytes,
                memory=self._device.memory,
                late=self._device.late if early else None,
            )

        self._device.enqueue(run)
