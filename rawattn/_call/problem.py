"""A call as plain values. Every mistake that a caller can make in it is found here."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from rawattn._call.layout import Lengths, bind
from rawattn._interop.arrays import import_integers

MAX_HEADDIM = 256
MAX_SPLITS = 256

_INT32_MAX = 2**31 - 1
# Kernels hold scale * log2(e) in float32.
_MAX_SCALE = 2.0**127
# Byte order is part of a dtype, not of its name: the dtypes themselves are the keys.
_DTYPE_NAMES = {
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.float32): "float32",
}
_AXES = {
    "q": ("(batch, seqlen_q, nheads_q, D)", "(total_q, nheads_q, D)"),
    "k": ("(batch, seqlen_k, nheads_kv, D)", "(total_k, nheads_kv, D)"),
    "v": ("(batch, seqlen_k, nheads_kv, Dv)", "(total_k, nheads_kv, Dv)"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """What a forward call computes, apart from the values in its arrays."""

    dtype: str  # "float16", "bfloat16" or "float32"
    batch: int
    nheads_q: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    group: bool
    rows_q: int  # physical rows: seqlen in batch mode, total in group mode
    rows_k: int
    max_seqlen_q: int  # no logical length is above this
    max_seqlen_k: int
    ragged: bool  # group mode, or logical lengths given
    window_left: int | None  # None = unbounded
    window_right: int | None  # 0 with causal
    sink: int  # 0 without a left bound, where it has no meaning
    top_left: bool
    scale: float


def describe(
    q: Any,
    k: Any,
    v: Any,
    *,
    seqs: Any = None,
    causal: Any = False,
    align: Any = "bottom-right",
    window: Any = None,
    sink: Any = 0,
    scale: Any = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    softcap: Any = None,
    score_mod: Any = None,
    sink_logits: Any = None,
    dropout_p: Any = 0.0,
    seed: Any = None,
    num_splits: Any = None,
) -> tuple[Problem, Lengths]:
    """The call as a `Problem` and its sequences. q, k, v are NumPy or CuPy arrays.

    Raises TypeError or ValueError for what the contract refuses, naming the argument, what was got
    and what is accepted; then NotImplementedError for an option that the backends do not have.
    """
    dtype = q.dtype
    name = _DTYPE_NAMES.get(dtype)
    if name is None or k.dtype != dtype or v.dtype != dtype:
        _refuse_dtypes(q, k, v)
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    _check_shapes(shape_q, shape_k, shape_v)
    batch = shape_q[0] if len(shape_q) == 4 else None
    rows_q, nheads_q, headdim = shape_q[-3:]
    rows_k, nheads_kv, headdim_v = shape_v[-3:]

    if causal is not True and causal is not False and not isinstance(causal, np.bool_):
        raise TypeError(f"causal: got {_shown(causal)}, expected a bool")
    if not isinstance(align, str) or align not in ("bottom-right", "top-left"):
        error = ValueError if isinstance(align, str) else TypeError
        raise error(f"align: got {_shown(align)}, expected 'bottom-right' or 'top-left'")
    left, right = (None, None) if window is None else _window(window)
    if causal:
        right = 0
    if sink != 0 or type(sink) is not int:
        sink = _whole("sink", sink, "an int >= 0")
    scale = 1 / math.sqrt(headdim) if scale is None else _scale(scale)

    lengths = bind(seqs, batch=batch, rows_q=rows_q, rows_k=rows_k)
    side_q, side_k = lengths.q, lengths.k

    if not (
        bias is None
        and mask is None
        and alibi_slopes is None
        and softcap is None
        and score_mod is None
        and sink_logits is None
        and seed is None
        and num_splits is None
        and type(dropout_p) is float
        and dropout_p == 0
    ):
        _check_others(
            bias=bias, mask=mask, alibi_slopes=alibi_slopes, softcap=softcap, score_mod=score_mod,
            sink_logits=sink_logits, dropout_p=dropout_p, seed=seed, num_splits=num_splits,
        )  # fmt: skip
    problem = Problem(
        dtype=name,
        batch=lengths.batch,
        nheads_q=nheads_q,
        nheads_kv=nheads_kv,
        headdim=headdim,
        headdim_v=headdim_v,
        group=lengths.group,
        rows_q=rows_q,
        rows_k=rows_k,
        max_seqlen_q=side_q.max_seqlen,
        max_seqlen_k=side_k.max_seqlen,
        ragged=lengths.group or side_q.length is not None or side_k.length is not None,
        window_left=left,
        window_right=right,
        sink=0 if left is None else min(sink, _INT32_MAX),
        top_left=align == "top-left",
        scale=scale,
    )
    return problem, lengths


def result_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of out and lse."""
    rows, nheads = problem.rows_q, problem.nheads_q
    if problem.group:
        return (rows, nheads, problem.headdim_v), (nheads, rows)
    return (problem.batch, rows, nheads, problem.headdim_v), (problem.batch, nheads, rows)


