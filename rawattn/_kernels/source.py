"""What the host twins of kernels share: the generated translation unit, its description, and what a call's memory allows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Protocol

from rawattn._call.problem import Problem

# Of the tables' dtypes: the name in a kernel, the size in bytes.
ELEMENT = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


class Described(Protocol):
    """What the configurations of all attention kernels have."""

    @property
    def headdim(self) -> int: ...
    @property
    def headdim_v(self) -> int: ...


def text(element: str, constants: Mapping[str, int], kernel: str) -> str:
    """A translation unit: `constants` in namespace `config`, then the kernel, a path below kernels_cu."""
    lines = ['#include "target/target.cuh"', "namespace config {", f"using Element = {element};"]
    for name, value in constants.items():
        kind = "bool" if isinstance(value, bool) else "int"
        lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
    return "\n".join([*lines, "}  // namespace config", f'#include "{kernel}"', ""])


def dims(config: Described) -> str:
    """The head dims, for a summary."""
    both = config.headdim == config.headdim_v
    return f"D={config.headdim}" if both else f"D={config.headdim},{config.headdim_v}"


def traits(**named: bool) -> list[str]:
    """The names of those that are on, for a summary."""
    return [name.replace("_", "-") for name, on in named.items() if on]


def masks(problem: Problem) -> dict[str, bool]:
    """Which sides of the visible keys are limited, and where the diagonal lies."""
    left, right = problem.window_left is not None, problem.window_right is not None
    # Without a limit on either side the diagonal is nowhere, so both alignments share one kernel.
    return {"left": left, "right": right, "top_left": problem.top_left and (left or right)}


def copy_bytes(problem: Problem, strides: int, pointers: int) -> int:
    """The widest access that divides every row's place and length.

    strides: of all arrays but on their last axis, in bytes, OR-ed together; pointers: likewise all addresses.
    """
    itemsize = ITEMSIZE[problem.dtype]
    dims = (problem.headdim * itemsize, problem.headdim_v * itemsize)
    return access_bytes(strides, pointers, *dims)


def access_bytes(*bytes_apart: int) -> int:
    """The widest access, up to 16 bytes, that divides all of these strides, addresses and lengths."""
    together = functools.reduce(operator.or_, bytes_apart)
    return min(16, together & -together)


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
