"""Host twin of kernels_cu/portable/align_rows.cu, which copies an array so that its rows begin at multiples of 16 bytes."""

from __future__ import annotations

from typing import NamedTuple

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.operands import Operands, access_bytes
from rawattn._kernels.source import round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, checked, patches
from rawattn._strides import Strides

ENTRY = "rawattn_align_rows"
THREADS = 256


class AlignedRows(NamedTuple):
    """The copy of an array: the launch that makes it, its bytes, and its strides in the shape of the array."""

    step: Step
    nbytes: int
    strides: Strides


def source(headdim: int, copy_bytes: int) -> Source:
    """copy_bytes: the widest access that the array's rows allow."""
    return _source(
        ENTRY,
        "portable/align_rows.cu",
        f"portable align_rows 16bit D={headdim} {copy_bytes}B",
        helper_params.ALIGN_ROWS,
        element="float16",
        constants={"kHeadDim": headdim, "kCopyBytes": copy_bytes, "kThreads": THREADS},
    )


def strides(rows: int, nheads: int, headdim: int) -> tuple[int, int, int, int]:
    """The strides of a copy in bytes: (batch, row, head, column)."""
    head = 2 * round_up(headdim, 8)
    return (head * nheads * rows, head * nheads, head, 2)


def blocks(rows: int, wave: int = 32) -> int:
    """Blocks for `rows` rows of all sequences: a wave takes a row."""
    return -(-rows // (THREADS // wave))


def copy(problem: Problem, operands: Operands, name: str, to: str) -> AlignedRows:
    """The copy of q, k or v, called `name`, to scratch called `to`."""
    batch = 1 if problem.packed else problem.batch
    rows = problem.rows_q if name == "q" else problem.rows_k
    nheads = problem.nheads_q if name == "q" else problem.nheads_kv
    headdim = problem.headdim_v if name == "v" else problem.headdim
    whole = strides(rows, nheads, headdim)
    values = {
        "strides": operands.elements(problem, name),
        "rows": rows,
        "batch": batch,
        "nheads": nheads,
    }
    between = operands.strides[name][:-1]
    step = Step(
        source=source(headdim, access_bytes(headdim * 2, operands.pointers, *between)),
        blocks=checked(name, blocks(batch * rows), 1),
        threads=THREADS,
        params=structs.fill(helper_params.ALIGN_ROWS, values),
        patches=patches(helper_params.ALIGN_ROWS, **{"from": name, "to": to}),
    )
    return AlignedRows(step, batch * whole[0], whole[1:] if problem.packed else whole)
