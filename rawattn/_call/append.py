"""A call of `append_kv` as plain values, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn._call import pages, rotary, scales
from rawattn._call.checks import check_own_elements
from rawattn._call.dtypes import DTYPE_NAMES
from rawattn._call.layout import HostLengths, Lengths
from rawattn._call.options import Options, flag
from rawattn._call.problem import MAX_HEADDIM, Dims, Problem, refuse_dtypes, resolve
from rawattn._call.rotary import RotaryForm

_AXES = {
    "k": ("(batch, seqlen_q, nheads_kv, D)", "(total_q, nheads_kv, D)"),
    "v": ("(batch, seqlen_q, nheads_kv, Dv)", "(total_q, nheads_kv, Dv)"),
    "q": ("(batch, seqlen_q, nheads_q, D)", "(total_q, nheads_q, D)"),
}


def describe(
    named: Mapping[str, Any],
    interleaved: bool,
    options: Options,
    framework: str | None,
    arrays: Mapping[str, Any],
    number_scales: tuple[str, ...] = (),
) -> tuple[Problem, Lengths]:
    """The call as a `Problem`, whose query rows are the new rows, and the lengths of its sequences.

    named: k, v, k_pages, v_pages, and q if given. arrays: block_table, and cos, sin and array scales if given.
    number_scales: the names of scales that are numbers. The options' `seqs` is a `PagedLayout`.
    """
    k, v, k_pages, v_pages = (named[name] for name in ("k", "v", "k_pages", "v_pages"))
    float8 = scales.check_pools(named, "k")
    floats = {
        name: x
        for name in ("k", "v", *(() if float8 else ("k_pages", "v_pages")), "q")
        if (x := named.get(name)) is not None
    }
    if any(x.dtype != k.dtype for x in floats.values()) or k.dtype not in DTYPE_NAMES:
        refuse_dtypes(floats, framework)
    table = arrays["block_table"]
    q = floats.get("q")
    form = check_shapes(options.seqs, k, v, q, k_pages, v_pages, table)
    for name, pool in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_written(name, pool)
    lengths = options.seqs.bind(k.shape, k_pages.shape, table.shape)
    *_, rows, nheads_kv, headdim = k.shape
    nheads_q = nheads_kv if q is None else q.shape[-2]
    dims = Dims(k.dtype, rows, lengths.k.rows, nheads_q, nheads_kv, headdim, v.shape[-1], None)
    problem = resolve(dims, lengths, options, {}, form)
    angles: RotaryForm | None = None
    if arrays.get("cos") is not None:
        angles = rotary.form(arrays["cos"], arrays["sin"], interleaved, headdim, k.dtype)
    given = {name: arrays[name] for name in scales.NAMES if name in arrays}
    found = scales.forms(given, number_scales, float8, nheads_kv)
    return replace(problem, rotary=angles, float8=float8, **found), lengths


def check_companions(q: Any, rotary: Any, interleaved: Any, out: Any) -> bool:
    """`interleaved` as a bool. TypeError for one of these arguments without the one that it needs."""
    is_interleaved = flag("interleaved", interleaved)
    if is_interleaved and rotary is None:
        raise TypeError(
            "interleaved: got True without rotary: it says which elements an embedding turns together; leave it out, or pass "
            "rotary=(cos, sin)"
        )
    if q is not None and rotary is None:
        raise TypeError(
            "q: got queries without rotary: only an embedding changes them; leave q out, or pass rotary=(cos, sin)"
        )
    if out is not None and q is None:
        raise TypeError(
            "out: got an array without q: it is for the queries; leave it out, or pass q="
        )
    return is_interleaved


def check_shapes(
    layout: Any, k: Any, v: Any, q: Any, k_pages: Any, v_pages: Any, table: Any
) -> pages.PageForm:
    """The form of the pages. ValueError for arrays whose shapes do not fit together. q may be None."""
    _check_rows(k.shape, v.shape, None if q is None else q.shape)
    form = pages.form(layout, k.shape, k_pages.shape, v_pages.shape, table)
    for name, of_rows, of_pages in (("k", k, k_pages), ("v", v, v_pages)):
        if of_pages.shape[2:] != of_rows.shape[-2:]:
            raise ValueError(
                f"{name}_pages: got shape {tuple(of_pages.shape)} = {pages.AXES[name + '_pages']}, expected heads of "
                f"{tuple(of_rows.shape[-2:])}, as {name} of shape {tuple(of_rows.shape)} has"
            )
    return form


def check_lengths(lengths: HostLengths, positions: int | None) -> None:
    """ValueError for a sequence with more new rows than keys, or with keys beyond the positions of a rotary embedding."""
    few = np.flatnonzero(lengths.len_q > lengths.len_k)
    if few.size:
        n = int(few[0])
        raise ValueError(
            f"seqlen_k: got {lengths.len_k[n]} keys for sequence {n}, expected at least {lengths.len_q[n]}, its new rows: "
            "the keys are counted with them"
        )
    if positions is None:
        return
    far = np.flatnonzero((lengths.len_k > positions) & (lengths.len_q > 0))
    if far.size:
        n = int(far[0])
        raise ValueError(
            f"rotary: got angles of {positions} positions, expected at least {lengths.len_k[n]}, the keys of sequence {n}"
        )


def _check_rows(k: tuple[int, ...], v: tuple[int, ...], q: tuple[int, ...] | None) -> None:
    if len(k) not in (3, 4):
        raise ValueError(
            f"k: got shape {tuple(k)}, expected {_AXES['k'][0]}, or {_AXES['k'][1]} with seqs"
        )
    packed = len(k) == 3
    of_k = f"as k of shape {tuple(k)} = {_AXES['k'][packed]} has"
    if tuple(v[:-1]) != tuple(k[:-1]):
        raise ValueError(
            f"v: got shape {tuple(v)}, expected {_AXES['v'][packed]} with the rows and heads {of_k}"
        )
    if q is not None:
        if len(q) != len(k) or tuple(q[:-2]) != tuple(k[:-2]) or q[-1] != k[-1]:
            raise ValueError(
                f"q: got shape {tuple(q)}, expected {_AXES['q'][packed]} with the rows and D {of_k}"
            )
        if q[-2] < 1 or k[-2] < 1 or q[-2] % k[-2]:
            raise ValueError(
                f"q: got nheads_q = {q[-2]} in shape {tuple(q)}, expected a multiple of nheads_kv = {k[-2]}, that of k"
            )
    if k[-2] < 1:
        raise ValueError(f"k: got nheads_kv = {k[-2]} in shape {tuple(k)}, expected at least 1")
    for name, shape in (("k", k), ("v", v)):
        if not 1 <= shape[-1] <= MAX_HEADDIM:
            raise ValueError(
                f"{name}: got {'D' if name == 'k' else 'Dv'} = {shape[-1]} in shape {tuple(shape)}, expected 1 to "
                f"{MAX_HEADDIM}"
            )


def _check_written(name: str, array: Any) -> None:
    """ValueError for pages that cannot be written in place."""
    itemsize = array.dtype.itemsize
    if array.shape[-1] > 1 and array.strides[-1] != itemsize and 0 not in array.shape:
        raise ValueError(
            f"{name}: got a last-axis stride of {array.strides[-1]} bytes, expected {itemsize}, one element: pages are "
            "written where they lie"
        )
    check_own_elements(array, name)
