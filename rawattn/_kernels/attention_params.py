"""The parameters that all attention kernels have, made from the problem: fields, and offsets of addresses."""

from __future__ import annotations

from typing import Any

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels import params, score_params, structs
from rawattn._kernels.operands import ITEMSIZE, Operands
from rawattn._kernels.steps import side_fields, side_patches
from rawattn._kernels.structs import Struct

# Groups of parameters that are filled with the problem's fields of the same name; "" stands for parameters outside any group.
_GROUPS = ("", "mask", "scores")

# The names of the arrays of keys and values: in rows, and in pages.
KEYS = (("k", "v"), ("k_pages", "v_pages"))

# Bytes that blocks running at once should share in the L2 cache: K and V in the forward; Q, dO and dQ in the backward.
L2_SHARE = 32 << 20


def key_bytes(problem: Problem) -> int:
    """Bytes of a key and its value."""
    element = 1 if problem.float8 else ITEMSIZE[problem.dtype]
    return (problem.headdim + problem.headdim_v) * element


def forward(
    problem: Problem, structure: Structure, operands: Operands, section_bytes: int
) -> dict[str, Any]:
    """Fields of `params.FORWARD`. section_bytes: bytes of K and V whose heads are scheduled next to each other."""
    k, v = KEYS[problem.pages is not None]
    return {
        **_strides(problem, operands, "q", "out"),
        "k_strides": operands.elements(problem, k),
        "v_strides": operands.elements(problem, v),
        "lse_batch": 0 if problem.packed else problem.nheads_q * problem.rows_q,
        "lse_head": problem.rows_q,
        **side_fields("q_side", structure.q),
        **side_fields("k_side", structure.k),
        "section_keys": section_bytes // key_bytes(problem),
        **_of_problem(problem),
        **score_params.fields(problem, operands),
        **page_fields(problem, structure, operands),
    }


def backward(problem: Problem, structure: Structure, operands: Operands) -> dict[str, Any]:
    """Fields of `params.BACKWARD`."""
    inner = forward(problem, structure, operands, L2_SHARE)
    # For each query row the backward reads Q and dO, and adds to dQ in float32.
    row_bytes = (problem.headdim + problem.headdim_v) * ITEMSIZE[problem.dtype]
    row_bytes += 4 * problem.headdim
    group = problem.group_heads
    return {
        **{f"forward.{name}": value for name, value in inner.items()},
        **_strides(problem, operands, "dout", "dq", "dk", "dv"),
        "section_queries": max(1, L2_SHARE // (row_bytes * group)),
    }


def _of_problem(problem: Problem) -> dict[str, Any]:
    """Fields of `params.FORWARD`, outside groups or in one of `_GROUPS`, with the problem's values of the same name.

    A value of None is left out, which makes it 0.
    """
    found = {}
    for path in structs.leaves(params.FORWARD):
        value = getattr(problem, path.rpartition(".")[2], None)
        if value is not None and path.rpartition(".")[0] in _GROUPS:
            found[path] = value
    return found


def side_addresses(
    struct: Struct, prefix: str, structure: Structure
) -> tuple[tuple[int, str], ...]:
    """Where the addresses of the lengths belong. prefix: the path of the struct that has q_side and k_side."""
    return (
        *side_patches(struct, f"{prefix}q_side", structure.q, "q"),
        *side_patches(struct, f"{prefix}k_side", structure.k, "k"),
    )


def page_addresses(
    problem: Problem, struct: Struct, prefix: str = ""
) -> tuple[tuple[int, str], ...]:
    """Where the addresses of a block table belong. prefix: the path of the struct that has `pages` in `struct`."""
    if problem.pages is None:
        return ()
    names = {"pages.ids.data": "block_table"}
    if problem.pages.has_indptr:
        names["pages.indptr.data"] = "start_k"
    return tuple((structs.offset(struct, prefix + path), name) for path, name in names.items())


def without_pages(structure: Structure) -> Structure:
    """The structure without starts of keys: with keys in pages those count pages, and are no starts of rows."""
    return structure._replace(k=structure.k._replace(start=0))


def page_fields(problem: Problem, structure: Structure, operands: Operands) -> dict[str, Any]:
    """Fields of a `Pages` called `pages`."""
    form = problem.pages
    if form is None:
        return {}
    strides = score_params.elements(operands.option_strides["block_table"], form.dtype)
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
    """The multiplier and the shift by which `quotient` in kernels_cu/tile/rows.cuh divides by a number."""
    shift = (by - 1).bit_length()
    return (1 << 31 + shift) // by + 1, shift


def _strides(problem: Problem, operands: Operands, *names: str) -> dict[str, Any]:
    return {f"{name}_strides": operands.elements(problem, name) for name in names}
