"""Arrays of tests in memory: strides, gaps, and NaN around them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
# Layouts of arrays of rows. "steps" (strided last axis) and "shared-heads" (head stride 0) are for inputs only: outputs of such
# a case are dense.
LAYOUTS = ("dense", "bhsd", "gaps", "odd", "reversed", "steps", "shared-heads")
# Layouts of option arrays. "expanded": one axis has stride 0.
LAYOUTS_OF_OPTIONS = ("dense", "transposed", "gaps", "odd", "steps", "expanded")
CANARY = 0xA5
_GUARD = 64  # elements before and after every array


@dataclass(frozen=True, eq=False)
class Strided:
    """An array inside a one-dimensional buffer that it does not fill; strides are in elements."""

    buffer: np.ndarray
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self) -> np.ndarray:
        itemsize = self.buffer.dtype.itemsize
        return np.ndarray(
            self.shape,
            self.buffer.dtype,
            buffer=self.buffer,
            offset=self.offset * itemsize,
            strides=[itemsize * stride for stride in self.strides],
        )


def strided(shape: tuple[int, ...], dtype: np.dtype, layout: str) -> Strided:
    """An array (..., rows, heads, dim) in a buffer filled with NaN."""
    ndim = len(shape)
    rows, heads = ndim - 3, ndim - 2
    order = list(range(ndim))
    if layout == "bhsd":
        order[rows], order[heads] = heads, rows
    found = _strided(shape, dtype, order, layout)
    offset, strides = found.offset, list(found.strides)
    if layout == "reversed":
        offset += strides[rows] * max(shape[rows] - 1, 0)
        strides[rows] = -strides[rows]
    if layout == "shared-heads":
        strides[heads] = 0
    return Strided(found.buffer, offset, shape, tuple(strides))


def option_array(shape: tuple[int, ...], dtype: np.dtype, layout: str) -> Strided:
    """An option's array in a buffer filled with NaN, or with True for bool."""
    order = list(range(len(shape)))
    if layout == "transposed" and len(shape) > 1:
        order[-2:] = order[:-3:-1]
    axis = expanded_axis(shape) if layout == "expanded" else None
    own = tuple(1 if n == axis else extent for n, extent in enumerate(shape))
    found = _strided(own, dtype, order, layout)
    strides = tuple(0 if n == axis else stride for n, stride in enumerate(found.strides))
    return Strided(found.buffer, found.offset, shape, strides)


def expanded_axis(shape: tuple[int, ...]) -> int | None:
    """The axis that "expanded" repeats: the second to last (the rows of a bias), else the first with several elements."""
    several = [n for n, extent in enumerate(shape) if extent > 1]
    if not several:
        return None
    rows = len(shape) - 2
    return rows if rows in several else several[0]


def _strided(shape: tuple[int, ...], dtype: np.dtype, order: list[int], layout: str) -> Strided:
    gap = {"gaps": 16, "odd": 3}.get(layout, 0)
    size = 2 if layout == "steps" else 1
    strides = [0] * len(shape)
    for axis in reversed(order):
        strides[axis] = size
        size = size * max(shape[axis], 1) + gap
        if layout == "aligned":
            size += -size % 8
    offset = _GUARD + (layout == "odd")
    buffer = np.full(size + 2 * _GUARD + 1, np.nan, dtype)
    return Strided(buffer, offset, shape, tuple(strides))
