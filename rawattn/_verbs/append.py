"""`append_kv`: writes new keys and values into the pages of a cache, and applies a rotary embedding to them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from rawattn._call import rotary as _rotary
from rawattn._call.append import check_companions, check_lengths
from rawattn._call.hints import NoOthers, hides_unknown, refuse_unknown
from rawattn._call.layout import host_lengths
from rawattn._call.options import Options, flag
from rawattn._call.pages import PagedLayout
from rawattn._call.seq_layout import SeqLayout
from rawattn._interop.arrays import HOST
from rawattn._runtime.append import append_verb
from rawattn._runtime.call_request import CallRequest
from rawattn._runtime.verbs import Verb
from rawattn._verbs import paged_fast_path
from rawattn._verbs.attention import first
from rawattn._verbs.paged import VisibilityRule, device_of, read_pages, scaled

if TYPE_CHECKING:  # type checkers have their own copy: it is no dependency
    from typing_extensions import Unpack

ArrayT = TypeVar("ArrayT")

# With this window the new rows of a sequence reach their own keys only, so the pages that are checked are those that the
# call writes.
WRITTEN = VisibilityRule((0, None), 0, False, True)


class Appending(NamedTuple):
    """A call of `append_kv` as the dispatcher takes it.

    targets: (out,) with queries, else (). values: the scales that are numbers.
    """

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


@paged_fast_path.with_fast_path(paged_fast_path.of_append_kv, written=(2, 3))  # k_pages, v_pages
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
) -> CallRequest[Any]:
    """Write the keys and values of new rows into the pages of a cache, in one launch.

    Row i of the n new rows of sequence b becomes key ``seqlen_k[b] - n + i`` of the sequence: lengths already count the new
    rows. The same `seqlen_k`, `seqs` and `block_table` then serve `paged_attention`. With `rotary`, the rotary embedding
    turns each key by its position before it is written, and turns the queries of the same rows if they are given.

    Parameters
    ----------
    k : array, (batch, seqlen_q, nheads_kv, D), or (total_q, nheads_kv, D) in group mode
        float16, bfloat16 or float32; D from 1 to 256. Only the new rows.
    v : array, (batch, seqlen_q, nheads_kv, Dv), or (total_q, nheads_kv, Dv)
        The dtype and device of k. Dv from 1 to 256, independent of D.
    k_pages : array, (num_pages, page_size, nheads_kv, D)
        Written in place, so no array of JAX, which never changes. Any strides, except that the last axis is dense, as for
        `paged_attention`; no overlap with another array of the call. The dtype of k, or float8_e4m3fn.
    v_pages : array, (num_pages, page_size, nheads_kv, Dv)
        The dtype of k_pages. Both may be views of one array, as long as no element is in both.
    block_table : array, (batch, max_pages), or a pair (indptr, page_ids)
        As in `paged_attention`. No two new rows may have the same slot (page and row in it).
    seqlen_k : (batch,)
        The number of keys of each sequence, including the new ones; int32 or int64, on the host or the device.
    q : array, optional, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D)
        The queries of the same rows, which `rotary` turns as it turns the keys. Needs `rotary`.
    seqs : SeqLayout, optional
        The numbers of new rows of the sequences, given as the lengths of q in `paged_attention`: ``seqstart_q`` for a packed
        batch, logical lengths for a padded one.
    rotary : (cos, sin), optional
        Cosines and sines of the angles of a rotary embedding, each (positions, rotary_dim / 2), float32 or the dtype of k.
        The angle of plane j (a pair of elements) at position p is usually ``p * base ** (-2 * j / rotary_dim)``. The first
        rotary_dim elements of a head turn, at most D of them; the others keep their values. Each angle is given once. Of
        arrays that hold each angle twice, as those of transformers do, pass half of the columns:
        ``cos[:, : rotary_dim // 2]``, or ``cos[:, ::2]`` with `interleaved`. Any strides; an array whose last axis is not
        dense is copied.
    interleaved : bool
        Whether plane j consists of the neighbours 2j and 2j + 1 (GPT-J). Otherwise it consists of elements j and
        j + rotary_dim / 2 (GPT-NeoX, Llama).
    k_scale, v_scale : float, or array (nheads_kv,), optional
        As in `paged_attention`. Rows are divided by them before they are rounded to float8_e4m3fn. Quotients beyond +-448,
        the largest finite number, become +-448; NaN stays NaN.
    out : array, optional
        Array that the turned queries are written to, as in `attention`; it is returned.
    validate : bool
        Also check integers that are on the device, which waits for the device. Integers are always checked where all of them
        are on the host, or the call runs on the CPU.
    backend : "cuda" or "cpu", optional
        Default: where the arrays are. On NumPy arrays the call runs on the CPU, since a GPU would need a copy of all pages at
        each call.

    Returns
    -------
    array or None
        The turned queries, in q's framework, shape and dtype; None without `q`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is written. ValueError for a sequence with
        more new rows than keys, for a length beyond what the pages hold or beyond the positions of `rotary`, for a page id
        out of range, and for two new rows in one slot. These are checked where all lengths and ids are on the host or the
        call runs on the CPU, else only with `validate`. Unchecked, a row without a slot in the pages is not written, one of
        two rows in the same slot stays, and a position without an angle takes the nearest angle.
    NotImplementedError
        For pages of 8 bits that are not float8_e4m3fn, and where `seqs` has positions.
    ImportError
        For arrays on a GPU where CuPy, which loads the kernels, is not installed.
    RuntimeError
        For ``backend="cuda"`` where there is no usable GPU, and for a torch tensor that requires a gradient, which would be
        lost: pass ``x.detach()``.

    Notes
    -----
    Angles and scales are applied in float32, and each result is rounded once, to nearest. Rotary embedding: Su et al. 2021,
    arXiv:2104.09864.

    Examples
    --------
    One new token for each of two sequences, which had 4 and 2 keys before, in pages of 2 keys:

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
    return CallRequest(*call[:4], False, backend, call.values, first if call.targets else _nothing)


def _nothing(results: Sequence[Any]) -> None:
    """The return value of a call without queries: None."""


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
    """The call with its integers read, and checked where they are on the host or `validate` asks for it."""
    interleaved = check_companions(q, rotary, interleaved, out)
    if rotary is not None:
        rotary = _rotary.split(rotary)
    # A call on the CPU needs its integers on the host anyway, so checking them costs no further synchronisation.
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
    """ValueError for a sequence with more new rows than keys, or with keys beyond the last position of `cos`."""
    shapes = [tuple(getattr(x, "shape", ())) for x in (k, k_pages, table)]
    # Other ranks are refused by the call itself.
    if len(shapes[0]) in (3, 4) and len(shapes[1]) == 4 and shapes[2]:
        lengths = host_lengths(layout.on_the_host().bind(*shapes))
        angles = tuple(getattr(cos, "shape", ()))
        check_lengths(lengths, angles[0] if len(angles) == 2 else None)
