"""The caller's arrays to which the reference writes its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rawattn._call.checks import check_apart, check_own_elements
from rawattn._call.gradients import Gradients, check_given
from rawattn._call.options import for_message
from rawattn.reference._call import Array, Call, is_float


def write(name: str, target: Any, result: Array, rows: Array | None = None) -> Any:
    """`result`, or the caller's array `target` after the result was written to it.

    rows: True for rows that are no padding, over the first axes; None if there is no padding.
    """
    if target is None:
        return result
    if not isinstance(target, np.ndarray):
        raise TypeError(f"{name}: got {for_message(target)}, expected a NumPy array or None")
    if target.shape != result.shape:
        raise ValueError(f"{name}: got shape {target.shape}, expected {result.shape}")
    if not is_float(target.dtype):
        raise TypeError(f"{name}: got {target.dtype}, expected a floating-point dtype")
    if not target.flags.writeable:
        raise ValueError(f"{name}: got a read-only array; pass a writable one")
    check_own_elements(target, name)
    real = ... if rows is None else rows
    target[real] = result[real].astype(target.dtype)
    return target


def check_targets(targets: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """ValueError for NumPy arrays to write that share memory with each other or with an input."""
    others = {n: x for n, x in {**inputs, **targets}.items() if isinstance(x, np.ndarray)}
    for name in targets:
        if name in others:
            check_apart(others.pop(name), others.items(), name)


def write_gradients(
    call: Call, found: Gradients, into: Gradients, inputs: Mapping[str, Any]
) -> Gradients:
    """Writes the gradients `found` to the arrays of `into`, and returns those; gradients without one are returned as they are.

    inputs: the arrays of the call by name, which the results may not overlap.
    """
    rows_k = rows_of(call.shape_k, ((each.start_k, each.len_k) for each in call.sequences))
    rows = {"dq": rows_of_q(call), "dk": rows_k, "dv": rows_k, "dbias": None, "dsink_logits": None}
    captured: dict[str, Any] = dict(found.captured or {})
    check_given(into, [name for name in rows if getattr(found, name) is not None], captured)
    targets = {f"into.{name}": getattr(into, name) for name in Gradients._fields[:-1]}
    targets |= {f"into.captured[{name!r}]": x for name, x in (into.captured or {}).items()}
    check_targets(targets, inputs)
    results = {
        name: write(f"into.{name}", getattr(into, name), getattr(found, name), real)
        for name, real in rows.items()
    }
    for name, target in (into.captured or {}).items():
        captured[name] = write(f"into.captured[{name!r}]", target, captured[name])
    return Gradients(**results, captured=captured or None)


def rows_of_q(call: Call) -> Array:
    """True for rows of q that are no padding, in the shape of its axes before the heads."""
    return rows_of(call.shape_q, ((each.start_q, each.len_q) for each in call.sequences))


def rows_of(shape: tuple[int, ...], sequences: Iterable[tuple[int, int]]) -> Array:
    """True for rows of an array that are no padding. sequences: the first row and the number of rows of each."""
    real = np.zeros(shape[:-2], bool)
    flat = real.reshape(-1)
    for first, count in sequences:
        flat[first : first + count] = True
    return real
