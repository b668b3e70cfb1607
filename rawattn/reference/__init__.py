"""Attention in float64 NumPy: the specification of every option, forward and backward.

It is not written for speed. `_scores.blocks` divides a call into blocks of rows of one (sequence, query head)
pair. `_scores.scores` gives the scores of a block and which keys each row sees. The forward and the backward,
in `_passes`, are the textbook formulas on top. All kernels are tested against these functions, and users may
test theirs against them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from rawattn._call import options as _options
from rawattn._call import page_ids, pages
from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.binding import refuse_traced
from rawattn._call.gradients import Gradients, wanted
from rawattn._call.layout import host_lengths
from rawattn._call.options import AttentionOptions, ForwardOptions
from rawattn._call.problem import check_heads
from rawattn._call.seq_layout import SeqLayout
from rawattn._call.signatures import options_of, takes_options
from rawattn.reference import _passes
from rawattn.reference._append import append_kv
from rawattn.reference._call import factors_of_pages, floats, integers, read
from rawattn.reference._combine import combine
from rawattn.reference._targets import (
    check_targets,
    rows_of,
    rows_of_q,
    write,
    write_gradients,
)

if TYPE_CHECKING:  # type checkers ship it; it is no dependency of this package
    from typing_extensions import Unpack

    from rawattn._verbs.attention import CallOptions


__all__ = ["append_kv", "attention", "attention_backward", "combine", "paged_attention"]


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> NDArray[Any]: ...


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[CallOptions]
) -> tuple[NDArray[Any], NDArray[np.float64]]: ...


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[CallOptions]
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[np.float64]]: ...


@checks_arguments("rawattn.reference.attention")
@takes_options(ForwardOptions)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    backend: Literal["cuda", "cpu"] | None = None,
    **options: Unpack[ForwardOptions],
) -> Any:
    """Attention with the arguments and shapes of `rawattn.attention`, computed in float64.

    Parameters
    ----------
    q : array, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        Of any framework, device and floating dtype, float64 too; so are k, v and the arrays of options.
    k : array, (batch, seqlen_k, nheads_kv, D), or (total_k, nheads_kv, D)
    v : array, (batch, seqlen_k, nheads_kv, Dv), or (total_k, nheads_kv, Dv)
    return_lse : bool
        Also return lse.
    out : NumPy array of any floating dtype, optional
        Array that the result is written to; it is returned. Its padding rows are left untouched.
    backend : "cuda" or "cpu", optional
        Has no effect.
    **options
        As in `rawattn.attention`. `num_splits` has no effect. A `score_mod` must be in the expression dialect; its captured
        arrays may be float64 too.

    Returns
    -------
    out : NumPy array, float64, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : NumPy array, float64, only with ``return_lse``: (batch, nheads_q, seqlen_q) or (nheads_q, total_q)

    Padding rows are 0, with an lse of -inf. NaN in a key or value does not reach rows that do not see it.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, for what `rawattn.attention` refuses.
    NotImplementedError
        For a `score_mod` in C++.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> q = k = v = np.ones((1, 3, 2, 4))
    >>> out, lse = rawattn.reference.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, np.exp(lse[0, 0] - 2.0).round(6).tolist()
    ((1, 3, 2, 4), [1.0, 2.0, 3.0])
    """
    given = options_of(options, ForwardOptions, "rawattn.reference.attention", attention)
    _options.backend(backend)
    check_targets({"out": out}, {"q": q, "k": k, "v": v})
    call = read(q, k, v, given)
    result, lse = _passes.forward(call)
    result = write("out", out, result, rows_of_q(call))
    return (result, lse) if _options.flag("return_lse", return_lse) else result


@checks_arguments("rawattn.reference.paged_attention")
@takes_options(ForwardOptions)
def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    validate: bool = False,
    backend: Literal["cuda", "cpu"] | None = None,
    **options: Unpack[ForwardOptions],
) -> Any:
    """Attention with the arguments and shapes of `rawattn.paged_attention`, computed in float64.

    It is `attention` on the keys and values that the block table points to, times their scales.

    Parameters
    ----------
    q : array, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        Of any framework, device and floating dtype; so are the pages and the arrays of options.
    k_pages : array, (num_pages, page_size, nheads_kv, D)
    v_pages : array, (num_pages, page_size, nheads_kv, Dv)
    block_table : array, (batch, max_pages), or a pair (indptr, page_ids)
        As in `rawattn.paged_attention`.
    seqlen_k : (batch,)
        The number of keys of each sequence.
    k_scale, v_scale : float, or array (nheads_kv,), optional
        As in `rawattn.paged_attention`.
    return_lse, out, backend
        As in `attention`.
    validate : bool
        Has no effect: lengths and the ids of the pages that are read are always checked, wherever the arrays live.
    **options
        As in `rawattn.paged_attention`; of `score_mod` and `num_splits` as in `attention`.

    Returns
    -------
    out : NumPy array, float64, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : NumPy array, float64, only with ``return_lse``: (batch, nheads_q, seqlen_q) or (nheads_q, total_q)

    Raises
    ------
    TypeError, ValueError
        Naming the argument, for what `rawattn.paged_attention` refuses.
    NotImplementedError
        For a `score_mod` in C++.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> q, pages = np.ones((1, 1, 2, 4)), np.ones((5, 2, 1, 4))
    >>> rawattn.reference.paged_attention(q, pages, pages, [[3, 0, -1]], seqlen_k=[3]).shape
    (1, 1, 2, 4)
    """
    name = "rawattn.reference.paged_attention"
    given = options_of(options, ForwardOptions, name, paged_attention)
    _options.flag("validate", validate)
    check_targets({"out": out}, {"q": q, "k_pages": k_pages, "v_pages": v_pages})
    factors = factors_of_pages({"k_scale": k_scale, "v_scale": v_scale}, k_pages, v_pages)
    q, k_pages, v_pages = (
        floats(name, x, np.dtype(np.float64))
        for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages))
    )
    indptr, ids = pages.split(block_table)
    table = integers("block_table", ids)
    layout = pages.PagedLayout(given.seqs, seqlen_k, indptr)
    refuse_traced(layout)
    layout = layout.on_the_host()
    if q.ndim not in (3, 4):
        raise ValueError(f"q: got shape {q.shape}, expected three or four axes")
    form = pages.form(layout, q.shape, k_pages.shape, v_pages.shape, table)
    check_heads(q.shape, k_pages.shape, v_pages.shape, ("k_pages", "v_pages"))
    lengths = host_lengths(layout.bind(q.shape, k_pages.shape, table.shape))
    limits = _options.window(given), _options.sink(given), _options.top_left(given)
    page_ids.check_ids(table, lengths, form, *limits)
    k, v = (
        page_ids.gather(x, table, lengths, form) * factor
        for x, factor in zip((k_pages, v_pages), factors, strict=True)
    )
    # The call is made in group mode, in which arrays of options count rows from the start of each sequence.
    starts = lengths.start_q if q.ndim == 3 else np.arange(q.shape[0]) * q.shape[1]
    packed = SeqLayout(
        seqstart_q=_ends(starts, lengths.len_q),
        seqstart_k=np.concatenate(([0], np.cumsum(lengths.len_k))),
        seqlen_q=lengths.len_q,
    )
    options["seqs"] = packed
    rows = q.reshape(-1, *q.shape[-2:])
    found, lse = attention(rows, k, v, **options, return_lse=True, backend=backend)
    found = found.reshape(*q.shape[:-1], found.shape[-1])
    if q.ndim == 4:
        lse = np.ascontiguousarray(lse.reshape(lse.shape[0], *q.shape[:2]).swapaxes(0, 1))
    found = write("out", out, found, rows_of(q.shape, zip(starts, lengths.len_q, strict=True)))
    return (found, lse) if _options.flag("return_lse", return_lse) else found


def _ends(starts: Any, lengths: Any) -> Any:
    """The starts, followed by the end of the last sequence."""
    last = starts[-1:] + lengths[-1:] if starts.size else [0]
    return np.concatenate((starts, last)).astype(np.int64)


@checks_arguments("rawattn.reference.attention_backward")
@takes_options(AttentionOptions)
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    want_dbias: bool | None = None,
    deterministic: bool = False,
    into: Gradients | None = None,
    backend: Literal["cuda", "cpu"] | None = None,
    **options: Unpack[AttentionOptions],
) -> Gradients:
    """Gradients with the arguments and shapes of `rawattn.attention_backward`, in float64.

    Parameters
    ----------
    dout : array, the shape of `out`
        Gradient with respect to `out`. This and all other arrays are of any framework, device and floating dtype.
    q, k, v : array
        As given to `attention`.
    out, lse : array
        What ``attention(..., return_lse=True)`` returned, for exact gradients. They are taken as given: if they belong to a
        larger softmax, of whose keys the keys here are a part, the gradients are those of that part.
    dlse : array, the shape of `lse`, optional
        Gradient with respect to `lse`.
    want_dbias : bool, optional
        Whether to compute the gradient of `bias`; by default whenever there is one.
    deterministic : bool
        Has no effect.
    into : Gradients, optional
        NumPy arrays of any floating dtype that the gradients are written to. Their padding rows are left untouched.
    backend : "cuda" or "cpu", optional
        Has no effect.
    **options
        Those that were given to `attention`, except `num_splits`.

    Returns
    -------
    Gradients
        NumPy float64 whatever the inputs, in the shapes of `q`, `k`, `v`, `bias` and `sink_logits`. `dbias` and
        `dsink_logits` are None without their input, `dbias` also with ``want_dbias=False``. `captured` is a dict of the
        gradients of the arrays that `score_mod` names in ``wrt``, None if there are none. Padding rows get 0.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, for what `rawattn.attention_backward` refuses.
    NotImplementedError
        For a `score_mod` in C++.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> out, lse = rawattn.reference.attention(q, k, v, return_lse=True)
    >>> gradients = rawattn.reference.attention_backward(np.ones_like(out), q, k, v, out, lse)
    >>> gradients.dv.sum().round(6).item(), gradients.dbias is None
    (40.0, True)
    """
    name = "rawattn.reference.attention_backward"
    given = options_of(options, AttentionOptions, name, attention_backward)
    _options.backend(backend)
    _options.flag("deterministic", deterministic)
    into = wanted(into, given.bias, want_dbias)
    call = read(q, k, v, given)
    has_dbias = given.bias is not None and (want_dbias is None or bool(want_dbias))
    found = _passes.backward(call, dout, out, lse, dlse, want_dbias=has_dbias)
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    return write_gradients(call, found, into, inputs)
