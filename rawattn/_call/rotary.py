"""The rotary embedding of a call: the form of its angles, and its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

_AXES = "(positions, rotary_dim / 2)"


class RotaryForm(NamedTuple):
    """The form of a rotary embedding: the first `dim` elements of a head turn, in dim / 2 planes."""

    dim: int
    positions: int  # the number of positions that have angles
    dtype: str  # of the cosines and sines
    interleaved: bool  # plane j has elements 2j and 2j + 1; otherwise j and j + dim / 2


def split(rotary: Any) -> tuple[Any, Any]:
    """`rotary` as a tuple (cos, sin). TypeError for anything but a pair of arrays."""
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        got = (
            f"{len(rotary)} of them" if isinstance(rotary, (tuple, list)) else type(rotary).__name__
        )
        raise TypeError(f"rotary: got {got}, expected a pair of arrays (cos, sin), each {_AXES}")
    for name, array in zip(("cos", "sin"), rotary, strict=True):
        if not hasattr(array, "__dlpack__"):
            raise TypeError(
                f"rotary: got {type(array).__name__} for {name}, expected an array {_AXES}"
            )
    return tuple(rotary)


def form(cos: Any, sin: Any, interleaved: bool, headdim: int, dtype: np.dtype[Any]) -> RotaryForm:
    """The form of the angles. dtype: of the keys. Raises TypeError or ValueError for angles that do not fit."""
    # For a message: the columns to pass of arrays that hold each angle twice, as other libraries have them.
    once = "::2" if interleaved else ": D // 2"
    for name, array in (("cos", cos), ("sin", sin)):
        if array.dtype not in (dtype, np.dtype(np.float32)):
            expected = "float32" if dtype == np.float32 else f"float32 or {dtype}"
            raise TypeError(f"rotary: got {name} of dtype {array.dtype}, expected {expected}")
        if len(array.shape) != 2:
            batch = len(array.shape) == 3 and array.shape[0] == 1
            advice = (
                f"; pass {name}[0, :, {once}] of angles as transformers has them" if batch else ""
            )
            raise ValueError(
                f"rotary: got {name} of shape {tuple(array.shape)}, expected {_AXES}{advice}"
            )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"rotary: got sin {sin.dtype} of shape {tuple(sin.shape)}, expected {cos.dtype} of shape "
            f"{tuple(cos.shape)}, those of cos"
        )
    positions, planes = cos.shape
    if positions < 1:
        raise ValueError(
            f"rotary: got cos of shape {tuple(cos.shape)}, expected at least one position"
        )
    if not 1 <= planes <= headdim // 2:
        whole = planes == headdim
        advice = f"; pass the angles of each plane once: cos[:, {once}]" if whole else ""
        raise ValueError(
            f"rotary: got cos of shape {tuple(cos.shape)} = {_AXES}, expected at most D / 2 = {headdim // 2} planes "
            f"and at least one{advice}"
        )
    return RotaryForm(2 * planes, positions, cos.dtype.name, interleaved)
