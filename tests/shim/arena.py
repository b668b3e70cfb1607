"""An address range that the test process shares with the process that runs kernels (`tests.shim.runner`).

The tests can read and write all of it. Each launch says which parts its kernel may touch.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import numpy as np

from tests.shim.runner import ARENA, ARENA_BYTES, Region, map_arena

_PAGE = mmap.PAGESIZE
_MADV_REMOVE = 9
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """No address is given out twice."""

    def __init__(self) -> None:
        self.file = os.memfd_create("rawattn-arena")
        os.ftruncate(self.file, ARENA_BYTES)
        map_arena(self.file, mmap.PROT_READ | mmap.PROT_WRITE)
        self._next = ARENA
        self._regions: dict[int, Region] = {}

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that kernels may touch."""
        # A copy: while the tuple is made, garbage may be collected, and that forbids regions.
        return tuple(self._regions.copy().values())

    def take(self, size: int, *, readonly: bool) -> int:
        """The address of `size` bytes, whole pages, between two pages that no kernel may ever touch."""
        start = self._next + _PAGE
        if start + size + _PAGE > ARENA + ARENA_BYTES:
            raise MemoryError(f"{ARENA_BYTES} bytes of addresses are used up")
        self._next = start + size
        self._regions[start] = Region(start, size, readonly)
        return start

    def forbid(self, start: int) -> None:
        """Makes every later access by a kernel to the region taken at `start` fault."""
        self._regions.pop(start, None)

    def release(self, start: int, size: int) -> None:
        """Forbids the region and gives its memory back to the operating system."""
        self.forbid(start)
        if _libc.madvise(start, size, _MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "madvise")


@functools.cache
def arena() -> Arena:
    return Arena()


def bytes_at(start: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_ubyte * size).from_address(start), np.uint8)
