"""The specification of `append_kv`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from rawattn._call import options as _options
from rawattn._call import page_ids, pages, scales
from rawattn._call.append import check_companions, check_lengths, check_shapes
from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.binding import refuse_traced
from rawattn._call.layout import host_lengths
from rawattn._call.rotary import form as rotary_form
from rawattn._call.rotary import split
from rawattn.reference._call import Array, factors_of_pages, floats, host, integers
from rawattn.reference._targets import check_targets, rows_of, write

_FLOAT64 = np.dtype(np.float64)


@checks_arguments("rawattn.reference.append_kv")
def append_kv(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    q: Any = None,
    seqs: Any = None,
    rotary: Any = None,
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    validate: bool = False,
    backend: Literal["cuda", "cpu"] | None = None,
) -> tuple[Array, Array, Array | None]:
    """`rawattn.append_kv` in float64, on copies of the pages.

    Parameters
    ----------
    k : array, (batch, seqlen_q, nheads_kv, D), or (total_q, nheads_kv, D) in group mode
        Of any framework, device and floating dtype; so are the other arrays of numbers.
    v : array, (batch, seqlen_q, nheads_kv, Dv), or (total_q, nheads_kv, Dv)
    k_pages : array, (num_pages, page_size, nheads_kv, D)
        Not written, unlike in `rawattn.append_kv`.
    v_pages : array, (num_pages, page_size, nheads_kv, Dv)
    block_table : array, (batch, max_pages), or a pair (indptr, page_ids)
    seqlen_k : (batch,)
        The number of keys of each sequence, including the new ones.
    q : array, optional, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D)
        Needs `rotary`.
    seqs, rotary, interleaved
        As in `rawattn.append_kv`.
    k_scale, v_scale : float, or array (nheads_kv,), optional
        New rows of float8_e4m3fn pages are divided by them and clamped to 448 in magnitude, but not rounded.
    out : NumPy array of any floating dtype, optional
        Array that the turned queries are written to; it is returned as `q`. Its padding rows are left untouched. Needs `q`.
    validate : bool
        Has no effect: lengths and page ids are always checked.
    backend : "cuda" or "cpu", optional
        Has no effect.

    Returns
    -------
    k_pages : NumPy array, float64, (num_pages, page_size, nheads_kv, D)
    v_pages : NumPy array, float64, (num_pages, page_size, nheads_kv, Dv)
    q : NumPy array, float64, or None
        The queries with their rotary embedding, 0 in padding rows; None without `q`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, for arrays, lengths and ids that `rawattn.append_kv` refuses.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> pages, row = np.zeros((2, 2, 1, 2)), np.ones((1, 1, 1, 2))
    >>> quarter = np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])  # a quarter of a turn a position
    >>> given = {"seqlen_k": [2], "rotary": quarter}
    >>> k_pages, _, _ = rawattn.reference.append_kv(row, row, pages, pages, [[1]], **given)
    >>> k_pages[1, :, 0].tolist()
    [[0.0, 0.0], [-1.0, 1.0]]
    """
    _options.flag("validate", validate)
    _options.backend(backend)
    interleaved = check_companions(q, rotary, interleaved, out)
    inputs = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "q": q}
    check_targets({"out": out}, inputs)
    factors = factors_of_pages({"k_scale": k_scale, "v_scale": v_scale}, k_pages, v_pages)
    most = scales.LARGEST if host("k_pages", k_pages).dtype == scales.FLOAT8 else np.inf
    k, v, k_pages, v_pages = (
        floats(name, x, _FLOAT64)
        for name, x in (("k", k), ("v", v), ("k_pages", k_pages), ("v_pages", v_pages))
    )
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    rotated = None
    if q is not None:
        q = floats("q", q, _FLOAT64)
        rotated = np.zeros(q.shape)
    angles = None
    if rotary is not None:
        names = ("rotary[0]", "rotary[1]")
        angles = [floats(n, x, _FLOAT64) for n, x in zip(names, split(rotary), strict=True)]
    indptr, ids = pages.split(block_table)
    table = integers("block_table", ids)
    layout = pages.PagedLayout(seqs, seqlen_k, indptr, "k")
    refuse_traced(layout)
    layout = layout.on_the_host()
    form = check_shapes(layout, k, v, q, k_pages, v_pages, table)
    lengths = host_lengths(layout.bind(k.shape, k_pages.shape, table.shape))
    positions = None
    if angles is not None:
        cos, sin = angles
        positions = rotary_form(cos, sin, interleaved, k.shape[-1], _FLOAT64).positions
    check_lengths(lengths, positions)
    page_ids.check_ids(table, lengths, form, window=(0, None), sink=0, top_left=False)
    page_ids.check_slots(table, lengths, form)
    for n, (start, count, keys) in enumerate(
        zip(lengths.start_q.tolist(), lengths.len_q.tolist(), lengths.len_k.tolist(), strict=True)
    ):
        of_pages = page_ids.ids_of(table, lengths, form, n)
        for i in range(count):
            row = start + i if k.ndim == 3 else (n, i)
            position = keys - count + i
            page, at = divmod(position, form.page_size)
            new = _with_rotary(k[row], position, angles, interleaved), v[row]
            for array, rows, factor in zip((k_pages, v_pages), new, factors, strict=True):
                array[of_pages[page], at] = np.clip(rows / factor, -most, most)
            if rotated is not None:
                rotated[row] = _with_rotary(q[row], position, angles, interleaved)
    if rotated is not None:
        starts = lengths.start_q if k.ndim == 3 else np.arange(k.shape[0]) * k.shape[1]
        rows = rows_of(q.shape, zip(starts, lengths.len_q, strict=True))
        rotated = write("out", out, rotated, rows)
    return k_pages, v_pages, rotated


def _with_rotary(row: Array, position: int, angles: list[Array] | None, interleaved: bool) -> Array:
    """A row (heads, D) with its rotary embedding: each pair of elements is a complex number, multiplied by e^(i angle)."""
    if angles is None:
        return row
    cos, sin = (x[position] for x in angles)
    planes = cos.size
    pairs = row[:, : 2 * planes]
    pairs = (
        pairs.reshape(-1, planes, 2) if interleaved else pairs.reshape(-1, 2, planes).swapaxes(1, 2)
    )
    numbers = (pairs[..., 0] + 1j * pairs[..., 1]) * (cos + 1j * sin)
    parts = np.stack((numbers.real, numbers.imag), axis=-1 if interleaved else 1)
    return np.concatenate((parts.reshape(len(row), -1), row[:, 2 * planes :]), axis=1)
