"""`append_kv` on the CPU: new keys and values are written to pages, keys and queries get their rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn._call import scales
from rawattn._call.layout import HostLengths
from rawattn._call.problem import Problem
from rawattn._cpu.tiles import Array

Int64s = NDArray[np.int64]


@np.errstate(
    all="ignore"
)  # overflow and NaN come from the caller's values and pass without a warning, as on a GPU
def append(
    problem: Problem,
    lengths: HostLengths,
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    extras: Mapping[str, Any],
) -> None:
    """Writes the new rows that have a slot in the pages: the position is not negative, and the id of its page is valid.

    extras: block_table, cos and sin if there is a rotary embedding, and the scales of float8 pages.
    """
    form = problem.pages
    assert form is not None
    sequence, at, position = new_rows(lengths)
    table = extras["block_table"]
    # No length exceeds the rows that the pages of its sequence hold, so a position can only be too low.
    page = np.maximum(position, 0) // form.page_size
    if form.has_indptr:
        ids = table[lengths.start_k[sequence] // form.page_size + page]
    else:
        ids = table[sequence, page]
    written = (position >= 0) & (ids >= 0) & (ids < form.num_pages)
    sequence, at, position, ids = (x[written] for x in (sequence, at, position, ids))
    rows = _index(problem, lengths, sequence, at)
    slots = ids, position % form.page_size
    new_k, new_v = with_rotary(problem, k[rows], position, extras), v[rows]
    if problem.float8:
        new_k, new_v = (
            scales.quantised(x.astype(np.float32), scales.value(name, extras))
            for name, x in zip(scales.NAMES, (new_k, new_v), strict=True)
        )
    k_pages[slots] = new_k
    v_pages[slots] = new_v


@np.errstate(all="ignore")
def write_rotated(
    problem: Problem, lengths: HostLengths, q: Array, out: Array, extras: Mapping[str, Any]
) -> None:
    """Writes the logical rows of q with their rotary embedding to `out`."""
    sequence, at, position = new_rows(lengths)
    rows = _index(problem, lengths, sequence, at)
    out[rows] = with_rotary(problem, q[rows], position, extras)


def new_rows(lengths: HostLengths) -> tuple[Int64s, Int64s, Int64s]:
    """For each logical row: its sequence, its index among the sequence's new rows, and its position."""
    sequence = np.repeat(np.arange(lengths.len_q.size), lengths.len_q)
    first = np.cumsum(lengths.len_q) - lengths.len_q
    at = np.arange(sequence.size) - first[sequence]
    return sequence, at, (lengths.len_k - lengths.len_q)[sequence] + at


def with_rotary(
    problem: Problem, rows: Array, position: Int64s, extras: Mapping[str, Any]
) -> Array:
    """Rows (n, heads, D) with the rotary embedding of their positions, in float32; the rows as they are without one.

    A position outside the table of angles takes the nearest angle.
    """
    rotary = problem.rotary
    if rotary is None:
        return rows
    known = np.clip(position, 0, rotary.positions - 1)
    cos, sin = (extras[name][known][:, None].astype(np.float32) for name in ("cos", "sin"))
    planes = rotary.dim // 2
    first, second = slice(0, planes), slice(planes, rotary.dim)
    if rotary.interleaved:
        first, second = slice(0, rotary.dim, 2), slice(1, rotary.dim, 2)
    found = rows.astype(np.float32)
    x, y = found[..., first].copy(), found[..., second].copy()
    found[..., first] = x * cos - y * sin
    found[..., second] = y * cos + x * sin
    return found


def _index(problem: Problem, lengths: HostLengths, sequence: Int64s, at: Int64s) -> Any:
    """The index, in arrays such as q and the new k, of the rows `at` of the sequences `sequence`."""
    if problem.packed:
        return lengths.start_q[sequence] + at
    return sequence, at
