"""What a backward call is given and what it must return, for every `Case`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import lru_cache

import ml_dtypes
import numpy as np

import rawattn
from rawattn import reference
from rawattn._call.gradients import Gradients
from rawattn._call.options import Options
from rawattn.reference._call import read
from tests.cases import CANARY, Case, Inputs, Strided, _logical_rows, materialise, strided
from tests.frameworks import Framework
from tests.tolerance import check, column_orders, scale_of
from tests.verify import layout

NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class Backward:
    """One backward call. Padding rows of all that it is given are NaN."""

    inputs: Inputs
    dout: Strided
    out: Strided
    lse: np.ndarray
    dlse: np.ndarray | None
    into: tuple[Strided, ...] | None  # dq, dk, dv
    rows: tuple[np.ndarray, ...]  # True for the logical rows of dq, dk and dv
    exact: tuple[np.ndarray, ...]  # the logical rows alone
    low: tuple[tuple[np.ndarray, ...], ...]  # of each gradient, one or more evaluations
    terms: tuple[float, ...]  # the size of what cancels in dq, dk and dv: see `cancelling_terms`

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(x.shape for x in (self.inputs.q, self.inputs.k, self.inputs.v))


@lru_cache(maxsize=4)
def backward_of(case: Case) -> Backward:
    inputs = materialise(case)
    arrays = [x.view() for x in (inputs.q, inputs.k, inputs.v)]
    options = {**inputs.options, "seqs": layout(inputs)}
    dtype = inputs.q.buffer.dtype
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    rows_q, rows_k = inputs.rows, _logical_rows(case, *case.side_k)
    shape = (*rows_q.shape, case.nheads_q, inputs.v.shape[-1])

    def poisoned(values: np.ndarray) -> Strided:
        array = strided(shape, dtype, case.layout if case.layout != "shared-heads" else "bhsd")
        array.view()[rows_q] = values[rows_q].astype(dtype)
        return array

    exact_out, exact_lse = reference.attention(*arrays, **options, return_lse=True)
    dout = poisoned(rng.standard_normal(shape))
    out = poisoned(exact_out)
    dlse = None
    if case.return_lse and rng.random() < 0.5:
        dlse = rng.standard_normal(exact_lse.shape).astype(np.float32)
    exact = reference.attention_backward(
        dout.view(), *arrays, exact_out, exact_lse, dlse=dlse, **options
    )
    # From what the kernels are given too, whose rounding is not theirs.
    given = exact_out.astype(dtype), exact_lse.astype(np.float32)
    low = low_precision_gradients(dout.view(), *arrays, *given, dlse, **options)

    def poison(x: np.ndarray | None) -> np.ndarray | None:
        if x is None:
            return None
        x = x.astype(np.float32)
        x.swapaxes(-1, -2)[~rows_q] = np.nan
        return x

    into = None
    if case.give_out:
        dense = case.layout in ("steps", "shared-heads")
        into = tuple(
            strided(x.shape, dtype, "dense" if dense else case.layout)
            for x in (inputs.q, inputs.k, inputs.v)
        )
        for array in into:
            array.buffer.view(np.uint8)[:] = CANARY
    rows = (rows_q, rows_k, rows_k)
    return Backward(
        inputs,
        dout,
        out,
        poison(exact_lse),
        poison(dlse),
        into,
        rows,
        tuple(getattr(exact, name)[where] for name, where in zip(NAMES, rows, strict=True)),
        tuple(
            tuple(getattr(x, name)[where] for x in low)
            for name, where in zip(NAMES, rows, strict=True)
        ),
        cancelling_terms(dout.view(), *arrays, exact_out, exact_lse, rows, **options),
    )


def low_precision_gradients(dout, q, k, v, out, lse, dlse, **options) -> list[Gradients]:
    """As float32 arithmetic gives them with scores, probabilities, their gradients and the result rounded
    to the dtype of `q`, for each of `column_orders`."""
    dtype = q.dtype
    options["scale"] = scale_of(q, options)
    results = []
    for order, order_v in column_orders(q, v):
        call = read(q[..., order], k[..., order], v[..., order_v], Options(**options), np.float32)
        gradients = reference._backward(
            call,
            dout[..., order_v],
            out[..., order_v],
            lse,
            dlse,
            want_dbias=False,
            rounded=lambda x: x.astype(dtype).astype(np.float32),
        )
        back, back_v = np.argsort(order), np.argsort(order_v)
        results.append(
            Gradients(
                gradients.dq[..., back].astype(dtype),
                gradients.dk[..., back].astype(dtype),
                gradients.dv[..., back_v].astype(dtype),
            )
        )
    return results


def cancelling_terms(dout, q, k, v, out, lse, rows, **options) -> tuple[float, ...]:
    """How large the terms of each gradient are before they cancel: their rounding in float32 is left even where
    the gradient is 0, and whether a low-precision evaluation has it too is chance.

    dP - delta cancels in a row that sees one key. Of row i it leaves a part of t_i = scale sum |dout_i out_i|, which
    dq_i has times k, and dk_j has times q_i from every row: errors of rows are independent, so their squares add
    up, each P_ij^2 t_i^2 <= P_ij t_i^2. In dv it is a score of the size of lse that leaves its rounding in P.
    """
    scale = abs(scale_of(q, options))
    rows_q, rows_k, _ = rows
    size = scale * np.abs(dout.astype(np.float64) * out).sum(axis=-1, keepdims=True)
    one_q = np.abs(q.astype(np.float64)).max(axis=-1, keepdims=True)
    t = np.square(size * one_q)
    # dv = P^T dout, of a v that has one column.
    of_rows = reference.attention_backward(t, q, k, v[..., :1], np.zeros_like(t), lse, **options).dv
    finite = lse[np.isfinite(lse)]
    return (
        float(size[rows_q].max(initial=0) * np.abs(k[rows_k].astype(np.float64)).max(initial=0)),
        float(np.sqrt(of_rows[rows_k].max(initial=0))),
        float(
            np.abs(finite).max(initial=0) * np.abs(dout[rows_q].astype(np.float64)).max(initial=0)
        ),
    )


def check_gradient(call: Backward, n: int, got: np.ndarray) -> None:
    """`check` of the logical rows of dq, dk or dv (n = 0, 1, 2)."""
    exact, low = call.exact[n], call.low[n]
    if not exact.size:
        return
    left = 8 * 2.0**-24 * call.terms[n]
    size = np.sqrt(np.mean(np.square(exact)))
    units = 16 if got.dtype.itemsize == 4 else 0.5
    usual = units * float(ml_dtypes.finfo(got.dtype).eps) * size
    check(got, exact, low, what=NAMES[n], floor=usual + left if left > usual else None)


def verify(
    case: Case,
    framework: Framework,
    *,
    backend: str | None = None,
    deterministic: bool = False,
) -> None:
    """Values within tolerance, padding as the contract says, nothing else touched."""
    call = backward_of(case)
    inputs = call.inputs
    q, k, v, out, dout = (
        framework.array(x) for x in (inputs.q, inputs.k, inputs.v, call.out, call.dout)
    )
    lse, dlse = (None if x is None else framework.array(_dense(x)) for x in (call.lse, call.dlse))
    into = None
    if call.into is not None and framework.writable:
        into = Gradients(*map(framework.array, call.into))
    gradients = rawattn.attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        seqs=layout(inputs, case, framework),
        **inputs.options,
        dlse=dlse,
        deterministic=deterministic,
        into=into,
        backend=backend,
    )
    assert isinstance(gradients, Gradients)
    assert gradients.dbias is None and gradients.dsink_logits is None
    for n, (name, rows) in enumerate(zip(NAMES, call.rows, strict=True)):
        gradient = gradients[n]
        assert type(gradient) is type(q), f"{name}: got {type(gradient)} for a {type(q)}"
        result = framework.host(gradient)
        assert result.shape == call.shapes[n] and result.dtype == inputs.q.buffer.dtype
        check_gradient(call, n, result[rows])
        if into is None:
            assert not np.any(result[~rows].astype(np.float32) != 0), f"{name}: padding is not 0"
        else:
            assert gradient is into[n], f"into.{name} was given, something else was returned"
            given = call.into[n]
            buffer = framework.buffer_of(gradient, given)
            mine = replace(given, buffer=np.zeros(buffer.shape, bool))
            mine.view()[rows] = True
            bits = f"u{buffer.itemsize}"
            touched = buffer.view(bits) != given.buffer.view(bits)
            assert not np.any(touched & ~mine.buffer), f"{name}: memory outside its rows changed"


def _dense(array: np.ndarray) -> Strided:
    """In memory of its own, NaN around it."""
    copy = strided(array.shape, array.dtype, "dense")
    copy.view()[...] = array
    return copy
