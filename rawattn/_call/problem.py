"""`Problem`: a call as plain values, and the checks of its arrays' shapes and dtypes and of its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from rawattn._call import options as _options
from rawattn._call import pages, scales, scores
from rawattn._call.binding import bind
from rawattn._call.dtypes import DTYPE_NAMES
from rawattn._call.hints import transposed, undivided
from rawattn._call.layout import Lengths
from rawattn._call.options import DEFAULTS, Options, ScoreOptions
from rawattn._call.pages import PageForm
from rawattn._call.rotary import RotaryForm
from rawattn._interop.advice import cast

if TYPE_CHECKING:
    from rawattn._call.partials import PartialsForm

MAX_HEADDIM = 256  # of q and k, and of v
NO_ARRAYS: Mapping[str, Any] = MappingProxyType({})

_INT32_MAX = 2**31 - 1
_BYTES = frozenset({np.dtype(np.uint8), np.dtype(np.int8)})
_AXES: dict[str, tuple[str, ...]] = {
    "q": ("(batch, seqlen_q, nheads_q, D)", "(total_q, nheads_q, D)"),
    "k": ("(batch, seqlen_k, nheads_kv, D)", "(total_k, nheads_kv, D)"),
    "v": ("(batch, seqlen_k, nheads_kv, Dv)", "(total_k, nheads_kv, Dv)"),
    **{name: (axes,) for name, axes in pages.AXES.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(ScoreOptions):
    """What a call computes: everything that decides its kernels, without the values in its arrays."""

    dtype: str  # "float16", "bfloat16" or "float32"
    batch: int
    nheads_q: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    packed: bool
    rows_q: int  # physical rows: seqlen in batch mode, total in group mode
    rows_k: int
    max_seqlen_q: int  # upper bound of all logical lengths
    max_seqlen_k: int
    ragged: bool  # group mode, or logical lengths or positions given
    window_left: int | None  # None = unbounded
    window_right: int | None  # 0 with causal
    sink: int  # 0 without a left bound, where it has no meaning
    top_left: bool
    scale: float
    positions: bool = False  # the positions of sequences in longer ones place the diagonal
    shared_lengths: bool = False  # the keys have the same sequences as the queries
    pages: PageForm | None = None  # if given, rows_k is the most keys that a sequence's pages hold
    num_splits: int | None = None  # None = the library chooses
    rotary: RotaryForm | None = None  # of `append_kv`
    partials: PartialsForm | None = None  # of `combine`: the rows of q are outs, without keys
    float8: bool = False  # pages hold float8_e4m3fn
    # Scales of float8 pages: None is 1, `scales.NUMBER` a number of the call, else the form of an array.
    k_scale: Any = None
    v_scale: Any = None

    @property
    def group_heads(self) -> int:
        """The number of query heads that share a kv head."""
        return self.nheads_q // self.nheads_kv

    def offset(self, len_q: int, len_k: int, first_query: int = 0, first_key: int = 0) -> int:
        """The diagonal of a sequence: row i is level with key i + offset. first_query, first_key: the sequence's positions."""
        if self.positions:
            return first_query - first_key
        return 0 if self.top_left else len_k - len_q

    @property
    def plain_scores(self) -> bool:
        """Whether scores are scaled products q . k with nothing else done to them, and no probability is dropped.

        A mask and learned sinks are allowed.
        """
        return (
            self.softcap is None
            and self.bias is None
            and self.alibi_slopes is None
            and self.score_mod is None
            and not self.dropout_p
        )


def describe(
    q: Any,
    k: Any,
    v: Any,
    options: Options = DEFAULTS,
    framework: str | None = None,
    arrays: Mapping[str, Any] = NO_ARRAYS,
    **changed: Any,
) -> tuple[Problem, Lengths]:
    """The call as a `Problem`, and its sequences. q, k, v have the shapes and dtypes of NumPy or CuPy arrays.

    framework: that of the caller's arrays, by `framework_of`, for messages; None if unknown.
    arrays: the options' arrays by name, which `option_arrays.with_arrays` took out of the options.
    changed: options by name that replace those in `options`.

    Raises TypeError, ValueError or NotImplementedError for a call that is not accepted, naming the argument, what was got and
    what is accepted.
    """
    if changed:
        options = options._replace(**changed)
    dtype = q.dtype
    if dtype not in DTYPE_NAMES or k.dtype != dtype or v.dtype != dtype:
        refuse_dtypes({"q": q, "k": k, "v": v}, framework)
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    try:
        _check_shapes(shape_q, shape_k, shape_v)
    except ValueError as error:
        fix = transposed(shape_q, shape_k, shape_v, framework)
        if not fix and options.seqs is None:
            fix = undivided(shape_q)
        raise ValueError(f"{error}{fix}") from None
    batch = shape_q[0] if len(shape_q) == 4 else None
    rows_q, nheads_q, headdim = shape_q[-3:]
    rows_k, nheads_kv, headdim_v = shape_v[-3:]
    lengths = bind(options.seqs, batch=batch, rows_q=rows_q, rows_k=rows_k)
    dims = Dims(dtype, rows_q, rows_k, nheads_q, nheads_kv, headdim, headdim_v, framework)
    return resolve(dims, lengths, options, arrays), lengths


