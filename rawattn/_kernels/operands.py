"""How the arrays of a call lie in memory: what of it decides which kernel runs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rawattn._call.problem import Problem

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
WIDEST = 16  # bytes of the widest access there is

Strides = tuple[int, ...]  # in bytes, of an array's public shape


@dataclass(frozen=True, slots=True)
class Operands:
    """strides: of each array by name.

    pointers: all addresses OR-ed together; only their place within 16 bytes counts.
    ours: outputs whose padding rows are not the caller's.
    of_options: strides of the options' arrays, and of their gradients. places: where those arrays begin within 16 bytes.
    """

    strides: Mapping[str, Strides] = field(default_factory=dict)
    pointers: int = 0
    ours: frozenset[str] = frozenset()
    of_options: Mapping[str, Strides] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)

    def copy_bytes(self, problem: Problem) -> int:
        """The widest access that divides every row's place and length."""
        itemsize = ITEMSIZE[problem.dtype]
        dims = (problem.headdim * itemsize, problem.headdim_v * itemsize)
        between = (stride for each in self.strides.values() for stride in each[:-1])
        return access_bytes(self.pointers, *dims, *between)

    def elements(self, problem: Problem, name: str) -> tuple[int, int, int]:
        """Strides of (batch, row, head) in elements; group mode has no batch axis."""
        itemsize = ITEMSIZE[problem.dtype]
        *batch, row, head = (stride // itemsize for stride in self.strides[name][:-1])
        return (batch[0] if batch else 0, row, head)


def access_bytes(*bytes_apart: int) -> int:
    """The widest access, up to 16 bytes, that divides all of these strides, addresses and lengths."""
    together = functools.reduce(operator.or_, bytes_apart)
    return min(WIDEST, together & -together)


def contiguous(shape: tuple[int, ...], itemsize: int) -> Strides:
    """Strides of an array in C order."""
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))
