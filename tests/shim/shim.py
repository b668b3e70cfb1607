"""Compiles kernels with g++ against target/host.cuh and runs them on memory that faults outside its arrays."""

from __future__ import annotations

import mmap
import os
import re
import threading
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rawattn._compile.compiler import Source, kernels_dir
from tests.shim.arena import arena, bytes_at
from tests.shim.runner import Launch, Runner
from tests.shim.store import Store

HERE = Path(__file__).parent
POISON = 0xFF  # NaN as any floating-point type, -1 as an integer
_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16  # bytes of the widest access
# The C++ files of the simulator.
_PARTS = (
    *("machine", "child", "fiber", "shared_memory", "wave_copies"),
    *("mbarrier", "tensor_copy", "warp_group"),
)
_OPTIONS = ("-DRAWATTN_TARGET_HOST",)


class Fault(AssertionError):
    """A kernel made a mistake that a GPU would answer with a crash, a hang or results that vary from run to run."""


@dataclass(frozen=True)
class Build:
    """A kernel for waves of 32 or 64 threads; `checked` adds the undefined-behaviour sanitizer."""

    source: Source
    wave: int = 32
    checked: bool = False
    fibers: str = "own"  # how stacks are switched: "own" (assembly for x86-64) or "ucontext"


class Builder:
    """Compiles each build once."""

    def __init__(self, folder: Path) -> None:
        """folder: where compiled files are kept between runs."""
        self._store = Store(folder, [kernels_dir(), HERE])
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._runner = Runner()
        self._machines: dict[str, list[Path]] = {}
        self._machines_lock = threading.Lock()
        # An empty library that depends on g++'s runtime libraries. It is loaded once for all kernels, which are linked without
        # those libraries: linking with them takes longer than compiling a kernel.
        options = ["-shared", "-Wl,--no-as-needed", "-lstdc++", "-lm"]
        self._needs = self._store.compile("", ".so", options, summary="the libraries of kernels")
        self._started: dict[Build, Future[Path]] = {}
        self._kernels: dict[Build, Kernel] = {}

    def start(self, build: Build) -> None:
        """Compiles `build` in the background, after the builds started earlier."""
        if build not in self._started:
            self._started[build] = self._pool.submit(self._link, build)

    def kernel(self, build: Build) -> Kernel:
        if build not in self._kernels:
            started = self._started.get(build)
            # If its compilation is still queued, compile it here rather than wait for the builds before it.
            if started is None or started.cancel():
                path = self._link(build)
            else:
                path = started.result()
            self._kernels[build] = Kernel(path, self._needs, self._runner)
        return self._kernels[build]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._runner.close()
        self._store.prune()

    def _link(self, build: Build) -> Path:
        entry = f'#include "machine.hpp"\nSHIM_ENTRY({build.source.entry})\n'
        options = [*_OPTIONS, f"-DRAWATTN_WAVE={build.wave}", "-Og", "-shared"]
        if build.checked:
            options += ["-fsanitize=undefined", "-fno-sanitize-recover"]
        else:
            options += ["-nodefaultlibs"]
        text, objects = build.source.text + entry, self._machine(build.fibers)
        return self._store.compile(text, ".so", options, objects, summary=build.source.summary)

    def _machine(self, fibers: str) -> list[Path]:
        """The simulator's objects: one set for all kernels, since the wave size is a field of each launch."""
        with self._machines_lock:
            if fibers not in self._machines:
                options = [*_OPTIONS, "-DRAWATTN_WAVE=32", "-O2", "-c"]
                options += ["-DSHIM_UCONTEXT"] if fibers == "ucontext" else []
                texts = {part: (HERE / f"{part}.cpp").read_text("utf-8") for part in _PARTS}
                self._machines[fibers] = [
                    self._store.compile(text, ".o", options, summary=f"the machine's {part}")
                    for part, text in texts.items()
                ]
            return self._machines[fibers]


