"""Strides of arrays, in bytes."""

from __future__ import annotations

Strides = tuple[int, ...]  # of an array's public shape


def ignoring_unit_axes(shape: tuple[int, ...], strides: Strides) -> Strides:
    """The strides with 0 along axes of one element, where they mean nothing. Equal for arrays that are accessed alike."""
    return tuple(x if n > 1 else 0 for n, x in zip(shape, strides, strict=True))


def contiguous(shape: tuple[int, ...], itemsize: int) -> Strides:
    """Strides of an array in C order."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
