"""The tolerance of results: at most twice the error of the same computation with intermediates in the I/O precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rawattn._call.options import Options
from rawattn.reference._call import read
from rawattn.reference._passes import forward

Array = Any


def column_orders(q: Array, v: Array) -> Iterator[tuple[Array, Array]]:
    """Yield orders of the columns of q and k, and of v, in which to evaluate a call in low precision.

    There are four for float32. A score near 100 has a random error of several units in its last place, and its probability has
    the same relative error. Two correct evaluations that differ only in the order of their sums, like matrix products on two
    CPUs, can therefore differ tenfold in error.
    """
    headdim, headdim_v = q.shape[-1], v.shape[-1]
    yield np.arange(headdim), np.arange(headdim_v)
    if q.dtype == np.float32:
        rng = np.random.default_rng(0)
        for _ in range(3):
            yield rng.permutation(headdim), rng.permutation(headdim_v)


def scale_of(q: Array, options: dict[str, Any]) -> float:
    scale = options.get("scale")
    return q.shape[-1] ** -0.5 if scale is None else scale


def low_precision_attention(
    q: Array, k: Array, v: Array, **options: Any
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """`out` and `lse` as float32 arithmetic gives them with scores and probabilities rounded to
    the dtype of `q`, and `out` rounded to it, for each of `column_orders`; the options are those of
    `reference.attention`."""
    options.pop("return_lse", None)
    q, k, v = map(np.asarray, (q, k, v))
    options["scale"] = scale_of(q, options)
    outs, lses = [], []
    for order, order_v in column_orders(q, v):
        call = read(q[..., order], k[..., order], v[..., order_v], Options(**options), np.float32)
        with np.errstate(over="ignore"):  # the largest float16 is 65504
            out, lse = forward(call, lambda x: x.astype(q.dtype).astype(np.float32))
            outs.append(out[..., np.argsort(order_v)].astype(q.dtype))
        lses.append(lse)
    return tuple(outs), tuple(lses)


def check(
    got: Array,
    exact: Array,
    lowprec: tuple[Array, ...],
    *,
    what: str = "",
    floor: float | None = None,
) -> None:
    """AssertionError unless the largest and the root-mean-square error of `got` against `exact` are
    each at most twice the worst of `lowprec`, which are evaluations in low precision, plus a floor.

    `floor` is absolute. By default it is relative to the largest (and to the root-mean-square)
    exact value: half a unit in the last place of 16-bit results, 16 units of float32 ones, since
    there `lowprec` may have been lucky. NaN never passes; infinities must be those of `exact`.
    """
    units = 16.0 if np.asarray(got).dtype.itemsize >= 4 else 0.5
    relative = units * _epsilon(np.asarray(got).dtype)
    got, exact = (np.asarray(x).astype(np.float64) for x in (got, exact))
    orders = [np.asarray(x).astype(np.float64) for x in lowprec]
    what = what or "result"
    shapes = [x.shape for x in (got, exact, *orders)]
    assert len(set(shapes)) == 1, (
        f"{what}: shapes differ: got, exact and low precision have {shapes}"
    )
    assert not any(np.isnan(x).any() for x in (exact, *orders)), (
        f"{what}: the expected values hold NaN: compare what is defined alone"
    )
    finite = np.isfinite(exact)
    wrong = np.isnan(got) | np.where(finite, np.isinf(got), got != exact)
    assert not wrong.any(), _first(what, "NaN or infinity", wrong, got, exact)
    assert all(np.isfinite(x[finite]).all() for x in orders), (
        f"{what}: low precision overflows: use less extreme inputs"
    )

    got, exact, *orders = (np.where(finite, x, 0) for x in (got, exact, *orders))
    error = np.abs(got - exact)
    for norm, name in ((_largest, "largest"), (_rms, "root-mean-square")):
        low = max(norm(x - exact) for x in orders)
        bound = 2 * low + (relative * norm(exact) if floor is None else floor)
        measured = norm(error)
        if not measured <= bound:
            bad = error > min(bound, error.max() * 0.99)
            reason = (
                f"{name} error {measured:.3e} > {bound:.3e} (low precision has {low:.3e}), "
                f"{np.count_nonzero(bad)} of {got.size} elements"
            )
            raise AssertionError(_first(what, reason, bad, got, exact))


def check_lse(got: Array, exact: Array, lowprec: tuple[Array, ...], *, what: str = "lse") -> None:
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
