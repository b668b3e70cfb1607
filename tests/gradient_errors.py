"""How far from exact a gradient may be: low-precision evaluations, and the size of what cancels in it."""

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
    """As float32 arithmetic gives them with scores, probabilities, their gradients and the result rounded
    to the dtype of `q`, for each of `column_orders`."""
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
    """In the dtype and the shape of the array that it is of."""
    if array is None or gradient is None:
        return None
    return gradient.reshape(array.shape).astype(array.dtype)


def sizes_of_sums(dout, q, k, v, out, lse, dlse, **options) -> Gradients:
    """Of the gradients of options' arrays, how large an error of one part of each term leaves a sum of them.

    A term is P (dP - delta), whose parts are rounded before they cancel: dP is a sum of products. Terms of an element are
    independent, so their squares add up.
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
            for x in numpy_eval.partials(*score_arguments(call.score_mod, call, block, capped)):
                squared = x._replace(partial=np.square(x.partial))
                numpy_eval.add_partial(captured[x.name], squared, squares)
    shape = call.shape_bias
    return Gradients(
        dbias=None if dbias is None else np.sqrt(dbias).reshape(shape),
        dsink_logits=None if dsink is None else np.sqrt(dsink),
        captured={name: np.sqrt(x) for name, x in captured.items()},
    )


def cancelling_terms(dout, q, k, v, out, lse, rows, **options) -> tuple[float, ...]:
    """How large the terms of each gradient are before they cancel: their rounding in float32 is left even where
    the gradient is 0, and whether a low-precision evaluation has it too is chance.

    dP - delta cancels in a row that sees one key. Of row i it leaves a part of t_i = scale sum |dout_i out_i|, which
    dq_i has times k, and dk_j has times q_i from every row: errors of rows are independent, so their squares add
    up, each P_ij^2 t_i^2 <= P_ij t_i^2. In dv it is a score of the size of lse that leaves its rounding in P.
    """
    scale = abs(scale_of(q, options))
    rows_q, rows_k, _ = rows
    # Of probabilities before dropout: delta is subtracted where it is 0 too.
    options = {name: x for name, x in options.items() if name not in ("dropout_p", "seed")}
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
