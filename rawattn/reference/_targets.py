"""Arrays of the caller's that the reference writes its results to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rawattn._call.checks import check_apart, check_own_elements
from rawattn._call.gradients import Gradients, check_given
from rawattn._call.options import shown
from rawattn.reference._call import Array, Call, is_float


def write(name: str, target: Any, result: Array, rows: Array | None = None) -> Any:
    """`result`, or the caller's array with it. rows: of the first axes, which of them are no padding; None: all are real."""
    if target is None:
        return result
    if not isinstance(target, np.ndarray):
        raise TypeError(f"{name}: got {shown(target)}, expected a NumPy array or None")
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
    """ValueError for arrays to write that share memory with each other or with an input, all by name and NumPy's."""
    others = {n: x for n, x in {**inputs, **targets}.items() if isinstance(x, np.ndarray)}
    for name in targets:
        if name in others:
            check_apart(others.pop(name), others.items(), name)


def write_gradients(
    call: Call, found: Gradients, into: Gradients, inputs: Mapping[str, Any]
) -> Gradients:
    """`found` with the arrays of `into` instead of those that they have been written to. inputs: of the call, by name."""
    rows_k = rows_of(call.shape_k, ((first, count) for _, _, first, count in call.sequences))
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
    """Which rows of q are no padding, in the shape of its axes before the heads."""
    return rows_of(call.shape_q, ((first, count) for first, count, _, _ in call.sequences))


def rows_of(shape: tuple[int, ...], sequences: Iterable[tuple[int, int]]) -> Array:
    """Which rows of an array are no padding. sequences: the first row of each and how many it has."""
    real = np.zeros(shape[:-2], bool)
    flat = real.reshape(-1)
    for first, count in sequences:
        flat[first : first + count] = True
    return real
