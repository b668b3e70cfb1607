"""A call of `combine` as plain values, and its checks: partial results of attention over disjoint keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rawattn._call.binding import bind
from rawattn._call.dtypes import DTYPE_NAMES, DTYPES
from rawattn._call.layout import Lengths
from rawattn._call.options import for_message
from rawattn._call.problem import MAX_HEADDIM, Problem
from rawattn._interop.advice import cast

Shape = tuple[int, ...]

_ACCEPTED = "float16, bfloat16 or float32"
_OUT_AXES = "(batch, seqlen_q, nheads, Dv) or (total_q, nheads, Dv)"


class PartialsSide(NamedTuple):
    """The outs or the lses of all partials: the arrays of a list, or one array with the partials stacked on its first axis."""

    name: str
    arrays: tuple[Any, ...]
    listed: bool

    def names(self) -> tuple[str, ...]:
        """The names of the arrays, for messages."""
        if not self.listed:
            return (self.name,)
        return tuple(f"{self.name}[{n}]" for n in range(len(self.arrays)))

    def shape_of_one(self, views: Sequence[Any]) -> Shape:
        """The shape of a partial, in a list that of the first."""
        shape: Shape = tuple(views[0].shape)
        return shape if self.listed else shape[1:]

    def count(self, views: Sequence[Any]) -> int:
        """The number of partials."""
        return len(views) if self.listed else views[0].shape[0]


class PartialsForm(NamedTuple):
    """What a `Problem` of `combine` has beside its rows.

    parts: the number of partials. result: the dtype of out. listed: whether outs and whether lses are a list.
    """

    parts: int
    result: str
    listed: tuple[bool, bool]


def given(name: str, arrays: Any) -> PartialsSide:
    """`outs` or `lses` as the caller gave them."""
    if not isinstance(arrays, (list, tuple)):
        return PartialsSide(name, (arrays,), False)
    if not arrays:
        raise ValueError(f"{name}: got an empty list, expected at least one partial result")
    return PartialsSide(name, tuple(arrays), True)


def describe(
    outs: PartialsSide, lses: PartialsSide, dtype: Any, framework: str | None = None
) -> tuple[Problem, Lengths]:
    """The call as a `Problem` and its sequences, once the partials and the result's dtype have passed every check.

    outs, lses: arrays with `shape` and `dtype`. dtype: the caller's, or None. framework: that of outs[0], for messages.
    """
    first = outs.arrays[0]
    if first.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"{outs.names()[0]}: got dtype {first.dtype}, expected {_ACCEPTED}; convert it, as by "
            f"{cast(framework, 'x', 'float32')}"
        )
    shape = checked_shapes(outs, lses, outs.arrays, lses.arrays)
    for name, array in zip(outs.names(), outs.arrays, strict=True):
        if array.dtype != first.dtype:
            raise TypeError(
                f"{name}: got dtype {array.dtype}, expected {first.dtype}, that of outs[0]; convert it, "
                f"as by {cast(framework, 'x', first.dtype)}"
            )
    for name, array in zip(lses.names(), lses.arrays, strict=True):
        if array.dtype != np.float32:
            raise TypeError(
                f"{name}: got dtype {array.dtype}, expected float32, as attention returns it; convert it, "
                f"as by {cast(framework, 'x', 'float32')}"
            )
    *batch, rows, nheads, headdim = shape
    dtype_name = first.dtype.name
    result = dtype_name if dtype is None else result_dtype(dtype).name
    problem = Problem(
        dtype=dtype_name,
        batch=batch[0] if batch else 1,
        nheads_q=nheads,
        nheads_kv=nheads,
        headdim=headdim,
        headdim_v=headdim,
        packed=not batch,
        rows_q=rows,
        rows_k=0,
        max_seqlen_q=rows,
        max_seqlen_k=0,
        ragged=False,
        window_left=None,
        window_right=None,
        sink=0,
        top_left=False,
        scale=1.0,
        partials=PartialsForm(outs.count(outs.arrays), result, (outs.listed, lses.listed)),
    )
    return problem, bind(None, batch=problem.batch, rows_q=rows, rows_k=0)


def checked_shapes(
    outs: PartialsSide,
    lses: PartialsSide,
    views_of_outs: Sequence[Any],
    views_of_lses: Sequence[Any],
) -> Shape:
    """The shape of out. ValueError unless all partials have it and every lse has the shape that goes with it."""
    shape = outs.shape_of_one(views_of_outs)
    if len(shape) not in (3, 4):
        got = tuple(views_of_outs[0].shape)
        raise ValueError(
            f"{outs.names()[0]}: got shape {got}, expected {_OUT_AXES}"
            + (
                ""
                if outs.listed
                else ", behind a first axis of partials; of one partial pass a list"
            )
        )
    if not 1 <= shape[-1] <= MAX_HEADDIM:
        raise ValueError(
            f"{outs.names()[0]}: got Dv = {shape[-1]} in shape {tuple(views_of_outs[0].shape)}, "
            f"expected 1 to {MAX_HEADDIM}"
        )
    count = outs.count(views_of_outs)
    if count < 1:
        raise ValueError("outs: got no partial result, expected at least one")
    # Without axes there is no count, and the comparison of shapes below tells more.
    has_count = lses.listed or len(views_of_lses[0].shape) > 0
    if has_count and lses.count(views_of_lses) != count:
        raise ValueError(
            f"lses: got {lses.count(views_of_lses)}, expected {count}, one for each of outs"
        )
    if outs.listed:
        for name, view in zip(outs.names(), views_of_outs, strict=True):
            if tuple(view.shape) != shape:
                raise ValueError(
                    f"{name}: got shape {tuple(view.shape)}, expected {shape}, that of outs[0]"
                )
    expected = lse_shape(shape)
    if not lses.listed:
        expected = (count, *expected)
    for name, view in zip(lses.names(), views_of_lses, strict=True):
        got = tuple(view.shape)
        if got != expected:
            swapped = (*expected[:-2], expected[-1], expected[-2])
            raise ValueError(
                f"{name}: got shape {got}, expected {expected}, which is "
                f"{'' if lses.listed else '(partials, ...) of '}"
                f"{'(batch, nheads, seqlen_q)' if len(shape) == 4 else '(nheads, total_q)'}"
                + ("; swap its last two axes" if got == swapped else "")
            )
    return shape


def lse_shape(shape: Shape) -> Shape:
    """The shape of the lse that goes with an out of this shape."""
    return (*shape[:-3], shape[-2], shape[-3])


def result_dtype(dtype: Any) -> np.dtype[Any]:
    """The result's dtype, given as a dtype of NumPy or torch or by name. TypeError for any that `combine` does not have."""
    try:
        name: str = np.dtype(dtype).name
    except TypeError:
        name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(
            f"dtype: got {for_message(dtype)}, expected {_ACCEPTED}, or None for that of outs[0]"
        )
    return DTYPES[name]
