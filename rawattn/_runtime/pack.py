"""Parameter structs of a call with everything filled in but the addresses of its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rawattn._call.problem import Problem
from rawattn._kernels import params
from rawattn._kernels.portable import fill_padding
from rawattn._kernels.source import ITEMSIZE
from rawattn._runtime.lengths import DeviceLengths

# Bytes of K and V, or of what the backward reads and adds of query rows, that blocks running at once should share in L2.
L2_SHARE = 32 << 20

Strides = Mapping[str, tuple[int, ...]]  # of each array by name, in bytes, of its public shape


def forward(
    fields: Any, problem: Problem, lengths: DeviceLengths, strides: Strides, section_bytes: int
) -> None:
    """Fills a `params.FORWARD`. section_bytes: of K and V whose heads are scheduled side by side."""
    for name in ("q", "k", "v", "out"):
        fields[f"{name}_strides"] = _elements(problem, strides[name])
    _put_lse(fields, problem)
    fields["q_side"], fields["k_side"] = lengths.q_side, lengths.k_side
    fields["window_left"] = problem.window_left or 0
    fields["window_right"] = problem.window_right or 0
    for name in ("sink", "batch", "nheads_q", "nheads_kv", "scale"):
        fields[name] = getattr(problem, name)
    key_bytes = (problem.headdim + problem.headdim_v) * ITEMSIZE[problem.dtype]
    fields["section_keys"] = section_bytes // key_bytes


def backward(fields: Any, problem: Problem, lengths: DeviceLengths, strides: Strides) -> None:
    """Fills a `params.BACKWARD`."""
    forward(fields["forward"], problem, lengths, strides, L2_SHARE)
    for name in ("dout", "dq", "dk", "dv"):
        fields[f"{name}_strides"] = _elements(problem, strides[name])
    # Of every query row: q and dout are read, float32 dq is added to.
    row_bytes = (problem.headdim + problem.headdim_v) * ITEMSIZE[problem.dtype]
    row_bytes += 4 * problem.headdim
    group = problem.nheads_q // problem.nheads_kv
    fields["section_queries"] = max(1, L2_SHARE // (row_bytes * group))


def padding(
    problem: Problem, side: Any, strides: tuple[int, ...], *, nheads: int, headdim: int
) -> bytes:
    """A `params.PADDING` for an array with rows of `side`. What it says of lse holds for rows of queries."""
    packed = np.zeros(1, params.PADDING)
    fields = packed[0]
    fields["out_strides"] = _elements(problem, strides)
    _put_lse(fields, problem)
    fields["side"] = side
    fields["batch"], fields["nheads"], fields["headdim"] = problem.batch, nheads, headdim
    fields["element_bytes"] = ITEMSIZE[problem.dtype]
    fields["parts"] = fill_padding.parts(problem.batch)
    return packed.tobytes()


def repack(
    problem: Problem, strides: tuple[int, ...], *, batch: int, rows: int, nheads: int
) -> bytes:
    """A `params.REPACK` for an array with these strides."""
    packed = np.zeros(1, params.REPACK)
    fields = packed[0]
    fields["strides"] = _elements(problem, strides)
    fields["rows"], fields["batch"], fields["nheads"] = rows, batch, nheads
    return packed.tobytes()


def _put_lse(fields: Any, problem: Problem) -> None:
    fields["lse_batch"] = 0 if problem.group else problem.nheads_q * problem.rows_q
    fields["lse_head"] = problem.rows_q


def _elements(problem: Problem, strides: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, row, head) in elements; group mode has no batch axis."""
    itemsize = ITEMSIZE[problem.dtype]
    *batch, row, head = (stride // itemsize for stride in strides[:-1])
    return (batch[0] if batch else 0, row, head)
