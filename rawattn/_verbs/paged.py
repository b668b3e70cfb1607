"""`paged_attention`: attention to keys and values in the pages of a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

import numpy as np

from rawattn._call import options as _options
from rawattn._call import page_ids, pages, scales
from rawattn._call.binding import refuse_traced
from rawattn._call.layout import host_lengths
from rawattn._call.options import ForwardOptions, Options, flag
from rawattn._call.signatures import options_of, takes_options
from rawattn._interop import arrays
from rawattn._interop.arrays import HOST
from rawattn._interop.integers import import_integers
from rawattn._runtime.call_request import CallRequest
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import PAGED, Verb, with_scales
from rawattn._verbs import paged_fast_path
from rawattn._verbs.attention import CallOptions, first

if TYPE_CHECKING:  # type checkers have their own copy: it is no dependency
    from typing_extensions import Unpack

ArrayT = TypeVar("ArrayT")


class VisibilityRule(NamedTuple):
    """Which keys a row may see, by the options of `attention` of these names.

    written: whether the rows are new keys of `append_kv`, each of which needs its own slot.
    """

    window: tuple[int | None, int | None]
    sink: int
    top_left: bool
    written: bool = False


class PagedOptions(CallOptions, total=False):
    k_scale: Any
    v_scale: Any
    validate: bool


@overload
def paged_attention(
    q: ArrayT,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    return_lse: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> ArrayT: ...


@overload
def paged_attention(
    q: ArrayT,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[ArrayT, Any]: ...


@overload
def paged_attention(
    q: ArrayT,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    *,
    seqlen_k: Any,
    return_lse: bool,
    **options: Unpack[PagedOptions],
) -> ArrayT | tuple[ArrayT, Any]: ...


@paged_fast_path.with_fast_path(paged_fast_path.of_paged_attention)
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
) -> CallRequest[Any]:
    """Attention to keys and values that are stored in the pages of a cache.

    Key j of sequence b is row ``j % page_size`` of page ``block_table[b, j // page_size]``. Everything else, including
    every option that is not described here, is as in `attention`.

    Parameters
    ----------
    q : array, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        float16, bfloat16 or float32; D from 1 to 256. The newest rows of each sequence: one for a decoding step, several
        for speculative decoding or a chunk of a prompt. The keys of these rows are already in the pages.
    k_pages : array, (num_pages, page_size, nheads_kv, D)
        The dtype of q, or float8_e4m3fn with any dtype of q. The device of q; page_size from 1 to 1024. Any strides, except
        that the last axis is dense: a cache of shape (num_pages, nheads_kv, page_size, D) is passed as a view with its two
        middle axes swapped, without a copy.
    v_pages : array, (num_pages, page_size, nheads_kv, Dv)
        The dtype of k_pages. Dv from 1 to 256, independent of D.
    block_table : array, (batch, max_pages), or a pair (indptr, page_ids)
        int32 or int64, any strides, on the device of q or on the host. A NumPy array or a list is copied to the device of q
        at each call. In a pair, the pages of sequence b are ``page_ids[indptr[b]:indptr[b + 1]]``; indptr is (batch + 1,).
        Sequences may share pages. Entries behind the last page of a sequence may hold anything, and so may entries of pages
        that the window hides from all rows of the sequence.
    seqlen_k : (batch,)
        The number of keys of each sequence, int32 or int64, on the host or the device. On the device they are read by the
        kernels at every call, so they may grow in place.
    seqs : SeqLayout, optional
        The lengths of q only: ``seqstart_q`` for a packed batch (group mode), logical lengths for a padded one.
        ``max_seqlen_k`` may be given, and is not needed.
    **options
        As in `attention`. The last two axes of `bias` and `mask` count positions inside each sequence, and are 1 or at
        least as long as the longest sequence.
    k_scale, v_scale : float, or array (nheads_kv,), optional
        Factors of float8_e4m3fn pages: the keys of kv head h are ``k_scale[h]`` times what k_pages hold, and the values
        likewise. A finite number above 0, or a float32 array of such numbers, on the device of q or on the host. An array
        on the host is copied at each call. An array on the device is read by the kernels at every call, and is not checked.
        Default: 1.
    return_lse : bool
        Also return the natural logarithm of the sum of exponentials of each row's scores, float32.
    out : array, optional
        Array that the result is written to, as in `attention`; it is returned.
    validate : bool
        Also check integers that are on the device: lengths, and the ids of all pages that are read. This waits for the
        device. Where all integers are on the host they are always checked.
    backend : "cuda" or "cpu", optional
        Default: the GPU where there is one, for NumPy arrays too; else the CPU.

    Returns
    -------
    out : array of q's framework, on q's device, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : array, only with ``return_lse``: (batch, nheads_q, seqlen_q) or (nheads_q, total_q)

    The contents of unused rows of a last page, and of pages that no sequence uses, never affect a result, NaN included.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is launched. ValueError for a length beyond
        what the pages hold, and for a page id out of range: always where all lengths and ids are on the host, else only with
        `validate`. Unchecked, kernels cut such a length and clamp such an id to an existing page, so nothing is read outside
        of the arrays.
    NotImplementedError
        For pages of 8 bits that are not float8_e4m3fn, where `seqs` has positions, and on the CPU for a `score_mod` in C++.
    ImportError
        For arrays on a GPU where CuPy, which loads the kernels, is not installed.
    RuntimeError
        For ``backend="cuda"`` where there is no usable GPU, and for a torch tensor that requires a gradient, which would be
        lost: pass ``x.detach()``.

    Notes
    -----
    float8_e4m3fn is the dtype of `ml_dtypes` in NumPy and CuPy, torch.float8_e4m3fn, or jax.numpy.float8_e4m3fn. In NumPy
    and CuPy ``bytes.view(ml_dtypes.float8_e4m3fn)`` views an array of uint8 as this dtype, without a copy.

    Examples
    --------
    Two sequences of 5 and 3 keys, in pages of 2 keys, and one new row for each:

    >>> import numpy as np, rawattn
    >>> rng = np.random.default_rng(0)
    >>> k_pages, v_pages = (rng.standard_normal((6, 2, 4, 16), dtype=np.float32) for _ in range(2))
    >>> q = rng.standard_normal((2, 1, 8, 16), dtype=np.float32)
    >>> table = np.array([[5, 0, 3], [1, 2, -1]], np.int32)
    >>> out = rawattn.paged_attention(q, k_pages, v_pages, table, seqlen_k=[5, 3], causal=True)
    >>> out.shape
    (2, 1, 8, 16)

    The second sequence has its keys in pages 1 and 2:

    >>> k, v = (x[[1, 2]].reshape(1, 4, 4, 16)[:, :3] for x in (k_pages, v_pages))
    >>> bool(np.allclose(out[1:], rawattn.attention(q[1:], k, v), atol=1e-6))
    True

    The same table as a pair, for query chunks of 2 rows and 1 row:

    >>> pair = ([0, 3, 5], [5, 0, 3, 1, 2])
    >>> packed = rng.standard_normal((3, 8, 16), dtype=np.float32)
    >>> seqs = rawattn.SeqLayout(seqstart_q=[0, 2, 3])
    >>> rawattn.paged_attention(
    ...     packed, k_pages, v_pages, pair, seqlen_k=[5, 3], seqs=seqs, causal=True
    ... ).shape
    (3, 8, 16)
    """
    return_lse = flag("return_lse", return_lse)
    given = options_of(options, ForwardOptions, "rawattn.paged_attention", paged_attention)
    named = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table}
    table, given = read_pages({**named, "seqlen_k": seqlen_k, "validate": validate}, given)
    inputs = (q, k_pages, v_pages, table)
    verb, factors, numbers = scaled(PAGED, q, {"k_scale": k_scale, "v_scale": v_scale})
    inputs += factors
    verb, more, values, left = with_arrays(verb, given, q=q)
    inputs += more
    returned: Callable[[Sequence[Any]], Any] = tuple if return_lse else first
    targets = (out, None)
    return CallRequest(verb, inputs, targets, left, return_lse, backend, numbers + values, returned)


def read_pages(
    named: Mapping[str, Any],
    options: Options,
    names: Sequence[str] = PAGED.inputs[:3],
    visibility: VisibilityRule | None = None,
) -> tuple[Any, Options]:
    """The page ids of a call, on the device of its rows, and the options with a `PagedLayout` as `seqs`.

    Integers are checked where all of them are on the host, or with `validate`.

    named: the arguments of the call. names: the arguments that are the rows and both arrays of pages.
    visibility: which keys a row may see; None takes that from the options.
    """
    validate = flag("validate", named["validate"])
    rows, k_pages, v_pages = found = [named[name] for name in names]
    arrays.refuse_gradients(names, found)
    indptr, ids = pages.split(named["block_table"])
    layout = pages.PagedLayout(options.seqs, named["seqlen_k"], indptr, names[0])
    if not layout.on_host:
        refuse_traced(layout)
    table = ids
    if isinstance(ids, (list, tuple, range, np.ndarray)) or device_of(ids) == HOST or validate:
        host = import_integers("block_table", ids)
        on_host = isinstance(host, np.ndarray)
        if validate or (on_host and layout.on_host):
            visibility = visibility or visibility_of(options)
            check_pages(rows, k_pages, v_pages, host, layout, visibility)
        if on_host:
            table = _beside(rows, host)
    return table, options._replace(seqs=layout)


def visibility_of(options: Options) -> VisibilityRule:
    """Which keys a row may see, by the options of its call."""
    return VisibilityRule(
        _options.window(options), _options.sink(options), _options.top_left(options)
    )


class Scaled(NamedTuple):
    """A verb that takes scales, and a call's scales: arrays on the device of its rows, and numbers as kernels take them."""

    verb: Verb
    arrays: tuple[Any, ...]
    numbers: tuple[int, ...]


def scaled(verb: Verb, rows: Any, named: Mapping[str, Any]) -> Scaled:
    """`verb` with the scales of a call. named: the arguments k_scale and v_scale."""
    if all(x is None for x in named.values()):
        return Scaled(verb, (), ())
    found = scales.read(named)
    arrays = tuple(
        _beside(rows, x) if isinstance(x, np.ndarray) else x for x in found.arrays.values()
    )
    return Scaled(with_scales(verb, *found.forms()), arrays, tuple(found.numbers.values()))


def check_pages(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    table: Any,
    layout: pages.PagedLayout,
    visibility: VisibilityRule,
) -> None:
    """ValueError for lengths that do not fit, for page ids out of range, and for two new rows in one slot.

    Shapes of a wrong rank pass: the call itself refuses them.
    """
    shapes = [tuple(getattr(x, "shape", ())) for x in (q, k_pages, v_pages)]
    if len(shapes[0]) not in (3, 4) or len(shapes[1]) != 4 or len(shapes[2]) != 4:
        return
    layout = layout.on_the_host()
    if not isinstance(table, np.ndarray):
        table = table.get()
    form = pages.form(layout, shapes[0], shapes[1], shapes[2], table)
    lengths = host_lengths(layout.bind(shapes[0], shapes[1], table.shape))
    page_ids.check_ids(
        table, lengths, form, visibility.window, visibility.sink, visibility.top_left
    )
    if visibility.written:
        page_ids.check_slots(table, lengths, form)


def device_of(array: Any) -> int | None:
    """The device of an array, HOST, or None for an object that is no array, which the call itself then refuses."""
    try:
        return arrays.device_of(array, arrays.framework_of(array))
    except Exception:  # frameworks raise all kinds for what they cannot export
        return None


def _beside(q: Any, table: np.ndarray[Any, Any]) -> Any:
    """A host array copied to the device of q, in q's framework; the array itself if q is on the host."""
    device = device_of(q)
    if device is None or device == HOST:
        return table
    import cupy

    framework = arrays.framework_of(q)
    with cupy.cuda.Device(device), arrays.on_stream_of(q, framework) as stream:
        return arrays.export_array(cupy.asarray(table), framework, stream)