def describe_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    options: Options,
    framework: str | None = None,
    arrays: Mapping[str, Any] = NO_ARRAYS,
    given_scales: Mapping[str, Any] = NO_ARRAYS,
    number_scales: tuple[str, ...] = (),
) -> tuple[Problem, Lengths]:
    """`describe` for keys and values in pages. The options' `seqs` is a `PagedLayout`.

    given_scales: the scales of float8 pages that are arrays, by name. number_scales: the names of scales that are numbers.
    """
    dtype = q.dtype
    named = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    float8 = scales.check_pools(named, "q")
    if float8:
        named = {"q": q}
    if any(x.dtype != dtype for x in named.values()) or dtype not in DTYPE_NAMES:
        refuse_dtypes(named, framework)
    if len(q.shape) not in (3, 4):
        raise _wrong_rank_of_q(q.shape)
    form = pages.form(options.seqs, q.shape, k_pages.shape, v_pages.shape, block_table)
    check_heads(q.shape, k_pages.shape, v_pages.shape, ("k_pages", "v_pages"))
    lengths = options.seqs.bind(q.shape, k_pages.shape, block_table.shape)
    *_, rows_q, nheads_q, headdim = q.shape
    nheads_kv, headdim_v = v_pages.shape[-2:]
    dims = Dims(dtype, rows_q, lengths.k.rows, nheads_q, nheads_kv, headdim, headdim_v, framework)
    problem = resolve(dims, lengths, options, arrays, form)
    found = scales.forms(given_scales, number_scales, float8, nheads_kv)
    return replace(problem, float8=float8, **found) if float8 else problem, lengths


class Dims(NamedTuple):
    """Dimensions of a call's arrays, whose shapes have been checked."""

    dtype: np.dtype[Any]
    rows_q: int
    rows_k: int
    nheads_q: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    framework: str | None  # of the caller's arrays, for messages


def resolve(
    dims: Dims,
    lengths: Lengths,
    options: Options,
    arrays: Mapping[str, Any],
    paged: PageForm | None = None,
) -> Problem:
    """The `Problem` of a call, once every option is checked. paged: the form of its pages, if keys and values are in pages."""
    dtype, rows_q, rows_k, nheads_q, nheads_kv, headdim, headdim_v, framework = dims
    _options.causal(options)
    top_left, positions = _options.top_left(options), lengths.positions
    left, right = _options.window(options)
    sink = _options.sink(options)
    scale = _options.scale(options, headdim)
    num_splits = _options.num_splits(options)
    score_options: dict[str, Any] = {}
    if arrays or not _options.leaves_scores(options):
        by_position = lengths.packed or paged is not None
        heads = (nheads_q, nheads_kv)
        shapes = scores.Shapes(dtype, lengths.batch, *heads, rows_q, rows_k, by_position, framework)
        score_options = scores.describe(options, arrays, shapes, lengths)
        if positions and score_options["dropout_p"]:
            raise dropout_at_positions()
    return Problem(
        dtype=DTYPE_NAMES[dtype],
        batch=lengths.batch,
        nheads_q=nheads_q,
        nheads_kv=nheads_kv,
        headdim=headdim,
        headdim_v=headdim_v,
        packed=lengths.packed,
        rows_q=rows_q,
        rows_k=rows_k,
        max_seqlen_q=lengths.q.max_seqlen,
        max_seqlen_k=lengths.k.max_seqlen,
        ragged=lengths.packed
        or positions
        or lengths.q.length is not None
        or lengths.k.length is not None,
        window_left=left,
        window_right=right,
        sink=0 if left is None else sink,
        top_left=top_left and not positions,
        scale=scale,
        positions=positions,
        **score_options,
        pages=paged,
        num_splits=num_splits,
    )


