"""Attention in float64 NumPy: the specification of every option, forward and backward.

Nothing here is fast. `_scores.blocks` lists the (sequence, query head) pairs of a call,
`_scores.scores` gives the scores of one of them and which keys each row sees, and the forward and
the backward, in `_passes`, are the textbook formulas on top. All kernels are tested against these
functions, and users may test theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn._call import options as _options
from rawattn._call import pages
from rawattn._call.gradients import Gradients, wanted
from rawattn._call.layout import host_lengths
from rawattn._call.options import Options
from rawattn._call.places import says_places
from rawattn._call.seq_layout import SeqLayout, refuse_traced
from rawattn._scores.score_mod import ScoreMod
from rawattn.reference import _passes
from rawattn.reference._append import append_kv as append_kv
from rawattn.reference._call import factors_of_pages, floats, integers, read
from rawattn.reference._combine import combine as combine
from rawattn.reference._targets import rows_of, rows_of_q, write, write_gradients


@says_places("rawattn.reference.attention")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    seqs: Any = None,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    sink: int = 0,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sink_logits: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Attention with the arguments and shapes of `rawattn.attention`, computed in float64.

    Arrays of any framework, device and floating dtype are accepted, float64 too. The results are
    NumPy float64 whatever the inputs: `out` (batch, seqlen_q, nheads_q, headdim_v) or, in group
    mode, (total_q, nheads_q, headdim_v), and `lse` (batch, nheads_q, seqlen_q) or (nheads_q,
    total_q). Padding rows are 0, with an `lse` of -inf. A row that does not see a key is not
    touched by NaN in it. `num_splits` and `backend` change nothing here; a `score_mod` is one in the expression dialect,
    whose captured arrays may be float64 too. `out` is a NumPy array of any floating dtype, whose padding rows are left
    untouched.

    Raises TypeError or ValueError, naming the argument, for what `rawattn.attention` refuses.

    >>> import numpy as np
    >>> q = k = v = np.ones((1, 3, 2, 4))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, np.exp(lse[0, 0] - 2.0).round(6).tolist()
    ((1, 3, 2, 4), [1.0, 2.0, 3.0])
    """
    options = Options(
        seqs, causal, align, window, sink, scale, bias, mask, alibi_slopes, softcap, score_mod, sink_logits,
        dropout_p, seed, num_splits,
    )  # fmt: skip
    _options.backend(backend)
    call = read(q, k, v, options)
    result, lse = _passes.forward(call)
    result = write("out", out, result, rows_of_q(call))
    return (result, lse) if _options.flag("return_lse", return_lse) else result


