"""How close is close enough: at most twice what the same maths costs in the I/O precision."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn import reference
from rawattn._reference_call import read

Array = Any


def low_precision_attention(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """`out` and `lse` as float32 arithmetic gives them with scores and probabilities rounded to
    the dtype of `q`, and `out` rounded to it; the options are those of `reference.attention`."""
    options.pop("return_lse", None)
    dtype = np.asarray(q).dtype
    call = read(q, k, v, **options, precision=np.float32)
    with np.errstate(over="ignore"):  # float16 ends at 65504
        out, lse = reference._forward(call, lambda x: x.astype(dtype).astype(np.float32))
        return out.astype(dtype), lse


def check(
    got: Array, exact: Array, lowprec: Array, *, what: str = "", floor: float | None = None
) -> None:
    """AssertionError unless the largest and the root-mean-square error of `got` against `exact` are
    each at most twice those of `lowprec`, plus a floor.

    `floor` is absolute. By default it is relative to the largest (and to the root-mean-square)
    exact value: half a unit in the last place of 16-bit results, 16 units of float32 ones, since
    there `lowprec` may have been lucky. NaN never passes; infinities must be those of `exact`.
    """
    units = 16.0 if np.asarray(got).dtype.itemsize >= 4 else 0.5
    relative = units * _epsilon(np.asarray(got).dtype)
    got, exact, lowprec = (np.asarray(x).astype(np.float64) for x in (got, exact, lowprec))
    what = what or "result"
    assert got.shape == exact.shape == lowprec.shape, (
        f"{what}: shapes differ: got {got.shape}, exact {exact.shape}, lowprec {lowprec.shape}"
    )
    assert not np.isnan(exact).any() and not np.isnan(lowprec).any(), (
        f"{what}: the expected values hold NaN: compare what is defined alone"
    )
    finite = np.isfinite(exact)
    wrong = np.isnan(got) | np.where(finite, np.isinf(got), got != exact)
    assert not wrong.any(), _first(what, "NaN or infinity", wrong, got, exact)
    assert np.isfinite(lowprec[finite]).all(), (
        f"{what}: low precision overflows: use less extreme inputs"
    )

    got, exact, lowprec = (np.where(finite, x, 0) for x in (got, exact, lowprec))
    error = np.abs(got - exact)
    for norm, name in ((_largest, "largest"), (_rms, "root-mean-square")):
        low = norm(lowprec - exact)
        bound = 2 * low + (relative * norm(exact) if floor is None else floor)
        measured = norm(error)
        if not measured <= bound:
            bad = error > min(bound, error.max() * 0.99)
            reason = (
                f"{name} error {measured:.3e} > {bound:.3e} (low precision has {low:.3e}), "
                f"{np.count_nonzero(bad)} of {got.size} elements"
            )
            raise AssertionError(_first(what, reason, bad, got, exact))


def check_lse(got: Array, exact: Array, lowprec: Array, *, what: str = "lse") -> None:
    """`check` for log-sum-exps: a relative error of the sum is an absolute one of its logarithm, so
    an lse near 0 is not more precise than the others."""
    size = max(1.0, _largest(np.asarray(exact)[np.isfinite(exact)]))
    check(got, exact, lowprec, what=what, floor=16 * _epsilon(np.dtype(np.float32)) * size)


def _largest(x: Array) -> float:
    return float(np.abs(x).max(initial=0))


def _rms(x: Array) -> float:
    return float(np.linalg.norm(x) / np.sqrt(max(1, x.size)))


def _epsilon(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def _first(what: str, reason: str, bad: Array, got: Array, exact: Array) -> str:
    index = tuple(int(n) for n in np.argwhere(bad)[0])
    return f"{what}: {reason}; first at {index}: got {got[index]!r}, exact {exact[index]!r}"
