"""Host twin of kernels_cu/attn/fill_padding.cuh: zeros (and -inf) in rows that belong to no sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rawattn._call.problem import Problem
from rawattn._call.structure import SideStructure, Structure
from rawattn._kernels.operands import ITEMSIZE, Operands
from rawattn._kernels.steps import SubTask, side_fields, side_names

_BLOCKS = 256  # enough to fill any GPU
_WAVES = 8  # of a block
_FILLED_BYTES = 64 << 10  # filled by one block in little time


def blocks(task: SubTask) -> int:
    """Blocks enough to fill the task's arrays in little time even if all rows are padding, and a wave for each gap."""
    of, packed = task.fields, "side.start.data" in task.addresses
    rows = of["side.rows"] * (1 if packed else of["batch"])
    nbytes: int = rows * of["nheads"] * of["headdim"] * of["element_bytes"]
    gaps: int = -(-(of["batch"] + 1) // _WAVES)
    return max(1, gaps, min(_BLOCKS, -(-nbytes // _FILLED_BYTES)))


def fields(
    problem: Problem,
    side: SideStructure,
    shape: tuple[int, int],
    strides: tuple[int, int, int],
) -> dict[str, Any]:
    """Fields of the kernel's struct for an array with rows of `side`. shape: (heads, head dim). strides: in elements.

    The fields for lse hold where these are rows of queries.
    """
    nheads, headdim = shape
    return {
        "out_strides": strides,
        "lse_batch": 0 if problem.packed else problem.nheads_q * problem.rows_q,
        "lse_head": problem.rows_q,
        **side_fields("side", side),
        "batch": problem.batch,
        "nheads": nheads,
        "headdim": headdim,
        "element_bytes": ITEMSIZE[problem.dtype],
    }


def sub_task(
    problem: Problem,
    structure: Structure,
    of: Literal["q", "k"],
    shape: tuple[int, int],
    strides: tuple[int, int, int],
    filled: Mapping[str, str],
) -> SubTask:
    """The part of a launch that fills padding rows. shape, strides: see `fields`.

    filled: the arrays' names, by what the kernel calls them: `out` and, for rows of queries, `lse`.

    The kernel leaves out an array whose address is 0.
    """
    side = structure.side(of)
    return SubTask(fields(problem, side, shape, strides), side_names("side", side, of), filled)


def of_results(problem: Problem, structure: Structure, operands: Operands) -> tuple[SubTask, ...]:
    """Parts that fill the padding rows of out and lse, where those are the library's own arrays."""
    ours = {name: name for name in operands.library_owned & {"out", "lse"}}
    if not ours or not structure.q.padded or not problem.rows_q:
        return ()
    strides = operands.elements(problem, "out")
    shape = problem.nheads_q, problem.headdim_v
    return (sub_task(problem, structure, "q", shape, strides, ours),)