@says_places("rawattn.reference.paged_attention")
def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    seqs: Any = None,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    sink: int = 0,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sink_logits: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    validate: bool = False,
    backend: str | None = None,
) -> Any:
    """Attention with the arguments and shapes of `rawattn.paged_attention`, computed in float64.

    It is `attention` on the keys and values that the table leads to, times their scales. Lengths and the ids of the pages that
    are read are checked with and without `validate`, wherever the arrays live. `out` and `backend` are as of `attention`.

    Raises TypeError or ValueError, naming the argument, for what `rawattn.paged_attention` refuses.

    >>> import numpy as np
    >>> pages = np.ones((5, 2, 1, 4))
    >>> paged_attention(np.ones((1, 1, 2, 4)), pages, pages, [[3, 0, -1]], seqlen_k=[3]).shape
    (1, 1, 2, 4)
    """
    _options.flag("validate", validate)
    factors = factors_of_pages({"k_scale": k_scale, "v_scale": v_scale}, k_pages, v_pages)
    q, k_pages, v_pages = (
        floats(name, x, np.dtype(np.float64))
        for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages))
    )
    indptr, ids = pages.split(block_table)
    table = integers("block_table", ids)
    layout = pages.PagedLayout(seqs, seqlen_k, indptr)
    refuse_traced(layout)
    layout = layout.on_the_host()
    form = pages.form(layout, q.shape, k_pages.shape, v_pages.shape, table)
    if q.ndim not in (3, 4):
        raise ValueError(f"q: got shape {q.shape}, expected three or four axes")
    lengths = host_lengths(layout.bind(q.shape, k_pages.shape, table.shape))
    options = Options(causal=causal, align=align, window=window, sink=sink)
    limits = _options.window(options), _options.sink(options), _options.top_left(options)
    pages.check_ids(table, lengths, form, *limits)
    k, v = (
        pages.gather(x, table, lengths, form) * factor
        for x, factor in zip((k_pages, v_pages), factors, strict=True)
    )
    # In group mode sequences have places of their own, and arrays of options count from there.
    starts = lengths.start_q if q.ndim == 3 else np.arange(q.shape[0]) * q.shape[1]
    packed = SeqLayout(
        seqstart_q=_ends(starts, lengths.len_q),
        seqstart_k=np.concatenate(([0], np.cumsum(lengths.len_k))),
        seqlen_q=lengths.len_q,
    )
    found, lse = attention(
        q.reshape(-1, *q.shape[-2:]), k, v, seqs=packed, causal=causal, align=align, window=window, sink=sink,
        scale=scale, bias=bias, mask=mask, alibi_slopes=alibi_slopes, softcap=softcap, score_mod=score_mod,
        sink_logits=sink_logits, dropout_p=dropout_p, seed=seed, num_splits=num_splits, return_lse=True,
        backend=backend,
    )  # fmt: skip
    found = found.reshape(*q.shape[:-1], found.shape[-1])
    if q.ndim == 4:
        lse = np.ascontiguousarray(lse.reshape(lse.shape[0], *q.shape[:2]).swapaxes(0, 1))
    found = write("out", out, found, rows_of(q.shape, zip(starts, lengths.len_q, strict=True)))
    return (found, lse) if _options.flag("return_lse", return_lse) else found


def _ends(starts: Any, lengths: Any) -> Any:
    """The starts, and behind them where the last sequence ends."""
    last = starts[-1:] + lengths[-1:] if starts.size else [0]
    return np.concatenate((starts, last)).astype(np.int64)


@says_places("rawattn.reference.attention_backward")
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    seqs: Any = None,
    causal: bool = False,
    align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    sink: int = 0,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sink_logits: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    dlse: Any = None,
    want_dbias: bool | None = None,
    deterministic: bool = False,
    into: Gradients | None = None,
    backend: str | None = None,
) -> Gradients:
    """Gradients with the arguments and shapes of `rawattn.attention_backward`, in float64.

    `out` and `lse` are taken as given (those of `attention` for exact gradients): with the `lse`
    and `out` of a larger softmax, of which the keys here are one part, the gradients are that
    part's. The results are NumPy float64 whatever the inputs, in the shapes of `q`, `k`, `v`,
    `bias` and `sink_logits`; `dbias` and `dsink_logits` are None without their input, `dbias` also
    with `want_dbias=False`. `captured` is a dict of the gradients of the arrays that `score_mod`
    has in `wrt`, None without any. Rows of padding get 0. `deterministic` and `backend` change nothing here. `into` holds
    NumPy arrays of any floating dtype, in which rows of padding are left untouched.

    Raises TypeError or ValueError, naming the argument, for what `rawattn.attention_backward`
    refuses.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> gradients = attention_backward(np.ones_like(out), q, k, v, out, lse)
    >>> gradients.dv.sum().round(6).item(), gradients.dbias is None
    (40.0, True)
    """
    options = Options(
        seqs, causal, align, window, sink, scale, bias, mask, alibi_slopes, softcap, score_mod, sink_logits,
        dropout_p, seed,
    )  # fmt: skip
    _options.backend(backend)
    _options.flag("deterministic", deterministic)
    into = wanted(into, bias, want_dbias)
    call = read(q, k, v, options)
    has_dbias = bias is not None and (want_dbias is None or bool(want_dbias))
    found = _passes.backward(call, dout, out, lse, dlse, want_dbias=has_dbias)
    return write_gradients(call, found, into)
