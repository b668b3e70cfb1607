"""Error bounds for gradients: low-precision evaluations, and the size of the terms that cancel in a gradient."""

from __future__ import annotations

import numpy as np

from rawattn import reference
from rawattn._call.gradients import Gradients
from rawattn._call.options import Options
from rawattn._scores import numpy_eval
from rawattn.reference._call import read
from rawattn.reference._passes import backward, lse_from_user, summed_to, zeros_of_wrt
from rawattn.reference._scores import (
    blocks,
    dropout_factor,
    index_in,
    score_arguments,
    scores,
    sink_logit,
)
from tests.tolerance import column_orders, scale_of


def low_precision_gradients(dout, q, k, v, out, lse, dlse, **options) -> list[Gradients]:
    """Gradients in float32 arithmetic with intermediates rounded to the dtype of `q`, for each of `column_orders`.

    The intermediates are scores, probabilities, their gradients, and the result.
    """
    dtype = q.dtype
    options["scale"] = scale_of(q, options)
    results = []
    for order, order_v in column_orders(q, v):
        call = read(q[..., order], k[..., order], v[..., order_v], Options(**options), np.float32)
        gradients = backward(
            call,
            dout[..., order_v],
            out[..., order_v],
            lse,
            dlse,
            want_dbias=options.get("bias") is not None,
            rounded=lambda x: x.astype(dtype).astype(np.float32),
        )
        back, back_v = np.argsort(order), np.argsort(order_v)
        results.append(
            Gradients(
                gradients.dq[..., back].astype(dtype),
                gradients.dk[..., back].astype(dtype),
                gradients.dv[..., back_v].astype(dtype),
                _as(options.get("bias"), gradients.dbias),
                _as(options.get("sink_logits"), gradients.dsink_logits),
                gradients.captured,
            )
        )
    return results


def _as(array: np.ndarray | None, gradient: np.ndarray | None) -> np.ndarray | None:
    """Return the gradient in the dtype and shape of its array."""
    if array is None or gradient is None:
        return None
    return gradient.reshape(array.shape).astype(array.dtype)


def sizes_of_sums(dout, q, k, v, out, lse, dlse, **options) -> Gradients:
    """Return, for each element of an option's gradient, the root of the sum of squares of the sizes of its terms.

    A term is P (dP - delta). dP and delta are rounded before they cancel, so the size of a term is P (|dP| + |delta|), with
    dP's products taken by magnitude. The terms of an element have independent errors, so their squares add up.
    """
    call = read(q, k, v, Options(**options), np.float64)
    flat = (-1, call.q.shape[1], call.v.shape[2])
    dout, out = (x.astype(np.float64).reshape(flat) for x in (dout, out))
    lse = lse_from_user(lse.astype(np.float64))
    dlse = np.zeros_like(lse) if dlse is None else lse_from_user(dlse.astype(np.float64))
    dbias = None if call.bias is None else np.zeros(call.bias.shape)
    dsink = None if call.sink_logits is None else np.zeros(call.sink_logits.shape)
    captured = zeros_of_wrt(call.score_mod)
    for block in blocks(call):
        row, key = (block.rows, block.head), (block.keys, block.kv_head)
        capped, s, visible = scores(call, block)
        normaliser = np.where(lse[row] == -np.inf, np.inf, lse[row])[:, None]
        delta = np.abs(dout[row] * out[row]).sum(axis=1, keepdims=True) + np.abs(dlse[row])[:, None]
        products = np.abs(dout[row]) @ np.abs(call.v[key]).T * dropout_factor(call, block)
        size = np.exp(s - normaliser) * (products + delta)
        squares = np.where(visible, size * size, 0)
        if dbias is not None:
            index = index_in(dbias, call, block)
            dbias[index] += summed_to(dbias[index].shape, squares)
        if dsink is not None:
            p_sink = np.exp(sink_logit(call, block) - normaliser)
            dsink[block.head] += np.square(p_sink * delta).sum()
        if captured:
            for x in numpy_eval.partials(*score_arguments(call.score_mod, block, capped)):
                squared = x._replace(partial=np.square(x.partial))
                numpy_eval.add_partial(captured[x.name], squared, squares)
    shape = call.shape_bias
    return Gradients(
        dbias=None if dbias is None else np.sqrt(dbias).reshape(shape),
        dsink_logits=None if dsink is None else np.sqrt(dsink),
        captured={name: np.sqrt(x) for name, x in captured.items()},
    )


def cancelling_terms(dout, q, k, v, out, lse, rows, **options) -> tuple[float, ...]:
    """Return the size of the terms of dq, dk and dv before they cancel.

    Their rounding in float32 remains even where the gradient is 0, and a low-precision evaluation may or may not have the same
    error.

    dP - delta cancels in a row that sees one key. The rounding left by row i is a part of t_i = scale sum |dout_i out_i|. In
    dq_i it is multiplied by k, and in dk_j by q_i of every row. The errors of rows are independent, so their squares add up:
    P_ij^2 t_i^2 <= P_ij t_i^2. In dv, a score as large as lse leaves its rounding in P.
    """
    scale = abs(scale_of(q, options))
    rows_q, rows_k, _ = rows
    # Uses the probabilities before dropout: delta is subtracted where an element is dropped too.
    options = {name: x for name, x in options.items() if name not in ("dropout_p", "seed")}
    size = scale * np.abs(dout.astype(np.float64) * out).sum(axis=-1, keepdims=True)
    one_q = np.abs(q.astype(np.float64)).max(axis=-1, keepdims=True)
    t = np.square(size * one_q)
    # dv = P^T dout, with t as dout and a v of one column, sums t over rows with weights P.
    of_rows = reference.attention_backward(t, q, k, v[..., :1], np.zeros_like(t), lse, **options).dv
    finite = lse[np.isfinite(lse)]
    return (
        float(size[rows_q].max(initial=0) * np.abs(k[rows_k].astype(np.float64)).max(initial=0)),
        float(np.sqrt(of_rows[rows_k].max(initial=0))),
        float(
            np.abs(finite).max(initial=0) * np.abs(dout[rows_q].astype(np.float64)).max(initial=0)
        ),
    )
