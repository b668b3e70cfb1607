"""The process that kernels run in. It uses little memory, so that forking it for each launch is fast.

It maps the arena (`tests.shim.arena`) at the same address as the test process, and lets a kernel touch the
regions that its launch names. `Runner` starts it as a script; nothing heavy may be imported here.
"""

from __future__ import annotations

import _ctypes
import ctypes
import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# An address far from all that the operating system chooses for mappings.
ARENA = 1 << 44
ARENA_BYTES = 1 << 42  # of address space; only pages that are written take memory
_PROT_NONE = 0
_MAP_FIXED_NOREPLACE = 0x100000
_REPORT_BYTES = 8192
_LIBRARIES = 16  # the most kernel libraries that stay loaded: each one makes forks slower
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class Region:
    """Whole pages of the arena that kernels may touch."""

    start: int
    size: int
    readonly: bool


@dataclass(frozen=True)
class Launch:
    """needs: the library that provides the symbols `library` leaves undefined.

    late: what a kernel before this one writes at its end: addresses, and the bytes before and after that.
    """

    library: str
    needs: str
    params: tuple[bytes, ...]
    grid: int
    cluster: int
    threads: int
    shared_bytes: int
    seed: int
    regions: tuple[Region, ...]
    late: tuple[tuple[int, bytes, bytes], ...] = ()


class _LateWrite(ctypes.Structure):
    """Twin of `LateWrite` in machine.hpp."""

    _fields_ = (
        ("to", ctypes.c_void_p),
        ("before", ctypes.c_char_p),
        ("after", ctypes.c_char_p),
        ("bytes", ctypes.c_size_t),
    )


@dataclass(frozen=True)
class Outcome:
    """parameter_bytes: sizes of the kernel's parameters, then 0. The kernel ran only if the launch has the same sizes."""

    parameter_bytes: tuple[int, ...]
    failed: bool
    report: str


def map_arena(file: int, protection: int) -> None:
    """Maps the arena at its fixed address. Raises OSError if that address range is in use."""
    flags = mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE
    if _libc.mmap(ARENA, ARENA_BYTES, protection, flags, file, 0) != ARENA:
        raise OSError(ctypes.get_errno(), f"no mapping of {ARENA_BYTES} bytes at {ARENA:#x}")


class Runner:
    """The test process's end of the connection. The first launch starts the other process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self, launch: Launch, arena: int) -> Outcome:
        """Runs a launch and waits for it. arena: the file descriptor of the arena."""
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-I", "-S", __file__, str(arena)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                self._process = subprocess.Popen(command, pass_fds=[arena], **pipes)
            into, back = self._process.stdin, self._process.stdout
            assert into is not None
            assert back is not None
            try:
                pickle.dump(_plain(launch), into)
                into.flush()
                return Outcome(*pickle.load(back))
            except (EOFError, BrokenPipeError):
                status = self._process.wait()
                raise RuntimeError(f"what runs kernels has ended with status {status}") from None

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.communicate()
                self._process = None


def _plain(launch: Launch) -> dict[str, Any]:
    """The launch as builtin types: pickled classes would not be found, since a script's module is `__main__`."""
    regions = [(each.start, each.size, each.readonly) for each in launch.regions]
    return {**vars(launch), "regions": regions}


class _Libraries:
    """The kernel libraries used most recently, loaded."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[str, ctypes.CDLL] = OrderedDict()
        self._needed: set[str] = set()

    def load(self, path: str, needs: str) -> ctypes.CDLL:
        """needs: the library that provides the symbols `path` leaves undefined; it stays loaded."""
        if needs not in self._needed:
            ctypes.CDLL(needs, ctypes.RTLD_GLOBAL)
            self._needed.add(needs)
        if path not in self._loaded:
            self._loaded[path] = ctypes.CDLL(path)
        self._loaded.move_to_end(path)
        if len(self._loaded) > _LIBRARIES:
            _, oldest = self._loaded.popitem(last=False)
            _ctypes.dlclose(oldest._handle)
        return self._loaded[path]


def _protect(regions: Iterable[Region], *, allow: bool) -> None:
    for region in regions:
        allowed = mmap.PROT_READ if region.readonly else mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mprotect(region.start, region.size, allowed if allow else _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")


def _run(library: ctypes.CDLL, launch: Launch) -> Outcome:
    count = len(launch.params)
    sizes = tuple(library.shim_parameter_bytes(n) for n in range(count + 1))
    if sizes != (*map(len, launch.params), 0):
        return Outcome(sizes, True, "")
    values = [ctypes.create_string_buffer(value, len(value)) for value in launch.params]
    packed = (ctypes.c_void_p * count)(*map(ctypes.addressof, values))
    report = ctypes.create_string_buffer(_REPORT_BYTES)
    late = (_LateWrite * len(launch.late))(
        *((to, before, after, len(after)) for to, before, after in launch.late)
    )
    _protect(launch.regions, allow=True)
    failed = library.shim_run(
        packed,
        launch.grid,
        launch.cluster,
        launch.threads,
        launch.shared_bytes,
        ctypes.c_uint(launch.seed),
        late,
        len(late),
        report,
        _REPORT_BYTES,
    )
    _protect(launch.regions, allow=False)
    return Outcome(sizes, bool(failed), report.value.decode(errors="replace"))


def _serve(arena: int) -> None:
    """Answers launches until the requests end."""
    map_arena(arena, _PROT_NONE)
    requests = sys.stdin.buffer
    # Replies go to a copy of stdout. Stdout itself becomes stderr, so that printed text does not mix with replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    libraries = _Libraries()
    while True:
        try:
            fields = pickle.load(requests)
        except EOFError:
            return
        fields["regions"] = tuple(Region(*each) for each in fields["regions"])
        launch = Launch(**fields)
        outcome = _run(libraries.load(launch.library, launch.needs), launch)
        pickle.dump((outcome.parameter_bytes, outcome.failed, outcome.report), replies)
        replies.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
