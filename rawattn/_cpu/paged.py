"""`paged_attention` on the CPU: gathers the keys that rows can see from their pages, and runs the forward on a packed batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn._call import page_ids, scales
from rawattn._call.layout import HostLengths
from rawattn._call.problem import Problem
from rawattn._cpu import forward as cpu_forward
from rawattn._cpu.tiles import Array


@np.errstate(all="ignore")  # float8 values times their scale may overflow
def forward(
    problem: Problem,
    lengths: HostLengths,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    out: Array,
    lse: Array | None,
    extras: Mapping[str, Any],
) -> None:
    """As `forward.forward`, with keys and values in pages. extras: also the block table, whose ids are not trusted to be
    valid, and the scales of float8 keys and values.
    """
    form = problem.pages
    assert form is not None
    window = problem.window_left, problem.window_right
    visible_pages = page_ids.visible_pages(
        lengths, form.page_size, window, problem.sink, problem.top_left
    )
    k, v = (
        page_ids.gather(
            *(pool, extras["block_table"], lengths, form, visible_pages),
            scales.value(name, extras) if problem.float8 else None,
        )
        for name, pool in zip(scales.NAMES, (k_pages, v_pages), strict=True)
    )
    start_k = np.cumsum(lengths.len_k) - lengths.len_k
    packed = replace(problem, packed=True, rows_k=len(k), pages=None)
    flat = replace(lengths, start_k=start_k)
    if problem.packed:
        cpu_forward.forward(packed, flat, q, k, v, out, lse, extras)
        return
    # q has a batch axis: pack it as sequences of `rows` rows each. Only logical rows are copied to `out` and `lse`.
    batch, rows = q.shape[:2]
    flat = replace(flat, start_q=np.arange(batch, dtype=np.int64) * rows)
    flat_out = np.empty((batch * rows, *out.shape[2:]), out.dtype)
    flat_lse = None if lse is None else np.empty((lse.shape[1], batch * rows), lse.dtype)
    packed = replace(packed, rows_q=batch * rows)
    cpu_forward.forward(packed, flat, q.reshape(-1, *q.shape[2:]), k, v, flat_out, flat_lse, extras)
    logical = np.arange(rows) < lengths.len_q[:, None]
    out[logical] = flat_out.reshape(out.shape)[logical]
    if lse is not None and flat_lse is not None:
        by_row = flat_lse.reshape(len(flat_lse), batch, rows).transpose(1, 2, 0)
        lse.swapaxes(1, 2)[logical] = by_row[logical]
