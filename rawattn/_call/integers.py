"""The integers of a layout: read from any framework, checked on the host, computed on the device where they are."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn._call.option_advice import number
from rawattn._interop import dynamo, xla
from rawattn._interop.arrays import (
    framework_of,
    import_array,
    on_stream_of,
)
from rawattn._interop.integers import INTEGERS, as_array, import_integers, of_torch

Integers = NDArray[np.integer[Any]]

_INT = {int}
# Up to so many integers, loops over a Python list find their maximum and check their order faster than NumPy does.
FEW = 64
_TOO_MANY_ROWS = 2**62
LAST_POSITION = 2**30  # kLastPosition in kernels_cu/attn/sequence.cuh
LONGEST = 0x7FFF0000  # rows of a sequence at most: kLongest there

_RIGHT = (
    "expected padding after the real tokens alone; pad on the right, or give attention the mask as "
    "mask={mask}[:, None, None, :]"
)


def most_of(name: str, lengths: Integers) -> tuple[int, int]:
    """The longest of some lengths (0 without any) and their sum. ValueError for a negative one."""
    if lengths.size <= FEW:
        few = lengths.tolist()
        if not few:
            return 0, 0
        if min(few) >= 0:
            return max(few), sum(few)
    negative = lengths < 0
    if np.count_nonzero(negative):
        i = int(negative.argmax())
        if lengths[i] == dynamo.NO_PREFIX:
            mask = name.replace("seqlen", "mask")
            raise ValueError(
                f"{mask}: got row {i} with padding before a real token, {_RIGHT.format(mask=mask)}"
            )
        raise ValueError(f"{name}: got {lengths[i]} (index {i}), expected lengths >= 0")
    return int(lengths.max()), int(np.add.reduce(lengths))


def most_between(name: str, offsets: Integers) -> tuple[int, int, int]:
    """The largest difference of two successive offsets, the first offset and the last. Checked as in `differences`."""
    if offsets.size <= FEW:
        few = offsets.tolist()
        last, longest = few[0], 0
        for offset in few:
            step = offset - last
            if step > longest:
                longest = step
            elif step < 0:
                break
            last = offset
        else:
            if few[0] >= 0:
                return longest, few[0], last
    lengths = differences(name, offsets)
    return int(lengths.max(initial=0)), int(offsets[0]), int(offsets[-1])


def read(name: str, value: Any) -> Any:
    """A one-dimensional array of integers: a copy of host data, a GPU array as it is.

    A JAX tracer also stays as it is: `rawattn.jax` makes it an operand of its call.

    name: the argument. Those that begin with `seqlen`, `lengths` or `position` are (batch,), others (batch + 1,).
    """
    return as_array(read_in_place(name, value))


def read_in_place(name: str, value: Any) -> Any:
    """`read`, but a CUDA tensor of torch becomes `TensorIntegers`, the form in which a layout keeps it."""
    kind, array = type(value), None
    # The common types come first, each with a short path.
    if kind is np.ndarray and value.dtype in INTEGERS:
        array = value.copy()
    elif kind is list and set(map(type, value)) == _INT:
        with contextlib.suppress(OverflowError):  # an int that int64 cannot hold is refused below
            array = np.array(value, np.int64)
    elif kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        if value.dtype in INTEGERS and value.ndim == 1 and value.size and value._c_contiguous:
            return value
    elif framework_of(value) == "torch" and (tensor := of_torch(value)) is not None and tensor.size:
        return tensor
    if array is None:
        array = _imported(name, value)
    if array.ndim != 1 or (not array.size and not _one_each(name)):
        shape = "(batch,)" if _one_each(name) else "(batch + 1,)"
        raise ValueError(f"{name}: got shape {array.shape}, expected {shape}")
    if type(array) is np.ndarray:
        array.setflags(write=False)
    elif not xla.is_traced(array) and not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: got a GPU array of stride {array.strides[0]} bytes, expected a "
            "contiguous one, since it is read in place at every call; pass a contiguous copy"
        )
    return array


def _one_each(name: str) -> bool:
    """Whether an argument has one integer for each sequence."""
    return name.startswith(("seqlen", "lengths", "position"))


def _imported(name: str, value: Any) -> Any:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        raise TypeError(_one_int(name, int(value)))
    if xla.is_traced(value):
        if value.dtype not in INTEGERS:
            raise TypeError(f"{name}: got {value.dtype}; accepted are int32 and int64 arrays")
        return value
    array = import_integers(name, value)
    if isinstance(array, np.ndarray):
        return np.array(array, dtype=np.int32 if array.dtype.itemsize == 4 else np.int64)
    return array


def _one_int(name: str, value: int) -> str:
    if _one_each(name):
        position = name.startswith("position")
        what, alike = ("position", "the same") if position else ("length", "as long")
        advice = (
            f"a {what} for each sequence: [{value}] for a batch of one, [{value}] * batch where all "
            f"are {alike}"
        )
        if name.startswith("seqlen"):
            advice += f"; a bound on the lengths is seqs=SeqLayout(max_{name}={value})"
    else:
        advice = f"batch + 1 offsets: [0, {value}] for one sequence of {value} rows"
    return f"{name}: got the int {value}, expected {advice}"


def maximum(name: str, value: Any) -> int:
    """max_seqlen_q or max_seqlen_k as an int >= 0."""
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{name}: got {type(value).__name__}, expected an int >= 0 or None{number(name, value)}"
        )
    if value < 0:
        raise ValueError(f"{name}: got {value}, expected an int >= 0 or None")
    return int(value)


def differences(name: str, offsets: Integers) -> Integers:
    """The differences of successive offsets. ValueError if an offset is negative or less than the one before it."""
    before, after = offsets[:-1], offsets[1:]
    if offsets[0] < 0:
        raise ValueError(f"{name}: got {offsets[0]} first, expected offsets >= 0")
    falls = after < before  # not after - before < 0: the difference may wrap around
    if np.count_nonzero(falls):
        i = int(falls.argmax())
        raise ValueError(
            f"{name}: got {after[i]} after {before[i]} (index {i + 1}), expected offsets that do "
            "not decrease"
        )
    return after - before


def check_at_most(name: str, lengths: Integers, most: Integers | int, what: str) -> None:
    """Raise ValueError for the first length above its bound. most: one bound for all lengths, or one for each."""
    longer = lengths > most
    if np.count_nonzero(longer):
        i = int(longer.argmax())
        limit = most if isinstance(most, int) else most[i]
        raise ValueError(
            f"{name}: got length {lengths[i]} for sequence {i}, expected at most {limit}, {what}"
        )


def check_positions(name: str, positions: Integers) -> None:
    """ValueError for a position on the host that is negative or above `LAST_POSITION`."""
    wrong = (positions < 0) | (positions > LAST_POSITION)
    if np.count_nonzero(wrong):
        i = int(wrong.argmax())
        raise ValueError(
            f"{name}: got {positions[i]} for sequence {i}, expected a position from 0 to {LAST_POSITION}"
        )


def starts_from_lengths(name: str, value: Any) -> Any:
    """Starts of sequences that follow each other without a gap, int64, on the device of the lengths."""
    if dynamo.is_compiling():
        return dynamo.starts_from_lengths(name, value)
    if xla.is_traced(value):
        # JAX is loaded, since it is tracing a function.
        return sys.modules["jax"].numpy.pad(read(name, value).cumsum(), (1, 0))
    with on_stream_of(value, framework_of(value)):
        lengths = read(name, value)
        if isinstance(lengths, np.ndarray):
            most_of(name, lengths)
            if lengths.sum(dtype=np.float64) >= _TOO_MANY_ROWS:
                raise ValueError(
                    f"{name}: got lengths whose sum is 2**62 or more, expected fewer rows"
                )
            starts = np.zeros(lengths.size + 1, np.int64)
            np.cumsum(lengths, out=starts[1:])
            return starts
        import cupy

        with lengths.device:
            starts = cupy.zeros(lengths.size + 1, np.int64)
            cupy.cumsum(lengths, dtype=np.int64, out=starts[1:])
        return starts


def lengths_from_mask(name: str, value: Any) -> Any:
    """The number of real tokens in each row of a padding mask, on the mask's device; int64, in JAX traces int32.

    ValueError for a mask on the host unless the real tokens of each row come first.
    """
    if isinstance(value, (list, tuple)):
        raise TypeError(
            f"{name}: got {type(value).__name__}; expected an array of bool (batch, seqlen), True for a real token; pass "
            f"np.asarray({name}, bool)"
        )
    if dynamo.is_compiling():
        return dynamo.lengths_from_mask(name, value)
    with on_stream_of(value, framework_of(value)) as stream:
        traced = xla.is_traced(value)
        mask = value if traced else import_array(name, value, stream=stream).array
        if mask.dtype != np.bool_:
            raise TypeError(dynamo.mask_dtype_message(name, mask.dtype))
        if mask.ndim != 2:
            raise ValueError(f"{name}: got shape {mask.shape}, expected (batch, seqlen)")
        if isinstance(mask, np.ndarray):
            _check_prefixes(name, mask)
            return mask.sum(axis=1, dtype=np.int64)
        if traced:
            return mask.sum(axis=1, dtype=np.int32)
        with mask.device:
            return mask.sum(axis=1, dtype=np.int64)


def _check_prefixes(name: str, mask: NDArray[np.bool_]) -> None:
    resumes = mask[:, 1:] & ~mask[:, :-1]  # real tokens directly behind padding
    if np.count_nonzero(resumes):
        row, column = (int(i) for i in np.argwhere(resumes)[0])
        raise ValueError(
            f"{name}: got row {row} with padding at position {column} before a real token at "
            f"{column + 1}, {_RIGHT.format(mask=name)}"
        )
