"""The parameters that all attention kernels have, from the problem: everything but addresses."""

from __future__ import annotations

from typing import Any

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels import params, score_params
from rawattn._kernels.operands import ITEMSIZE, Operands
from rawattn._kernels.params import Struct
from rawattn._kernels.steps import side_fields, side_patches

# Of parameters that are the problem's own; "" is that of none.
_GROUPS = ("", "mask", "scores")

# Bytes of K and V, or of what the backward reads and adds of query rows, that blocks running at once should share in L2.
L2_SHARE = 32 << 20


def forward(
    problem: Problem, structure: Structure, operands: Operands, section_bytes: int
) -> dict[str, Any]:
    """Fields of `params.FORWARD`. section_bytes: of K and V whose heads are scheduled side by side."""
    key_bytes = (problem.headdim + problem.headdim_v) * ITEMSIZE[problem.dtype]
    return {
        **_strides(problem, operands, "q", "k", "v", "out"),
        "lse_batch": 0 if problem.group else problem.nheads_q * problem.rows_q,
        "lse_head": problem.rows_q,
        **side_fields("q_side", structure.q),
        **side_fields("k_side", structure.k),
        "section_keys": section_bytes // key_bytes,
        **_of_problem(problem),
        **score_params.fields(problem, operands),
    }


def backward(problem: Problem, structure: Structure, operands: Operands) -> dict[str, Any]:
    """Fields of `params.BACKWARD`."""
    inner = forward(problem, structure, operands, L2_SHARE)
    # Of every query row: q and dout are read, float32 dq is added to.
    row_bytes = (problem.headdim + problem.headdim_v) * ITEMSIZE[problem.dtype]
    row_bytes += 4 * problem.headdim
    group = problem.nheads_q // problem.nheads_kv
    return {
        **{f"forward.{name}": value for name, value in inner.items()},
        **_strides(problem, operands, "dout", "dq", "dk", "dv"),
        "section_queries": max(1, L2_SHARE // (row_bytes * group)),
    }


def _of_problem(problem: Problem) -> dict[str, Any]:
    """Fields of `params.FORWARD`, alone or in a group of scalars, that are called like one of the problem. None is 0 there."""
    found = {}
    for path in params.leaves(params.FORWARD):
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


def _strides(problem: Problem, operands: Operands, *names: str) -> dict[str, Any]:
    return {f"{name}_strides": operands.elements(problem, name) for name in names}
