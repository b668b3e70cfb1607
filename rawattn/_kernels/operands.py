"""How the arrays of a call lie in memory, as far as that decides which kernel runs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rawattn._strides import Strides, contiguous

if TYPE_CHECKING:
    from rawattn._call.problem import Problem

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
WIDEST = 16  # bytes of the widest access there is
_LEAST_COPY = 4  # bytes of the narrowest asynchronous copy
_OF_PAGES = ("k_pages", "v_pages")


@dataclass(frozen=True, slots=True)
class Operands:
    """The layout of a call's arrays.

    strides: of each array by name, in bytes.
    pointers: all addresses OR-ed together; only their alignment within 16 bytes counts.
    library_owned: outputs that the library allocated, so that their padding rows are its own to fill.
    option_strides: strides of the options' arrays and of their gradients, in bytes.
    alignments: the addresses of the options' arrays modulo 16.
    whole_rows: the options' arrays whose rows may be read to the end of their last 16 bytes.
    """

    strides: Mapping[str, Strides] = field(default_factory=dict)
    pointers: int = 0
    library_owned: frozenset[str] = frozenset()
    option_strides: Mapping[str, Strides] = field(default_factory=dict)
    alignments: Mapping[str, int] = field(default_factory=dict)
    whole_rows: frozenset[str] = frozenset()

    def copy_bytes(self, problem: Problem) -> int:
        """Bytes of the widest access that divides every row's address and length. Rows of 8-bit pages do not count."""
        itemsize = ITEMSIZE[problem.dtype]
        if not problem.float8:
            return self._access(problem, itemsize, ())
        # An address of 8-bit pages may be odd, and `pointers` does not tell addresses apart.
        return max(itemsize, self._access(problem, itemsize, _OF_PAGES))

    def key_bytes(self, problem: Problem) -> int:
        """The same for keys and values. For 8-bit pages it is 1 byte, or a width that an asynchronous copy can have."""
        if not problem.float8:
            return self.copy_bytes(problem)
        width = self._access(problem, 1, set(self.strides).difference(_OF_PAGES))
        return width if width >= _LEAST_COPY else 1

    def _access(self, problem: Problem, itemsize: int, others: Collection[str]) -> int:
        """The widest access to all arrays but `others`."""
        dims = (problem.headdim * itemsize, problem.headdim_v * itemsize)
        own = [strides for name, strides in self.strides.items() if name not in others]
        between = (stride for each in own for stride in each[:-1])
        return access_bytes(self.pointers, *dims, *between)

    def elements(self, problem: Problem, name: str) -> tuple[int, int, int]:
        """Strides of (batch, row, head) in elements; group mode has no batch axis."""
        itemsize = 1 if problem.float8 and name in _OF_PAGES else ITEMSIZE[problem.dtype]
        *batch, row, head = (stride // itemsize for stride in self.strides[name][:-1])
        return (batch[0] if batch else 0, row, head)


def access_bytes(*bytes_apart: int) -> int:
    """The widest access, up to 16 bytes, that divides all of these strides, addresses and lengths."""
    together = functools.reduce(operator.or_, bytes_apart)
    return min(WIDEST, together & -together)


def strides_of_pages(problem: Problem) -> dict[str, Strides]:
    """Strides of arrays of pages in C order, for kernels that are compiled before there are such arrays.

    They decide whether TMA boxes bring whole rows of pages.
    """
    form = problem.pages
    if form is None:
        return {}
    size = 1 if problem.float8 else ITEMSIZE[problem.dtype]
    rows = form.num_pages, form.page_size, problem.nheads_kv
    dims = problem.headdim, problem.headdim_v
    return {name: contiguous((*rows, dim), size) for name, dim in zip(_OF_PAGES, dims, strict=True)}
