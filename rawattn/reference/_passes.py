"""The forward and the backward pass: textbook formulas on blocks of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn._call.gradients import Gradients
from rawattn._scores import numpy_eval
from rawattn.reference._call import Array, Call, Modifier, exactly
from rawattn.reference._scores import (
    blocks,
    dropout_factor,
    index_in,
    score_arguments,
    scores,
    sink_logit,
)

Rounding = Callable[[Array], Array]


def forward(call: Call, rounded: Rounding = lambda x: x) -> tuple[Array, Array]:
    """`out` and `lse`. rounded: applied to the scores and to the probabilities, to model lower precision."""
    nheads_q, dtype = call.q.shape[1], call.q.dtype
    out = np.zeros((call.q.shape[0], nheads_q, call.v.shape[2]), dtype)
    lse = np.full((call.q.shape[0], nheads_q), -np.inf, dtype)
    with np.errstate(invalid="ignore", under="ignore"):
        for block in blocks(call):
            _, s, visible = scores(call, block)
            s = rounded(s)
            sink = sink_logit(call, block)
            highest = np.maximum(s.max(axis=1, keepdims=True, initial=-np.inf), sink)
            highest = np.where(highest == -np.inf, s.dtype.type(0), highest)
            p = np.exp(s - highest)
            total = p.sum(axis=1, keepdims=True) + np.exp(sink - highest)
            with np.errstate(divide="ignore"):
                lse[block.rows, block.head] = (highest + np.log(total))[:, 0]
            p = rounded(p / np.where(total == 0, total.dtype.type(1), total))
            p = p * dropout_factor(call, block)
            out[block.rows, block.head] = _product(p, visible, call.v[block.keys, block.kv_head])
    return out.reshape(*call.shape_q[:-1], call.shape_v[-1]), _lse_to_user(lse, call)


def backward(
    call: Call,
    dout: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    *,
    want_dbias: bool,
    rounded: Rounding = lambda x: x,
) -> Gradients:
    """The gradients. rounded: applied to the scores, the probabilities and the gradients of scores."""
    dtype = call.q.dtype
    nheads_q = call.q.shape[1]
    shape_out = (*call.shape_q[:-1], call.shape_v[-1])
    shape_flat = (call.q.shape[0], nheads_q, call.shape_v[-1])
    shape_lse = (*call.shape_q[:-3], nheads_q, call.shape_q[-3])
    dout = exactly("dout", dout, shape_out, dtype).reshape(shape_flat)
    out = exactly("out", out, shape_out, dtype).reshape(shape_flat)
    lse = lse_from_user(exactly("lse", lse, shape_lse, dtype))
    if dlse is None:
        dlse = np.zeros(lse.shape, dtype)
    else:
        dlse = lse_from_user(exactly("dlse", dlse, shape_lse, dtype))

    dq, dk, dv = np.zeros_like(call.q), np.zeros_like(call.k), np.zeros_like(call.v)
    dbias = np.zeros_like(call.bias) if want_dbias else None
    captured = zeros_of_wrt(call.score_mod)
    dsink = None if call.sink_logits is None else np.zeros_like(call.sink_logits)
    with np.errstate(invalid="ignore", under="ignore"):
        for block in blocks(call):
            row = (block.rows, block.head)
            key = (block.keys, block.kv_head)
            capped, s, visible = scores(call, block)
            # A row whose lse is -inf has probabilities 0: exp(s - inf) = 0.
            normaliser = np.where(lse[row] == -np.inf, dtype.type(np.inf), lse[row])[:, None]
            p = rounded(np.exp(rounded(s) - normaliser))
            # In a row whose lse is NaN, p is NaN for hidden keys too.
            p = np.where(visible, p, dtype.type(0))
            keep = dropout_factor(call, block)
            dv[key] += _product((p * keep).T, visible.T, dout[row])

            dp = (dout[row] @ call.v[key].T) * keep
            delta = (dout[row] * out[row]).sum(axis=1, keepdims=True)
            ds = np.where(visible, p * (dp - delta + dlse[row][:, None]), dtype.type(0))
            if dsink is not None:
                sink = sink_logit(call, block)
                of_rows = np.exp(sink - normaliser) * (dlse[row][:, None] - delta)
                # A sink of -inf gets 0, and a row whose lse is -inf contributes 0, even if its gradients are NaN.
                of_rows[(normaliser == np.inf) | (sink == -np.inf)] = 0
                dsink[block.head] += of_rows.sum()
            if dbias is not None:
                index = index_in(dbias, call, block)
                dbias[index] += summed_to(dbias[index].shape, ds)
            if call.score_mod is not None:
                arguments = score_arguments(call.score_mod, block, capped)
                for partial in numpy_eval.partials(*arguments):
                    numpy_eval.add_partial(captured[partial.name], partial, ds)
                ds = ds * np.where(visible, numpy_eval.derivative(*arguments), dtype.type(0))
            if call.softcap is not None:
                ds = ds * (1 - (capped / call.softcap) ** 2)
            ds = rounded(call.scale * np.where(visible, ds, dtype.type(0)))
            dq[row] += _product(ds, visible, call.k[key])
            dk[key] += _product(ds.T, visible.T, call.q[row])
    return Gradients(
        dq.reshape(call.shape_q),
        dk.reshape(call.shape_k),
        dv.reshape(call.shape_v),
        None if dbias is None or call.shape_bias is None else dbias.reshape(call.shape_bias),
        dsink,
        captured or None,
    )


def zeros_of_wrt(modifier: Modifier | None) -> dict[str, Array]:
    if modifier is None:
        return {}
    return {name: np.zeros_like(modifier.captured[name]) for name in modifier.text.wrt}


def _product(weights: Array, visible: Array, values: Array) -> Array:
    """`weights @ values` over visible pairs only. NaN or infinity in a value must not reach, as 0 * NaN, a row
    that does not see it."""
    finite: NDArray[np.bool_] = np.asarray(np.isfinite(values).all(axis=1))
    product = weights @ np.where(finite[:, None], values, values.dtype.type(0))
    for key in np.flatnonzero(~finite):
        seen = visible[:, key]
        product[seen] += weights[seen, key, None] * values[key]
    return product


def summed_to(shape: tuple[int, ...], ds: Array) -> Array:
    for axis, size in enumerate(shape):
        if size == 1:
            ds = ds.sum(axis=axis, keepdims=True)
    return ds


def _lse_to_user(lse: Array, call: Call) -> Array:
    """(total_q, nheads_q) -> (nheads_q, total_q) or (batch, nheads_q, seqlen_q)."""
    return np.ascontiguousarray(lse.reshape(call.shape_q[:-1]).swapaxes(-1, -2))


def lse_from_user(lse: Array) -> Array:
    return lse.swapaxes(-1, -2).reshape(-1, lse.shape[-2])
