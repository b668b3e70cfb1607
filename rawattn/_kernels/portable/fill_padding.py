"""Host twin of kernels_cu/portable/fill_padding.cu: zeros (and -inf) in rows that belong to no sequence."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from rawattn._call.problem import Problem
from rawattn._call.structure import SideStructure, Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.operands import ITEMSIZE
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, patches, side_fields, side_patches

ENTRY = "rawattn_fill_padding"
THREADS = 256
_BLOCKS = 1024  # enough to fill any GPU


@functools.cache
def source() -> Source:
    return _source(
        ENTRY, "portable/fill_padding.cu", "portable fill_padding", helper_params.PADDING
    )


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


def step(
    problem: Problem,
    structure: Structure,
    of: Literal["q", "k"],
    shape: tuple[int, int],
    strides: tuple[int, int, int],
    filled: Mapping[str, str],
) -> Step:
    """filled: the arrays to fill by the kernel's names for them: `out` and, for rows of queries, `lse`.

    The kernel leaves out an array whose address is 0.
    """
    side = structure.side(of)
    return Step(
        source=source(),
        blocks=blocks(problem.batch),
        threads=THREADS,
        params=structs.fill(helper_params.PADDING, fields(problem, side, shape, strides)),
        patches=(
            *patches(helper_params.PADDING, **filled),
            *side_patches(helper_params.PADDING, "side", side, of),
        ),
    )
