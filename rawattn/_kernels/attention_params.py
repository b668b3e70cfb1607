"""The parameters that all attention kernels have, from the problem: everything but addresses."""

from __future__ import annotations

from typing import Any

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels import params, score_params, structs
from rawattn._kernels.operands import ITEMSIZE, Operands
from rawattn._kernels.steps import side_fields, side_patches
from rawattn._kernels.structs import Struct

# Of parameters that are the problem's own; "" is that of none.
_GROUPS = ("", "mask", "scores")

# The arrays of keys and values: of rows, and of pages.
KEYS = (("k", "v"), ("k_pages", "v_pages"))

# Bytes of K and V, or of what the backward reads and adds of query rows, that blocks running at once should share in L2.
L2_SHARE = 32 << 20


def forward(
    problem: Problem, structure: Structure, operands: Operands, section_bytes: int
) -> dict[str, Any]:
    """Fields of `params.FORWARD`. section_bytes: of K and V whose heads are scheduled side by side."""
    key_bytes = (problem.headdim + problem.headdim_v) * (
        1 if problem.float8 else ITEMSIZE[problem.dtype]
    )
    k, v = KEYS[problem.pages is not None]
    return {
        **_strides(problem, operands, "q", "out"),
        "k_strides": operands.elements(problem, k),
        "v_strides": operands.elements(problem, v),
        "lse_batch": 0 if problem.group else problem.nheads_q * problem.rows_q,
        "lse_head": problem.rows_q,
        **side_fields("q_side", structure.q),
        **side_fields("k_side", structure.k),
        "section_keys": section_bytes // key_bytes,
        **_of_problem(problem),
        **score_params.fields(problem, operands),
        **page_fields(problem, structure, operands),
    }


def backward(problem: Problem, structure: Structure, operands: Operands) -> dict[str, Any]:
    """Fields of `params.BACKWARD`."""
    inner = forward(problem, structure, operands, L2_SHARE)
    # Of every query row: q and dout are read, float32 dq is added to.
    row_bytes = (problem.headdim + problem.headdim_v) * ITEMSIZE[problem.dtype]
    row_bytes += 4 * problem.headdim
    group = problem.group_heads
    return {
        **{f"forward.{name}": value for name, value in inner.items()},
        **_strides(problem, operands, "dout", "dq", "dk", "dv"),
        "section_queries": max(1, L2_SHARE // (row_bytes * group)),
    }


def _of_problem(problem: Problem) -> dict[str, Any]:
    """Fields of `params.FORWARD`, alone or in a group of scalars, that are called like one of the problem. None is 0 there."""
    found = {}
    for path in structs.leaves(params.FORWARD):
        value = getattr(problem, path.rpartition(".")[2], None)
        if value is not None and path.rpartition(".")[0] in _GROUPS:
            found[path] = value
    return found


def side_addresses(
    struct: Struct, prefix: str, structure: Structure
) -> tuple[tuple[int, str], ...]:
    """Where the addresses of the lengths belong; prefix: of the paths of q_side and k_side."""
    return (
        *side_patches(struct, f"{prefix}q_side", structure.q, "q"),
        *side_patches(struct, f"{prefix}k_side", structure.k, "k"),
    )


def page_addresses(
    problem: Problem, struct: Struct, prefix: str = ""
) -> tuple[tuple[int, str], ...]:
    """Where the addresses of a page table belong; prefix: of the path of the `params.FORWARD` in `struct`."""
    if problem.pages is None:
        return ()
    names = {"pages.ids.data": "block_table"}
    if problem.pages.has_indptr:
        names["pages.indptr.data"] = "start_k"
    return tuple((structs.offset(struct, prefix + path), name) for path, name in names.items())


def without_pages(structure: Structure) -> Structure:
    """Of the lengths of sequences whose keys are in pages: starts that count pages are no starts of rows."""
    return structure._replace(k=structure.k._replace(start=0))


def page_fields(problem: Problem, structure: Structure, operands: Operands) -> dict[str, Any]:
    """Fields of a `Pages` called `pages`."""
    form = problem.pages
    if form is None:
        return {}
    strides = score_params.elements(operands.of_options["block_table"], form.dtype)
    size = form.page_size
    inverse, shift = division(size)
    return {
        "pages.ids.is_64bit": int(form.dtype == "int64"),
        "pages.indptr.is_64bit": int(structure.k.start == 8),
        "pages.row": 0 if form.has_indptr else strides[0],
        "pages.entry": strides[-1],
        "pages.capacity": problem.rows_k // size,
        "pages.count": form.num_pages,
        "pages.page_size": size,
        "pages.inverse": inverse,
        "pages.shift": shift,
    }


def division(by: int) -> tuple[int, int]:
    """What `quotient` in kernels_cu/tile/rows.cuh takes to divide by a number."""
    shift = (by - 1).bit_length()
    return (1 << 31 + shift) // by + 1, shift


def _strides(problem: Problem, operands: Operands, *names: str) -> dict[str, Any]:
    return {f"{name}_strides": operands.elements(problem, name) for name in names}