def check_out(
    out: Any, *, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: tuple[Any, ...]
) -> None:
    """Raise TypeError or ValueError if results of this shape and dtype cannot be written to `out`.

    `out` and `inputs` (q, k, v in this order) are NumPy or CuPy arrays. Arrays that interleave in
    one buffer without sharing a byte do not overlap.
    """
    if out.shape != shape:
        raise ValueError(f"out: got shape {out.shape}, expected {shape}")
    if out.dtype != dtype:
        raise TypeError(f"out: got dtype {out.dtype}, expected {dtype}, that of q")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out: got a read-only array, expected a writable one; pass a copy")
    if 0 in shape:
        return
    itemsize, strides, address = dtype.itemsize, out.strides, _address(out)
    if shape[-1] > 1 and strides[-1] != itemsize:
        raise ValueError(
            f"out: got a last-axis stride of {strides[-1]} bytes, expected {itemsize}, one "
            "element; only other axes may be transposed or sliced"
        )
    if address % itemsize or any(stride % itemsize for stride in strides):
        raise ValueError(
            f"out: got strides {strides} at address {address:#x}, expected multiples of {itemsize} "
            "bytes; pass an aligned copy"
        )
    if not out.flags.c_contiguous:
        extent = itemsize
        for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
            if stride < extent:
                raise ValueError(
                    f"out: got strides {strides}, by which elements may share memory, expected "
                    "memory of its own for each; pass a copy, not a broadcast or overlapping view"
                )
            extent += stride * (n - 1)
    low, high = _byte_range(out, address)
    for name, other in zip(("q", "k", "v"), inputs, strict=True):
        if 0 in other.shape:
            continue
        other_low, other_high = _byte_range(other, _address(other))
        if low < other_high and other_low < high and _share_bytes(out, other):
            raise ValueError(
                f"out: shares memory with {name}, expected memory of its own; pass a copy"
            )


def _refuse_dtypes(q: Any, k: Any, v: Any) -> NoReturn:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype not in _DTYPE_NAMES:
            raise TypeError(
                f"{name}: got dtype {array.dtype}, expected float16, bfloat16 or float32; convert "
                f"it, as by {name}.astype(np.float32)"
            )
    name, array = ("v", v) if k.dtype == q.dtype else ("k", k)
    raise TypeError(f"{name}: got dtype {array.dtype}, expected {q.dtype}, that of q")


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    axes = len(q)
    if axes not in (3, 4):
        raise ValueError(
            f"q: got shape {q}, expected {_AXES['q'][0]}, or {_AXES['q'][1]} with seqs"
        )
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
    nheads_q, nheads_kv = q[-2], k[-2]
    if nheads_q < 1:
        raise _wrong_axis("q", q, "nheads_q", nheads_q, "at least 1")
    if nheads_kv < 1:
        raise _wrong_axis("k", k, "nheads_kv", nheads_kv, "at least 1")
    if nheads_q % nheads_kv:
        multiple = f"a multiple of nheads_kv = {nheads_kv}, that of k"
        raise _wrong_axis("q", q, "nheads_q", nheads_q, multiple)
    if v[-2] != nheads_kv:
        raise _wrong_axis("v", v, "nheads_kv", v[-2], f"{nheads_kv}, that of k")
    if not 1 <= q[-1] <= MAX_HEADDIM:
        raise _wrong_axis("q", q, "D", q[-1], f"1 to {MAX_HEADDIM}")
    if k[-1] != q[-1]:
        raise _wrong_axis("k", k, "D", k[-1], f"{q[-1]}, that of q")
    if not 1 <= v[-1] <= MAX_HEADDIM:
        raise _wrong_axis("v", v, "Dv", v[-1], f"1 to {MAX_HEADDIM}")
    if nheads_q > _INT32_MAX:
        raise _wrong_axis("q", q, "nheads_q", nheads_q, f"at most {_INT32_MAX}")
    if axes == 4 and q[0] > _INT32_MAX:
        raise _wrong_axis("q", q, "batch", q[0], f"at most {_INT32_MAX}")


def _wrong_axis(
    name: str, shape: tuple[int, ...], axis: str, got: int, expected: str
) -> ValueError:
    return ValueError(
        f"{name}: got {axis} = {got} in shape {shape} = {_AXES[name][len(shape) == 3]}, "
        f"expected {expected}"
    )


