"""`Gradients`: the result of every backward pass, and the arrays that a caller may give to write it to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rawattn._call.options import flag


class Gradients(NamedTuple):
    """Gradients of an attention call, each with the shape and dtype of its input: a named tuple.

    A gradient that was not asked for, or whose input was not given, is None.

    Attributes
    ----------
    dq : array, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        In the dtype of q, as dk and dv.
    dk : array, (batch, seqlen_k, nheads_kv, D), or (total_k, nheads_kv, D)
    dv : array, (batch, seqlen_k, nheads_kv, Dv), or (total_k, nheads_kv, Dv)
    dbias : array or None
        In the shape and dtype of the bias, summed over the axes along which it is broadcast.
    dsink_logits : array, (nheads_q,), or None
        In the dtype of `sink_logits`.
    captured : dict or None
        By name, the gradients of the arrays that a score function has in `wrt`, in their shapes and dtypes.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> q = k = v = np.ones((1, 3, 2, 8), np.float32)
    >>> out, backward = rawattn.attention_vjp(q, k, v, sink_logits=np.zeros(2, np.float32))
    >>> dq, dk, dv, dbias, dsink_logits, captured = backward(np.ones_like(out))
    >>> dv.shape, dbias, dsink_logits.shape
    ((1, 3, 2, 8), None, (2,))

    Arrays of the caller to write, those that are None being allocated by the call:

    >>> into = rawattn.Gradients(dq=np.empty_like(q))
    >>> backward(np.ones_like(out), into=into).dq is into.dq
    True
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink_logits: Any = None
    captured: Any = None


_NONE = Gradients()


def wanted(into: Any, bias: Any = None, want_dbias: Any = None) -> Gradients:
    """The arrays to write, as `Gradients`. Checks `want_dbias` and types; the arrays are checked with those of the call."""
    if want_dbias is not None and flag("want_dbias", want_dbias) and bias is None:
        raise ValueError("want_dbias: got True, but bias is None; pass the bias or drop want_dbias")
    if into is None:
        return _NONE
    if not isinstance(into, Gradients):
        raise TypeError(
            f"into: got {type(into).__name__}, expected rawattn.Gradients(dq=..., dk=..., dv=...) or None"
        )
    if into.captured is not None and not isinstance(into.captured, Mapping):
        raise TypeError(
            f"into.captured: got {type(into.captured).__name__}, expected a dict of arrays, by names that score_mod has "
            "in wrt"
        )
    return into


def check_given(into: Gradients, made: Collection[str], captured: Collection[str]) -> None:
    """ValueError for an array in `into` that is for a gradient which the call does not have.

    made: the gradients of options' arrays that the call has. captured: the captured arrays that have gradients.
    """
    options = {"dbias": "bias=, and no want_dbias=False", "dsink_logits": "sink_logits="}
    for field, wanted in options.items():
        if getattr(into, field) is not None and field not in made:
            raise ValueError(
                f"into.{field}: got an array, but the call has no such gradient, expected None; to have it pass {wanted}"
            )
    for name in into.captured or ():
        if name not in captured:
            raise ValueError(
                f"into.captured: got an array for {name!r}, expected names that score_mod has in wrt: "
                f"{', '.join(captured) or 'none'}"
            )
