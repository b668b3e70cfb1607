"""Checks of the arrays that results are written to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def check_out(
    out: Any,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    others: Iterable[tuple[str, Any]],
    name: str = "out",
    like: str = "q",
) -> None:
    """Raise TypeError or ValueError if results of this shape and dtype cannot be written to `out`.

    others: the other arrays of the call, with their names. Each array has `shape`, `strides` in bytes and `dtype`, and is a
    NumPy or CuPy array or has an `address`. Arrays that interleave in one buffer without sharing a byte do not overlap.
    like: the name of the array that has this dtype, for the message. Whoever imports `out` refuses a read-only one.
    """
    if out.shape != shape:
        raise ValueError(f"{name}: got shape {out.shape}, expected {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{name}: got dtype {out.dtype}, expected {dtype}, that of {like}")
    if 0 in shape:
        return
    itemsize, strides, address = dtype.itemsize, out.strides, _address(out)
    if shape and shape[-1] > 1 and strides[-1] != itemsize:
        raise ValueError(
            f"{name}: got a last-axis stride of {strides[-1]} bytes, expected {itemsize}, one "
            "element; only other axes may be transposed or sliced"
        )
    if address % itemsize or any(stride % itemsize for stride in strides):
        raise ValueError(
            f"{name}: got strides {strides} at address {address:#x}, expected multiples of {itemsize} "
            "bytes; pass an aligned copy"
        )
    check_own_elements(out, name)
    check_apart(out, others, name)


def check_own_elements(array: Any, name: str) -> None:
    """ValueError if by the strides of an array to write two of its elements may share memory."""
    if 0 in array.shape:
        return
    extent = array.dtype.itemsize
    axes = zip(array.strides, array.shape, strict=True)
    for stride, n in sorted((abs(s), n) for s, n in axes if n > 1):
        if stride < extent:
            raise ValueError(
                f"{name}: got strides {tuple(array.strides)}, by which elements may share memory, expected "
                "memory of its own for each; pass a copy, not a broadcast or overlapping view"
            )
        extent += stride * (n - 1)


def check_apart(out: Any, others: Iterable[tuple[str, Any]], name: str) -> None:
    """ValueError if `out` shares memory with another array of the call."""
    for other_name, other in others:
        if other is not None and share_memory(out, other):
            raise ValueError(
                f"{name}: shares memory with {other_name}, expected memory of its own; pass another array"
            )


def share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays have a byte in common."""
    if 0 in a.shape or 0 in b.shape:
        return False
    (low, high), (other_low, other_high) = byte_range(a), byte_range(b)
    return low < other_high and other_low < high and _share_bytes(a, b)


def byte_range(array: Any, address: int | None = None) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte behind its last one; equal if the array is empty.

    address: that of element 0, in place of the array's own.
    """
    low = high = _address(array) if address is None else address
    if 0 in array.shape:
        return low, low
    for stride, n in zip(array.strides, array.shape, strict=True):
        if stride < 0:
            low += stride * (n - 1)
        else:
            high += stride * (n - 1)
    return low, high + int(array.dtype.itemsize)


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    address: int | None = getattr(array, "address", None)
    return int(array.data.ptr) if address is None else address


def _share_bytes(a: Any, b: Any) -> bool:
    """Whether two arrays have a byte in common. True if NumPy gives up on deciding that."""
    try:
        # Any: NumPy's stubs accept only the two special values of max_work.
        work: Any = 100_000
        return np.shares_memory(_Addresses(a).view(), _Addresses(b).view(), max_work=work)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """An array's addresses as a NumPy array, whatever device they are on. The memory is never accessed."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "data": (_address(array), True),
        }

    def view(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)
