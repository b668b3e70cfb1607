"""The options that change scores, as plain values: the forms of their arrays, checked against the shapes of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rawattn._call import option_advice
from rawattn._call import options as _options
from rawattn._call.dtypes import DTYPE_NAMES
from rawattn._call.hints import padding_mask
from rawattn._call.integers import LONGEST
from rawattn._call.layout import Lengths, Side
from rawattn._call.options import SCORE_NUMBERS, ArrayForm, Options
from rawattn._interop.advice import cast
from rawattn._interop.integers import INTEGERS

_INT32_MAX = 2**31 - 1  # the kernels count an array's axes in 32 bits
_FLOAT32 = np.dtype(np.float32)


class Shapes(NamedTuple):
    """The shapes of a call, which arrays of options broadcast to.

    by_position: whether rows and keys count inside each sequence, as in packed batches and in pages.
    """

    dtype: np.dtype[Any]
    batch: int
    nheads_q: int
    nheads_kv: int
    rows_q: int
    rows_k: int
    by_position: bool
    framework: str | None = None  # of the caller's arrays, for messages; None if unknown


def describe(
    options: Options, arrays: Mapping[str, Any], shapes: Shapes, lengths: Lengths
) -> dict[str, Any]:
    """The fields of `ScoreOptions`. arrays: the options' arrays, by name.

    Raises TypeError or ValueError, naming the option, what was got and what is accepted.
    """
    _options.seed(options)
    text, scalars = options.score_mod or (None, ())
    found: dict[str, Any] = {name: read(options) for name, read in SCORE_NUMBERS.items()}
    found |= {
        name: check(name, arrays[name], shapes, lengths)
        for name, check in _CHECKS.items()
        if arrays.get(name) is not None
    }
    if options.mask is not None:
        # A `MaskForm`: the mask is a BlockMask, whose arrays are its bits and its map.
        given = options.mask.shape
        whole = four_axes("mask", given, shapes, lengths)
        found["mask"] = ArrayForm("bits", whole, given, kept=options.mask.kept)
    own = [x for name, x in arrays.items() if name.startswith("captured")]
    for x in own:
        if max(x.shape, default=0) > _INT32_MAX:
            raise ValueError(
                f"score_mod: got a captured array of shape {tuple(x.shape)}, expected at most {_INT32_MAX} along each axis"
            )
    captured = tuple(ArrayForm(x.dtype.name, x.shape, x.shape) for x in own)
    if text is not None:
        text = text.of_strides(x.strides for x in own)
    return {**found, "score_mod": text, "score_scalars": scalars, "captured": captured}


def _bias(name: str, array: Any, shapes: Shapes, lengths: Lengths) -> ArrayForm:
    if array.dtype not in (shapes.dtype, _FLOAT32):
        if array.dtype == np.bool_:
            raise TypeError(
                f"{name}: got dtype bool, expected numbers that are added to scores; write mask= (True = keep)"
            )
        own = "" if shapes.dtype == _FLOAT32 else f"{shapes.dtype}, that of q, or "
        raise _wrong_dtype(name, array, f"{own}float32", shapes)
    shape = four_axes(name, array.shape, shapes, lengths)
    dense = shape[3] > 1 and array.strides[-1] == array.dtype.itemsize
    return ArrayForm(DTYPE_NAMES[array.dtype], shape, tuple(array.shape), dense)


def _mask(name: str, array: Any, shapes: Shapes, lengths: Lengths) -> ArrayForm:
    if array.dtype != np.bool_:
        raise TypeError(
            f"{name}: got dtype {array.dtype}, expected bool, where True keeps a key; what is added to scores is bias=, "
            f"and of a mask of 1 and 0 pass {name} != 0"
        )
    return ArrayForm("bool", four_axes(name, array.shape, shapes, lengths), tuple(array.shape))


def _alibi_slopes(name: str, array: Any, shapes: Shapes, lengths: Lengths) -> ArrayForm:
    if array.dtype not in DTYPE_NAMES:
        raise _wrong_dtype(name, array, "float32, float16 or bfloat16", shapes)
    expected = ((shapes.nheads_q,), (shapes.batch, shapes.nheads_q))
    if array.shape not in expected:
        raise ValueError(
            f"{name}: got shape {array.shape}, expected (nheads_q,) = {expected[0]} or (batch, nheads_q) = {expected[1]}; "
            f"{_slopes_advice(array.shape, expected)}"
        )
    return ArrayForm(DTYPE_NAMES[array.dtype], (1, *array.shape)[-2:], tuple(array.shape))


def _slopes_advice(shape: tuple[int, ...], expected: tuple[tuple[int, ...], ...]) -> str:
    for wanted in expected:
        if shape == wanted[::-1]:
            return "pass alibi_slopes.T"
        # Only where it leaves the order of heads and sequences as it is.
        if [n for n in shape if n > 1] == [n for n in wanted if n > 1]:
            return f"pass alibi_slopes.reshape{wanted}"
    return "pass a slope for each query head"


def _sink_logits(name: str, array: Any, shapes: Shapes, lengths: Lengths) -> ArrayForm:
    if array.dtype not in DTYPE_NAMES:
        raise _wrong_dtype(name, array, "float32, float16 or bfloat16", shapes)
    if array.shape != (shapes.nheads_q,):
        raise ValueError(
            f"{name}: got shape {array.shape}, expected (nheads_q,) = ({shapes.nheads_q},)"
        )
    return ArrayForm(DTYPE_NAMES[array.dtype], tuple(array.shape), tuple(array.shape))


def _wrong_dtype(name: str, array: Any, accepted: str, shapes: Shapes) -> TypeError:
    return TypeError(
        f"{name}: got dtype {array.dtype}, expected {accepted}; convert it, as by "
        f"{cast(shapes.framework, name, 'float32')}"
    )


def _seed(name: str, array: Any, shapes: Shapes, lengths: Lengths) -> ArrayForm:
    if array.dtype not in INTEGERS:
        raise TypeError(
            f"{name}: got dtype {array.dtype}, expected int32 or int64, or an int{option_advice.seed(array, shapes.framework)}"
        )
    if int(np.prod(array.shape)) != 1:
        raise ValueError(f"{name}: got shape {array.shape}, expected an array of one element")
    return ArrayForm(array.dtype.name, (), tuple(array.shape))


_CHECKS: dict[str, Callable[[str, Any, Shapes, Lengths], ArrayForm]] = {
    "bias": _bias,
    "mask": _mask,
    "alibi_slopes": _alibi_slopes,
    "sink_logits": _sink_logits,
    "seed": _seed,
}


def _longest(side: Side) -> int:
    """A bound of the sequences' lengths, to check the shapes of a bias or mask against.

    Lengths on a GPU may all be shorter than their slots or pages, so without the caller's maximum they give no bound.
    Kernels never read outside of the array, whatever the lengths are: beyond an axis they read its last element. So an axis
    that such lengths count along has one, whatever maximum was promised.
    """
    integers = side.start if side.length is None else side.length
    if integers is None or isinstance(integers, np.ndarray):
        return side.max_seqlen
    return max(side.max_seqlen if side.promised else 0, min(side.rows, 1))


def four_axes(
    name: str, shape: tuple[int, ...], shapes: Shapes, lengths: Lengths
) -> tuple[int, ...]:
    """The shape of a bias or mask with all axes: (1 or batch, heads, 1 or rows, 1 or keys). ValueError if it does not fit."""
    whole = (1,) * (4 - len(shape)) + tuple(shape)
    nheads = (1, shapes.nheads_kv, shapes.nheads_q)
    good = len(shape) <= 4 and whole[0] in (1, shapes.batch) and whole[1] in nheads
    if shapes.by_position:
        longest = tuple(map(_longest, (lengths.q, lengths.k)))
        good = good and all(n == 1 or n >= most for n, most in zip(whole[2:], longest, strict=True))
        good = good and max(whole[2:]) <= LONGEST
        rows = f"1 or >= {longest[0]} (longest sequence), 1 or >= {longest[1]}"
        if max(whole[2:]) > LONGEST:
            rows += f", both at most {LONGEST}"
    else:
        good = good and whole[2] in (1, shapes.rows_q) and whole[3] in (1, shapes.rows_k)
        rows = f"1 or {shapes.rows_q} (seqlen_q), 1 or {shapes.rows_k} (seqlen_k)"
    if not good:
        rows_of_each = shapes.rows_q, shapes.rows_k
        hint = padding_mask(tuple(shape), shapes.batch, *rows_of_each, shapes.by_position)
        raise ValueError(
            f"{name}: got shape {tuple(shape)}, expected at most four axes that broadcast to "
            f"(1 or {shapes.batch} (batch), 1, {shapes.nheads_kv} (nheads_kv) or "
            f"{shapes.nheads_q} (nheads_q), {rows}){hint if name == 'mask' else ''}"
        )
    return whole
