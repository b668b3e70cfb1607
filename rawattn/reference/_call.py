"""A call of the reference: arrays on the host in one floating dtype, and options resolved."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rawattn._call import options as _options
from rawattn._call import scales
from rawattn._call.binding import refuse_traced
from rawattn._call.layout import Lengths, host_lengths
from rawattn._call.options import DEFAULTS, Options
from rawattn._call.problem import Problem, describe, dropout_at_positions
from rawattn._interop.arrays import import_array
from rawattn._interop.integers import import_integers
from rawattn._masks.block_mask import BlockMask
from rawattn._scores import numpy_eval
from rawattn._scores.program import ScoreText
from rawattn._scores.score_mod import ScoreMod

Array = NDArray[Any]

# Options that `describe` resolves; the others are resolved here.
_OF_PROBLEM = ("causal", "align", "window", "sink", "scale")


class Modifier(NamedTuple):
    """A score function and what it captured: arrays on the host, floats in the dtype of the call."""

    text: ScoreText
    captured: dict[str, Array]
    scalars: tuple[float, ...]


class Segment(NamedTuple):
    """Where a sequence lies in the arrays of a call: its rows and keys, and its positions in a longer sequence."""

    start_q: int
    len_q: int
    start_k: int
    len_k: int
    first_query: int
    first_key: int


class Call(NamedTuple):
    """A call with its options resolved and its arrays in one floating dtype, on the host.

    Batch mode is treated as group mode with sequences of equal room: arrays are (total, heads, dim).
    """

    q: Array
    k: Array
    v: Array
    shape_q: tuple[int, ...]
    shape_k: tuple[int, ...]
    shape_v: tuple[int, ...]
    sequences: list[Segment]
    left: float  # inf if unbounded; right too
    right: float
    sink: int
    top_left: bool
    positions: bool  # the sequences' positions place the diagonal
    scale: float
    bias: Array | None  # with four axes; the mask too
    shape_bias: tuple[int, ...] | None
    mask: Array | None
    alibi_slopes: Array | None  # (batch, nheads_q)
    softcap: float | None
    score_mod: Modifier | None
    sink_logits: Array | None  # (nheads_q,)
    dropout_p: float
    seed: int


def read(q: Any, k: Any, v: Any, options: Options, precision: DTypeLike = np.float64) -> Call:
    """The call with every option checked and resolved. precision: the dtype of the arithmetic."""
    refuse_traced(options.seqs)
    dtype = np.dtype(precision)
    q, k, v = (floats(name, x, dtype) for name, x in (("q", q), ("k", k), ("v", v)))
    # `describe` accepts no float64, so it gets float32 arrays of the same shapes.
    stand_in_q, stand_in_k, stand_in_v = (
        np.broadcast_to(np.float32(0), x.shape) for x in (q, k, v)
    )
    known = {name: getattr(options, name) for name in ("seqs", *_OF_PROBLEM)}
    problem, lengths = describe(stand_in_q, stand_in_k, stand_in_v, DEFAULTS._replace(**known))
    numbers = {name: check(options) for name, check in _options.SCORE_NUMBERS.items()}
    seed = _options.seed(options)
    _options.num_splits(options)
    bias, mask = options.bias, options.mask
    alibi_slopes, sink_logits = options.alibi_slopes, options.sink_logits

    for name in _options.ARRAYS:
        given = getattr(options, name)
        if given is not None and not (name == "mask" and isinstance(given, BlockMask)):
            _options.check_array(name, given)

    if problem.positions and numbers["dropout_p"]:
        raise dropout_at_positions()
    sequences = _sequences(problem, lengths)
    longest = (
        max((each.len_q for each in sequences), default=0),
        max((each.len_k for each in sequences), default=0),
    )
    shape_bias = None
    if bias is not None:
        bias = host("bias", bias)
        if bias.dtype == np.bool_:
            raise TypeError(
                "bias: got dtype bool, expected numbers that are added to scores; write mask= (True = keep)"
            )
        bias = floats("bias", bias, dtype)
        shape_bias = bias.shape
        bias = _four_axes("bias", bias, problem, longest)
    if mask is not None:
        mask = host("mask", mask.to_bool() if isinstance(mask, BlockMask) else mask)
        if mask.dtype != np.bool_:
            raise TypeError(
                f"mask: got dtype {mask.dtype}, expected bool, where True keeps a key; what is added to scores is bias=, and "
                "of a mask of 1 and 0 pass mask != 0"
            )
        mask = _four_axes("mask", mask, problem, longest)
    nheads_q = problem.nheads_q
    if alibi_slopes is not None:
        alibi_slopes = floats("alibi_slopes", alibi_slopes, dtype)
        if alibi_slopes.shape not in ((nheads_q,), (problem.batch, nheads_q)):
            raise ValueError(
                f"alibi_slopes: got shape {alibi_slopes.shape}, expected (nheads_q,) = "
                f"({nheads_q},) or (batch, nheads_q) = ({problem.batch}, {nheads_q})"
            )
        alibi_slopes = np.broadcast_to(alibi_slopes, (problem.batch, nheads_q))
    if sink_logits is not None:
        sink_logits = exactly("sink_logits", sink_logits, (nheads_q,), dtype)

    return Call(
        q=q.reshape(-1, *q.shape[-2:]),
        k=k.reshape(-1, *k.shape[-2:]),
        v=v.reshape(-1, *v.shape[-2:]),
        shape_q=q.shape,
        shape_k=k.shape,
        shape_v=v.shape,
        sequences=sequences,
        left=np.inf if problem.window_left is None else problem.window_left,
        right=np.inf if problem.window_right is None else problem.window_right,
        sink=problem.sink,
        top_left=problem.top_left,
        positions=problem.positions,
        scale=problem.scale,
        bias=bias,
        shape_bias=shape_bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        score_mod=_modifier(options.score_mod, dtype),
        sink_logits=sink_logits,
        seed=_integer(seed),
        **numbers,
    )


def _modifier(score_mod: Any, dtype: np.dtype[Any]) -> Modifier | None:
    if score_mod is None:
        return None
    if not isinstance(score_mod, ScoreMod):
        raise _options.no_score_mod(score_mod)
    numpy_eval.require_expression(score_mod.text)
    captured = {name: host(name, array) for name, array in score_mod.arrays.items()}
    for name, array in captured.items():
        if array.dtype.kind not in "bi":
            captured[name] = array.astype(dtype)
    return Modifier(score_mod.text, captured, score_mod.scalars)


def _sequences(problem: Problem, lengths: Lengths) -> list[Segment]:
    host = host_lengths(lengths)
    start_q, start_k = host.start_q, host.start_k
    if not problem.packed:
        start_q = np.arange(problem.batch) * problem.rows_q
        start_k = np.arange(problem.batch) * problem.rows_k
    columns = (start_q, host.len_q, start_k, host.len_k, host.position_q, host.position_k)
    return list(starmap(Segment, zip(*(column.tolist() for column in columns), strict=True)))


def host(name: str, array: Any) -> Array:
    # NumPy arrays are taken as they are: `import_array` would refuse a foreign byte order, which is fine here.
    if type(array) is not np.ndarray:
        array = import_array(name, array).array
        array = array.get() if hasattr(array, "get") else array
    return np.asarray(array)


def integers(name: str, values: Any) -> Array:
    """Integers of any framework, or lists of them, on the host."""
    array = import_integers(name, values)
    return np.asarray(array.get() if hasattr(array, "get") else array)


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name in ("bfloat16", "float8_e4m3fn")


def floats(name: str, array: Any, dtype: np.dtype[Any]) -> Array:
    """Floats of any framework, on the host and in this dtype."""
    array = host(name, array)
    if not is_float(array.dtype):
        raise TypeError(f"{name}: got {array.dtype}, expected a floating-point dtype")
    converted: Array = array.astype(dtype)
    return converted


def factors_of_pages(given: Mapping[str, Any], k_pages: Any, v_pages: Any) -> tuple[Any, Any]:
    """The factors of keys and values in pages, as arrays that broadcast to (..., nheads_kv, D).

    given: both scales by name; only pages of float8_e4m3fn have them.
    """
    pools = {name: host(name, x) for name, x in (("k_pages", k_pages), ("v_pages", v_pages))}
    for name, pool in pools.items():
        if pool.ndim != 4:
            raise ValueError(
                f"{name}: got shape {pool.shape}, expected (num_pages, page_size, nheads_kv, D)"
            )
    float8 = scales.check_pools({"q": pools["k_pages"], **pools}, "q")
    on_host = {n: host(n, x) if hasattr(x, "__dlpack__") else x for n, x in given.items()}
    found = scales.read(on_host)
    scales.forms(found.arrays, tuple(found.numbers), float8, pools["k_pages"].shape[-2])
    extras = {**found.arrays, **{f"{name}_value": x for name, x in found.numbers.items()}}
    k, v = (scales.value(name, extras).astype(np.float64) for name in scales.NAMES)
    return k, v


def exactly(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    found = floats(name, array, dtype)
    if found.shape != shape:
        raise ValueError(f"{name}: got shape {found.shape}, expected {shape}")
    return found


def _four_axes(name: str, array: Array, problem: Problem, longest: tuple[int, int]) -> Array:
    """A bias or mask with all its axes: (1 or batch, heads, 1 or rows, 1 or keys)."""
    shape = (1,) * (4 - array.ndim) + array.shape
    nheads = (1, problem.nheads_kv, problem.nheads_q)
    good = array.ndim <= 4 and shape[0] in (1, problem.batch) and shape[1] in nheads
    if problem.packed:
        good = good and all(n == 1 or n >= most for n, most in zip(shape[2:], longest, strict=True))
        rows = f"1 or >= {longest[0]} (longest sequence), 1 or >= {longest[1]}"
    else:
        good = good and shape[2] in (1, problem.rows_q) and shape[3] in (1, problem.rows_k)
        rows = f"1 or {problem.rows_q} (seqlen_q), 1 or {problem.rows_k} (seqlen_k)"
    if not good:
        raise ValueError(
            f"{name}: got shape {array.shape}, expected at most four axes that broadcast to "
            f"(1 or {problem.batch} (batch), 1, {problem.nheads_kv} (nheads_kv) or "
            f"{problem.nheads_q} (nheads_q), {rows})"
        )
    return array.reshape(shape)


def _integer(seed: Any) -> int:
    """The value of a seed that was checked; 0 for None."""
    if seed is None or isinstance(seed, (int, np.integer)):
        return int(seed or 0)
    return int(seed.reshape(-1)[0])