def dropout_at_positions() -> NotImplementedError:
    """The error for dropout in a call whose sequences have positions."""
    return NotImplementedError(
        "dropout_p: what is dropped depends on rows counted from 0 in this version; got positions in seqs (position_q, "
        "position_k)"
    )


def result_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of out and lse."""
    rows, nheads = problem.rows_q, problem.nheads_q
    if problem.packed:
        return (rows, nheads, problem.headdim_v), (nheads, rows)
    return (problem.batch, rows, nheads, problem.headdim_v), (problem.batch, nheads, rows)


def refuse_dtypes(named: Mapping[str, Any], framework: str | None) -> NoReturn:
    """Raises the TypeError for arrays whose dtypes are not all that of the first one, or not one that attention supports."""
    first, *others = named
    for name, array in named.items():
        if name.endswith("_pages") and array.dtype in _BYTES:
            library = "torch" if framework == "torch" else "ml_dtypes"
            raise TypeError(
                f"{name}: got dtype {array.dtype}, expected float8_e4m3fn, or {named[first].dtype}, that of {first}; bytes "
                f"that are such numbers are {name}.view({library}.float8_e4m3fn)"
            )
        if array.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name}: got dtype {array.dtype}, expected float16, bfloat16 or float32; convert "
                f"it, as by {cast(framework, name, np.dtype(np.float32))}"
            )
    expected = named[first].dtype
    name = next(name for name in others if named[name].dtype != expected)
    raise TypeError(
        f"{name}: got dtype {named[name].dtype}, expected {expected}, that of {first}; convert it, as by "
        f"{cast(framework, name, expected)}"
    )


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    axes = len(q)
    if axes not in (3, 4):
        raise _wrong_rank_of_q(q)
    for name, shape in (("k", k), ("v", v)):
        if len(shape) != axes:
            raise ValueError(
                f"{name}: got shape {shape}, expected {_AXES[name][axes == 3]}, since q has {axes} "
                "axes"
            )
    if axes == 4:
        if k[0] != q[0]:
            raise _wrong_axis("k", k, "batch", k[0], f"{q[0]}, that of q")
        if v[0] != q[0]:
            raise _wrong_axis("v", v, "batch", v[0], f"{q[0]}, that of q")
    if v[-3] != k[-3]:
        raise _wrong_axis(
            "v", v, "seqlen_k" if axes == 4 else "total_k", v[-3], f"{k[-3]}, that of k"
        )
    check_heads(q, k, v, ("k", "v"))


def check_heads(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], names: tuple[str, str]
) -> None:
    """ValueError for wrong head counts or head dims. The ranks have been checked. names: what the caller knows k and v as."""
    key, value = names
    nheads_q, nheads_kv = q[-2], k[-2]
    if nheads_q < 1:
        raise _wrong_axis("q", q, "nheads_q", nheads_q, "at least 1")
    if nheads_kv < 1:
        raise _wrong_axis(key, k, "nheads_kv", nheads_kv, "at least 1")
    if nheads_q % nheads_kv:
        multiple = f"a multiple of nheads_kv = {nheads_kv}, that of {key}"
        raise _wrong_axis("q", q, "nheads_q", nheads_q, multiple)
    if v[-2] != nheads_kv:
        raise _wrong_axis(value, v, "nheads_kv", v[-2], f"{nheads_kv}, that of {key}")
    if not 1 <= q[-1] <= MAX_HEADDIM:
        raise _wrong_axis("q", q, "D", q[-1], f"1 to {MAX_HEADDIM}")
    if k[-1] != q[-1]:
        raise _wrong_axis(key, k, "D", k[-1], f"{q[-1]}, that of q")
    if not 1 <= v[-1] <= MAX_HEADDIM:
        raise _wrong_axis(value, v, "Dv", v[-1], f"1 to {MAX_HEADDIM}")
    if nheads_q > _INT32_MAX:
        raise _wrong_axis("q", q, "nheads_q", nheads_q, f"at most {_INT32_MAX}")
    if len(q) == 4 and q[0] > _INT32_MAX:
        raise _wrong_axis("q", q, "batch", q[0], f"at most {_INT32_MAX}")


def _wrong_rank_of_q(shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"q: got shape {shape}, expected {_AXES['q'][0]}, or {_AXES['q'][1]} with seqs"
    )


def _wrong_axis(
    name: str, shape: tuple[int, ...], axis: str, got: int, expected: str
) -> ValueError:
    return ValueError(
        f"{name}: got {axis} = {got} in shape {shape} = {_AXES[name][len(shape) == 3]}, "
        f"expected {expected}"
    )