class Kernel:
    def __init__(self, path: Path, needs: Path, runner: Runner) -> None:
        self._library, self._needs, self._runner = str(path), str(needs), runner

    def run(
        self,
        *params: np.void,
        grid: int,
        threads: int,
        cluster: int = 1,
        shared_bytes: int = 0,
        seed: int = 1,
        memory: Iterable[Memory] = (),
        late: Mapping[str, int] | None = None,
    ) -> None:
        """Runs all blocks of the grid, `cluster` at a time. params: the values of the kernel's parameters.

        `seed` determines the order in which threads run and copies arrive. A fault's message names the array of `memory`
        whose bytes were touched. late: names of arrays that a kernel before this one writes at its end, and the integer
        that all of their elements are until then.

        Raises Fault for an access outside of every Memory and of shared memory, diverged threads, deadlocks, copies and
        products that are not waited for, accesses to a block of the cluster that has exited, and undefined behaviour (in a
        checked build).
        """
        if not grid:
            return
        values = tuple(value.tobytes() for value in params)
        shape = grid, cluster, threads, shared_bytes, seed & 0xFFFFFFFF
        writes = tuple(
            (each.address, np.full_like(x, late[each.name]).tobytes(), x.tobytes())
            for each in memory
            if late and each.name in late and (x := each.array()).size
        )
        launch = Launch(self._library, self._needs, values, *shape, arena().regions, writes)
        outcome = self._runner.run(launch, arena().file)
        assert outcome.parameter_bytes == (*map(len, values), 0), "the twins of a struct differ"
        if outcome.failed:
            said = outcome.report
            raise Fault(re.sub(r"address (0x[0-9a-f]+)", lambda m: _byte_of(m, memory), said))


class Memory:
    """Bytes shared with the process that runs kernels, between two guard pages that fault there when touched.

    At most 15 bytes lie between the last byte and the guard page after it. The slack around the bytes holds POISON.
    """

    def __init__(self, name: str, data: Any, *, phase: int = 0, readonly: bool = True) -> None:
        """phase: the address modulo 16; readonly: whether a write by a kernel faults."""
        data = np.ascontiguousarray(data)
        self.name, self.dtype = name, data.dtype
        body = -(-(data.nbytes + _ALIGNMENT) // _PAGE) * _PAGE
        self._base = arena().take(body, readonly=readonly)
        # Not at exit: the arena then goes as a whole, and a forked process that exits must not release this one's memory.
        weakref.finalize(self, arena().release, self._base, body).atexit = False
        whole = bytes_at(self._base, body)
        start = body - data.nbytes
        start -= (start - phase) % _ALIGNMENT
        self.address = self._base + start
        self._bytes = whole[start : start + data.nbytes]
        self._around = (whole[:start], whole[start + data.nbytes :])
        for slack in self._around:
            slack[:] = POISON
        self._bytes[:] = data.reshape(-1).view(np.uint8)
        # Includes the guard pages.
        self._reach = range(self._base - _PAGE, self._base + body + _PAGE)

    def array(self) -> np.ndarray:
        """A copy of the content; asserts that nothing was written into the slack around it."""
        assert all((slack == POISON).all() for slack in self._around), (
            f"{self.name}: written around"
        )
        return self._bytes.view(self.dtype).copy()

    def write(self, data: np.ndarray) -> None:
        """Replaces the content."""
        self._bytes[:] = np.ascontiguousarray(data, self.dtype).reshape(-1).view(np.uint8)

    def free(self) -> None:
        """Makes every later access by a kernel fault; the address is not given out again."""
        arena().forbid(self._base)

    def contains(self, address: int) -> bool:
        return address in self._reach


def _byte_of(match: re.Match[str], memory: Iterable[Memory]) -> str:
    address = int(match[1], 16)
    for array in memory:
        if array.contains(address):
            return f"byte {address - array.address} of {array.name} ({array._bytes.size} bytes)"
    return f"{match[0]}, of no array,"
