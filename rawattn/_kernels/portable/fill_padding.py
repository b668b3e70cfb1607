"""Host twin of kernels_cu/portable/fill_padding.cuh: zeros (and -inf) in rows that belong to no sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rawattn._call.problem import Problem
from rawattn._call.structure import SideStructure, Structure
from rawattn._kernels.operands import ITEMSIZE
from rawattn._kernels.steps import Part, side_fields, side_names

_BLOCKS = 1024  # enough to fill any GPU


def parts(batch: int) -> int:
    """Blocks that share one gap between sequences."""
    return max(1, _BLOCKS // (batch + 1))


def blocks(batch: int) -> int:
    return (batch + 1) * parts(batch)


def fields(
    problem: Problem,
    side: SideStructure,
    shape: tuple[int, int],
    strides: tuple[int, int, int],
) -> dict[str, Any]:
    """Of an array with rows of `side`; shape: heads and head dim; strides in elements.

    What they say of lse holds for rows of queries.
    """
    nheads, headdim = shape
    return {
        "out_strides": strides,
        "lse_batch": 0 if problem.group else problem.nheads_q * problem.rows_q,
        "lse_head": problem.rows_q,
        **side_fields("side", side),
        "batch": problem.batch,
        "nheads": nheads,
        "headdim": headdim,
        "element_bytes": ITEMSIZE[problem.dtype],
        "parts": parts(problem.batch),
    }


def part(
    problem: Problem,
    structure: Structure,
    of: Literal["q", "k"],
    shape: tuple[int, int],
    strides: tuple[int, int, int],
    filled: Mapping[str, str],
) -> Part:
    """filled: the arrays to fill by the kernel's names for them: `out` and, for rows of queries, `lse`.

    The kernel leaves out an array whose address is 0.
    """
    side = structure.side(of)
    return Part(fields(problem, side, shape, strides), {**filled, **side_names("side", side, of)})
