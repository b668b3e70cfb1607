"""Binds a layout to the arrays of a call: where the sequences then are, or an error where it does not fit."""

from __future__ import annotations

import functools
from typing import Any

from rawattn._call.given import ARRAYS
from rawattn._call.hints import layout_advice
from rawattn._call.layout import Lengths, side_of
from rawattn._call.seq_layout import SeqLayout
from rawattn._eviction import evict_if_full
from rawattn._interop.xla import is_traced

_MAX_BINDINGS = 16  # entries of `SeqLayout._bindings`

# The heads axis of the array to which a layout's lengths of q apply: q, or the new keys k of `append_kv`.
_HEADS = {"q": "nheads_q", "k": "nheads_kv"}


def bind(seqs: SeqLayout | None, *, batch: int | None, rows_q: int, rows_k: int) -> Lengths:
    """The sequences of a call on arrays with so many rows. `batch` is None in group mode.

    Never synchronises with a GPU. The result is kept: the same layout and shapes give the same object.

    Raises TypeError if `seqs` is not a SeqLayout, ValueError if it does not fit the arrays.
    """
    if seqs is None:
        if batch is None:
            raise not_packed("None")
        return _dense(batch, rows_q, rows_k)
    if not isinstance(seqs, SeqLayout):
        raise TypeError(
            f"seqs: got {type(seqs).__name__}, expected a SeqLayout or None{layout_advice(seqs)}"
        )
    bindings, key = seqs._bindings, (batch, rows_q, rows_k)
    lengths = bindings.get(key)
    if lengths is None:
        lengths = _bind(seqs, batch, rows_q, rows_k)
        if bindings:
            evict_if_full(bindings, _MAX_BINDINGS)
        bindings[key] = lengths
    return lengths


def _bind(seqs: SeqLayout, batch: int | None, rows_q: int, rows_k: int) -> Lengths:
    count = batch
    if batch is None:
        if not seqs.packed:
            raise not_packed("a SeqLayout without seqstart_q")
        count = seqs.batch
    elif seqs.packed:
        raise packed_for_batch()
    else:
        check_batch(seqs, batch)
    assert count is not None
    of_q, of_k = seqs._sides
    q = side_of(of_q, count, rows_q)
    if rows_q != rows_k and (of_k.inherited or (of_k is of_q and seqs.packed)):
        raise ValueError(
            f"seqstart_k: got None, by default seqstart_q, but q has {rows_q} rows and k has {rows_k}; "
            "pass seqstart_k, where the sequences of k start"
        )
    same = of_k is of_q or (seqs._same_starts and rows_q == rows_k)
    k = q if same else side_of(of_k, count, rows_k)
    return Lengths(count, seqs.packed, q, k, of_q.all_on_host and of_k.all_on_host)


@functools.lru_cache(maxsize=256)
def _dense(batch: int, rows_q: int, rows_k: int) -> Lengths:
    return _bind(SeqLayout(), batch, rows_q, rows_k)


def refuse_traced(seqs: Any) -> None:
    """TypeError for JAX tracers among the integers of a layout, since they have no values for a call that is launched now.

    seqs: a `SeqLayout` or `PagedLayout`; anything else passes.
    """
    for name in ARRAYS:
        if is_traced(getattr(seqs, name, None)):
            raise TypeError(
                f"{name}: got a JAX tracer, which holds no values; accepted are arrays and lists of int: traced lengths are "
                "for rawattn.jax.attention, inside jit, grad, vmap and scan"
            )


def check_batch(seqs: SeqLayout, batch: int, rows: str = "q") -> None:
    """ValueError if the layout's number of sequences is not `batch`, that of the array named `rows`."""
    if seqs.batch is not None and batch != seqs.batch:
        raise ValueError(
            f"seqs: got lengths of {seqs.batch} sequences, expected {batch}, the batch of {rows}"
        )


def packed_for_batch(rows: str = "q") -> ValueError:
    """The error for starts in the layout where the array named `rows` has a batch axis."""
    heads = _HEADS[rows]
    return ValueError(
        f"seqs: got seqstart_q, which is for a packed {rows} (total_q, {heads}, D), but {rows} has four "
        f"axes (batch, seqlen_q, {heads}, D); expected lengths alone: seqlen_* or cu_seqlen_*"
    )


def not_packed(got: str, rows: str = "q") -> ValueError:
    """The error for a layout without starts where the array named `rows` is packed."""
    heads = _HEADS[rows]
    return ValueError(
        f"seqs: got {got}, but {rows} of three axes (total_q, {heads}, D) is a packed batch; expected "
        f"SeqLayout(seqstart_q=...), where cumulative lengths serve if there are no gaps; or give {rows} "
        f"four axes (batch, seqlen_q, {heads}, D)"
    )