def _window(window: Any) -> tuple[int | None, int | None]:
    accepted = "a tuple (left, right) of ints >= 0, or None for an unbounded side"
    if not isinstance(window, tuple):
        raise TypeError(f"window: got {_shown(window)}, expected {accepted}")
    if len(window) != 2:
        raise ValueError(f"window: got {_shown(window)}, expected {accepted}")
    left, right = (None if end is None else _whole("window", end, accepted) for end in window)
    # Rows and keys of one sequence are never further apart: such an end hides nothing.
    return (
        None if left is None or left >= _INT32_MAX else left,
        None if right is None or right >= _INT32_MAX else right,
    )


def _whole(name: str, value: Any, accepted: str) -> int:
    """An int >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {_shown(value)}, expected {accepted}")
    if value < 0:
        raise ValueError(f"{name}: got {value}, expected {accepted}")
    return int(value)


def _number(name: str, value: Any, accepted: str) -> float:
    """A float; infinite if it is out of a float's range."""
    numbers = (float, int, np.floating, np.integer, ml_dtypes.bfloat16)
    if isinstance(value, bool) or not isinstance(value, numbers):
        raise TypeError(f"{name}: got {_shown(value)}, expected {accepted}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _scale(scale: Any) -> float:
    accepted = f"a finite number of magnitude at most {_MAX_SCALE:.2g}, or None for 1/sqrt(D)"
    number = _number("scale", scale, accepted)
    if not abs(number) <= _MAX_SCALE:
        raise ValueError(f"scale: got {_shown(scale)}, expected {accepted}")
    return number


def _check_others(
    *,
    bias: Any,
    mask: Any,
    alibi_slopes: Any,
    softcap: Any,
    score_mod: Any,
    sink_logits: Any,
    dropout_p: Any,
    seed: Any,
    num_splits: Any,
) -> None:
    """Refuse what is wrong in the options few calls have, then what the backends do not have."""
    arrays = {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sink_logits": sink_logits}
    for name, array in arrays.items():
        if array is not None and not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name}: got {_shown(array)}, expected an array or None")
    if softcap is not None:
        accepted = "a finite number above 0, or None"
        if not 0 < _number("softcap", softcap, accepted) < math.inf:
            raise ValueError(f"softcap: got {_shown(softcap)}, expected {accepted}")
    accepted = "a probability in [0, 1)"
    dropout = _number("dropout_p", dropout_p, accepted)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout_p: got {_shown(dropout_p)}, expected {accepted}")
    if dropout > 0 and seed is None:
        raise ValueError(f"seed: got None, expected an integer, since dropout_p = {dropout}")
    _check_seed(seed)
    if num_splits is not None:
        accepted = f"an int from 1 to {MAX_SPLITS}, or None"
        if not 1 <= _whole("num_splits", num_splits, accepted) <= MAX_SPLITS:
            raise ValueError(f"num_splits: got {num_splits}, expected {accepted}")

    missing = {**arrays, "softcap": softcap, "score_mod": score_mod, "dropout_p": dropout or None}
    for name, value in missing.items():
        if value is not None:
            default = 0.0 if name == "dropout_p" else None
            raise NotImplementedError(
                f"{name}: got {_shown(value)}, but the backends of this version accept only "
                f"{default}; rawattn.reference.attention has the option, in float64 on the host"
            )
    if num_splits is not None and num_splits > 1:
        raise NotImplementedError(
            f"num_splits: got {num_splits}, but this version does not split keys: expected 1 or "
            "None"
        )


def _check_seed(seed: Any) -> None:
    accepted = "an int, or an integer array of one element"
    if seed is None or (isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)):
        return
    if not hasattr(seed, "__dlpack__"):
        raise TypeError(f"seed: got {_shown(seed)}, expected {accepted}")
    array = import_integers("seed", seed)
    if array.size != 1:
        raise ValueError(f"seed: got shape {array.shape}, expected {accepted}")


def _shown(value: Any) -> str:
    """For a message: short, and never the contents of an array, which may be on a GPU."""
    if hasattr(value, "__dlpack__"):
        return f"a {type(value).__name__} of shape {getattr(value, 'shape', None)}"
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


def _byte_range(array: Any, address: int) -> tuple[int, int]:
    """First byte and the one past the last of an array that is not empty."""
    low = high = address
    for stride, n in zip(array.strides, array.shape, strict=True):
        if stride < 0:
            low += stride * (n - 1)
        else:
            high += stride * (n - 1)
    return low, high + int(array.dtype.itemsize)


def _share_bytes(a: Any, b: Any) -> bool:
    """Whether two arrays have a byte in common; also when that is too hard to tell."""
    try:
        # NumPy's stubs have only the two special values of max_work.
        work: Any = 100_000
        return np.shares_memory(_Addresses(a).view(), _Addresses(b).view(), max_work=work)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """The addresses of an array, on any device, in NumPy's terms. Its memory is never touched."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "data": (_address(array), True),
        }

    def view(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)
