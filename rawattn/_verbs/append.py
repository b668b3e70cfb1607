"""`append_kv`: new keys and values into the pages of a cache, with a rotary embedding on the way."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from rawattn._call import rotary as _rotary
from rawattn._call.append import check_lengths
from rawattn._call.hints import NoOthers, hides_unknown, refuse_unknown
from rawattn._call.layout import host_lengths
from rawattn._call.options import Options, flag
from rawattn._call.pages import PagedLayout
from rawattn._call.seq_layout import SeqLayout
from rawattn._interop.arrays import HOST
from rawattn._runtime.append import append_verb
from rawattn._runtime.asked import Asked
from rawattn._runtime.verbs import Verb
from rawattn._verbs import page_repeats
from rawattn._verbs.attention import first
from rawattn._verbs.paged import Limits, device_of, read_pages, scaled

if TYPE_CHECKING:  # type checkers bring it: nothing is installed for it
    from typing_extensions import Unpack

ArrayT = TypeVar("ArrayT")

# The pages that are written: those of the new rows' own keys.
WRITTEN = Limits((0, None), 0, False, True)


class Appending(NamedTuple):
    """A call of `append_kv` for the dispatcher."""

    verb: Verb
    inputs: Sequence[Any]
    targets: tuple[Any, ...]
    options: Options
    values: tuple[int, ...]


@overload
def append_kv(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    q: None = None,
    seqs: SeqLayout | None = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    out: None = None,
    validate: bool = False,
    backend: Literal["cuda", "cpu"] | None = None,
) -> None: ...


@overload
def append_kv(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    q: ArrayT,
    seqs: SeqLayout | None = None,
    rotary: tuple[Any, Any],
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    validate: bool = False,
    backend: Literal["cuda", "cpu"] | None = None,
) -> ArrayT: ...


@page_repeats.repeating(page_repeats.of_append_kv, written=(2, 3))  # k_pages, v_pages
@hides_unknown
def append_kv(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    q: Any = None,
    seqs: SeqLayout | None = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    validate: bool = False,
    backend: Literal["cuda", "cpu"] | None = None,
    **unknown: Unpack[NoOthers],
) -> Asked[Any]:
    """Write the keys and values of new rows into the pages of a cache, in one launch.

    Row i of the n new rows of sequence b is its key ``seqlen_k[b] - n + i``: lengths count the new rows already. The same
    `seqlen_k`, `seqs` and `block_table` then serve `paged_attention`. With `rotary`, keys turn by their positions on the
    way, and so do the queries of the same rows, where they are given.

    Parameters
    ----------
    k : array, (batch, seqlen_q, nheads_kv, D), or (total_q, nheads_kv, D) in group mode
        float16, bfloat16 or float32; D from 1 to 256. The new rows alone.
    v : array, (batch, seqlen_q, nheads_kv, Dv), or (total_q, nheads_kv, Dv)
        The dtype and device of k. Dv from 1 to 256, free of D.
    k_pages : array, (num_pages, page_size, nheads_kv, D)
        Written where it lies, as `paged_attention` reads it: any strides but for a dense last axis, and no overlap with
        another array of the call. The dtype of k, or float8_e4m3fn.
    v_pages : array, (num_pages, page_size, nheads_kv, Dv)
        The dtype of k_pages. Both may lie side by side in one array, as long as no element is in both.
    block_table : array, (batch, max_pages), or a pair (indptr, page_ids)
        As of `paged_attention`. No two new rows may be in the same slot.
    seqlen_k : (batch,)
        The keys of each sequence, the new ones among them; int32 or int64, on the host or the device.
    q : array, optional, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D)
        The queries of the same rows, to turn like the keys: for calls with `rotary`.
    seqs : SeqLayout, optional
        The lengths of the new rows, as the lengths of q in `paged_attention`: ``seqstart_q`` for a packed batch, logical
        lengths for a padded one.
    rotary : (cos, sin), optional
        Cosines and sines of the angles of a rotary embedding, each (positions, rotary_dim / 2), float32 or the dtype of k:
        of plane j at position p the angle is usually ``p * base ** (-2 * j / rotary_dim)``. The first rotary_dim
        elements of a head turn, at most D of them; the others stay. Each angle is there once, so half of the columns are
        passed of arrays that have each twice, as those of transformers: ``cos[:, : rotary_dim // 2]``, or ``cos[:, ::2]`` of
        those for `interleaved`. Any strides; a last axis that is not dense is copied.
    interleaved : bool
        Whether plane j is of the neighbours 2j and 2j + 1 (GPT-J). Otherwise it is of j and j + rotary_dim / 2, one of
        either half (GPT-NeoX, Llama).
    k_scale, v_scale : float, or array (nheads_kv,), optional
        As of `paged_attention`: rows on their way into float8_e4m3fn pages are divided by them. What is beyond 448 then
        becomes 448, and NaN stays NaN.
    out : array, optional
        For the queries: written and returned, as of `attention`.
    validate : bool
        Check integers that are on the device too. It waits for the device. Where all are on the host, and where the call
        runs on the CPU, they always are.
    backend : "cuda" or "cpu", optional
        Default: where the arrays are. NumPy's pages stay on the host, since each call would move all of them.

    Returns
    -------
    array or None
        The queries turned, of q's framework, shape and dtype; None without `q`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is written. ValueError for more new rows
        than keys, for a length that is more than the pages hold or beyond the positions of `rotary`, for an id that is no
        page's, and for two new rows in one slot: where all lengths and ids are on the host or the call runs on the CPU, else
        with `validate`. Without it a row without a slot in the pages is not written, of two in one slot either may stay,
        and a position that has no angle takes the nearest one's.
    RuntimeError
        For ``backend="cuda"`` where there is no usable GPU, and for a torch tensor that requires a gradient, which would be
        lost: pass ``x.detach()``.

    Notes
    -----
    Angles and scales are applied in float32, and results rounded once, to the nearest. Rotary embedding: Su et al. 2021,
    arXiv:2104.09864.

    Examples
    --------
    One new token of two sequences, which had 4 and 2 before, in pages of 2:

    >>> import numpy as np, rawattn
    >>> rng = np.random.default_rng(0)
    >>> k_pages, v_pages = (np.zeros((6, 2, 4, 16), np.float32) for _ in range(2))
    >>> k, v, q = (rng.standard_normal((2, 1, 4, 16), dtype=np.float32) for _ in range(3))
    >>> table = np.array([[5, 0, 3], [1, 2, -1]], np.int32)
    >>> lengths = np.array([5, 3], np.int32)
    >>> angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    >>> rotary = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    >>> turned = rawattn.append_kv(k, v, k_pages, v_pages, table, seqlen_k=lengths, q=q, rotary=rotary)
    >>> bool((v_pages[3, 0] == v[0, 0]).all() and (v_pages[2, 0] == v[1, 0]).all())
    True
    >>> rawattn.paged_attention(turned, k_pages, v_pages, table, seqlen_k=lengths, causal=True).shape
    (2, 1, 4, 16)
    """
    if unknown:
        refuse_unknown("rawattn.append_kv", unknown, inspect.signature(append_kv).parameters)
    call = read_append(
        k,
        v,
        k_pages,
        v_pages,
        block_table,
        seqlen_k,
        q,
        seqs,
        rotary,
        interleaved,
        k_scale,
        v_scale,
        out,
        validate,
        backend,
    )
    return Asked(*call[:4], False, backend, call.values, first if call.targets else _nothing)


def _nothing(results: Sequence[Any]) -> None:
    """What a call without queries gives back."""


def read_append(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seqlen_k: Any,
    q: Any,
    seqs: Any,
    rotary: Any,
    interleaved: Any,
    k_scale: Any,
    v_scale: Any,
    out: Any,
    validate: Any,
    backend: Any,
) -> Appending:
    """The call with its integers read, and those on the host checked."""
    interleaved = flag("interleaved", interleaved)
    if interleaved and rotary is None:
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
    if rotary is not None:
        rotary = _rotary.split(rotary)
    # The host reads a call on the CPU in any case, so checking its integers waits for nothing more.
    on_cpu = backend == "cpu" or (backend is None and device_of(k) == HOST)
    validate = flag("validate", validate) or on_cpu
    named = {"k": k, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table}
    named |= {"seqlen_k": seqlen_k, "validate": validate}
    table, options = read_pages(named, Options(seqs=seqs), ("k", "k_pages", "v_pages"), WRITTEN)
    layout = options.seqs
    if validate or layout.on_host:
        check_rows(k, k_pages, table, layout, None if rotary is None else rotary[0])
    verb, factors, numbers = scaled(
        append_verb(rotary is not None, interleaved, q is not None),
        k,
        {"k_scale": k_scale, "v_scale": v_scale},
    )
    queries = () if q is None else (q,)
    inputs = (k, v, k_pages, v_pages, *queries, table, *(rotary or ()), *factors)
    return Appending(verb, inputs, () if q is None else (out,), options, numbers)


def check_rows(k: Any, k_pages: Any, table: Any, layout: PagedLayout, cos: Any) -> None:
    """ValueError for new rows that are no keys of their sequence, or that have no angle."""
    shapes = [tuple(getattr(x, "shape", ())) for x in (k, k_pages, table)]
    if len(shapes[0]) in (3, 4) and len(shapes[1]) == 4 and shapes[2]:  # else the call tells
        lengths = host_lengths(layout.on_the_host().bind(*shapes))
        angles = tuple(getattr(cos, "shape", ()))
        check_lengths(lengths, angles[0] if len(angles) == 2 else None)
