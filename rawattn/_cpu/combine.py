"""Merges partial results over disjoint keys, in NumPy. The arithmetic is that of kernels_cu/portable/combine.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def combine(outs: Sequence[Any], lses: Sequence[Any], out: Any, lse: Any) -> None:
    """Writes `out` and `lse`. outs, lses: those of the partials, each in the shape of `out` and `lse`."""
    if out.size == 0:
        lse[...] = -np.inf
        return
    top = lses[0].copy()
    for each in lses[1:]:
        np.fmax(top, each, out=top)
    top[~(top > -np.inf)] = 0  # where all lses are -inf or NaN; the sum carries the NaN on
    # A NaN or infinity in the partials comes from the caller, and reaches the result without a warning, as on a GPU.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        exponentials = [np.exp(each - top) for each in lses]
        total = np.sum(exponentials, axis=0, dtype=np.float32)
        share = np.where(total == 0, np.float32(0), np.float32(1) / total)
        merged = np.zeros(out.shape, np.float32)
        for values, each, exponential in zip(outs, lses, exponentials, strict=True):
            alive = _per_row_of_out(each != -np.inf)
            weighed = values.astype(np.float32) * _per_row_of_out(exponential * share)
            np.add(merged, weighed, out=merged, where=alive)
        out[...] = merged
        lse[...] = top + np.log(total)


def _per_row_of_out(x: Any) -> Any:
    """Numbers (..., heads, rows) as (..., rows, heads, 1), to multiply arrays of the layout of `out`."""
    return np.swapaxes(x, -1, -2)[..., None]
