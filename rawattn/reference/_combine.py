"""The specification of `combine`."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn._call import partials
from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.partials import PartialsSide
from rawattn.reference._call import Array, floats
from rawattn.reference._targets import check_targets, write

_FLOAT64 = np.dtype(np.float64)


@checks_arguments("rawattn.reference.combine")
def combine(outs: Any, lses: Any, *, out: Any = None, dtype: Any = None) -> tuple[Array, Array]:
    """`rawattn.combine` in float64.

    Parameters
    ----------
    outs : list of arrays, or one array with the partials on a new first axis
        Each (batch, seqlen_q, nheads, Dv), or (total_q, nheads, Dv) in group mode; of any framework, device and floating
        dtype.
    lses : list of arrays, or one array with the partials on a new first axis
        Each (batch, nheads, seqlen_q) or (nheads, total_q).
    out : NumPy array of any floating dtype, optional
        Array that the result is written to; it is returned.
    dtype : dtype, optional
        As in `rawattn.combine`, but has no effect.

    Returns
    -------
    out : NumPy array, float64, in the shape of a partial
    lse : NumPy array, float64, (batch, nheads, seqlen_q) or (nheads, total_q)

    Raises
    ------
    TypeError, ValueError
        Naming the argument, for shapes that `rawattn.combine` refuses.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> ones, lse = np.ones((1, 1, 1, 2)), np.zeros((1, 1, 1))
    >>> out, both = rawattn.reference.combine([ones, 4 * ones], [lse, lse + np.log(2)])
    >>> out.round(6).tolist(), np.exp(both).round(6).item()
    ([[[[3.0, 3.0]]]], 3.0)
    """
    if dtype is not None:
        partials.result_dtype(dtype)
    sides = partials.given("outs", outs), partials.given("lses", lses)
    hosts = [
        [floats(n, x, _FLOAT64) for n, x in zip(side.names(), side.arrays, strict=True)]
        for side in sides
    ]
    partials.checked_shapes(*sides, *hosts)
    given = {n: x for side in sides for n, x in zip(side.names(), side.arrays, strict=True)}
    check_targets({"out": out}, given)
    values, logs = (_stacked(*both) for both in zip(sides, hosts, strict=True))
    alive = logs != -np.inf
    highest = logs.max(axis=0)
    highest = np.where(highest == -np.inf, 0, highest)
    # inf - inf; log(0) where all lses are -inf; weights of almost 0
    with np.errstate(invalid="ignore", divide="ignore", under="ignore"):
        parts = np.exp(logs - highest)
        total = parts.sum(axis=0)
        lse = highest + np.log(total)
        # Divided by the sum itself, not computed from lse: if lse is large, rounding loses log(total) in it.
        weights = parts / np.where(total == 0, 1, total)
        values = np.where(_per_row_of_out(alive), values, 0)
        merged = np.sum(_per_row_of_out(weights) * values, axis=0)
    return write("out", out, merged), lse


def _stacked(side: PartialsSide, arrays: list[Array]) -> Array:
    return np.stack(arrays) if side.listed else arrays[0]


def _per_row_of_out(x: Array) -> Array:
    """Numbers (..., heads, rows) as (..., rows, heads, 1), to multiply arrays of the layout of `out`."""
    return np.swapaxes(x, -1, -2)[..., None]
