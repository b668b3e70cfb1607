"""Parameter structs of the kernels, declared field by field, and how they are filled in.

kernels_cu/attn/params.cuh has the same structs with what each field means. Every kernel asserts, when it is compiled, that
each field is where the host puts it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

POINTER = np.uint64

_INTEGERS = np.dtype([("data", POINTER), ("is_64bit", np.int64)], align=True)
SIDE = np.dtype(
    [("start", _INTEGERS), ("length", _INTEGERS), ("cumulative", np.int64), ("rows", np.int64)],
    align=True,
)
_STRIDES = np.dtype([("batch", np.int64), ("row", np.int64), ("head", np.int64)], align=True)
_STREAM_K = np.dtype([("tiles", np.int32), ("piece", np.int32)], align=True)


@dataclass(frozen=True, slots=True, eq=False)
class Struct:
    """A struct by its C++ name."""

    name: str
    dtype: np.dtype[Any]

    def zeros(self) -> np.ndarray[Any, Any]:
        """One of it, empty: an array of one element, whose fields are set by name."""
        return np.zeros(1, self.dtype)


def _struct(name: str, *fields: Any) -> Struct:
    return Struct(name, np.dtype(list(fields), align=True))


FORWARD = _struct(
    "ForwardParams",
    ("q", POINTER),
    ("k", POINTER),
    ("v", POINTER),
    ("out", POINTER),
    ("lse", POINTER),
    ("q_strides", _STRIDES),
    ("k_strides", _STRIDES),
    ("v_strides", _STRIDES),
    ("out_strides", _STRIDES),
    ("lse_batch", np.int64),
    ("lse_head", np.int64),
    ("q_side", SIDE),
    ("k_side", SIDE),
    ("order", POINTER),
    ("first_tile", POINTER),
    ("window_left", np.int64),
    ("window_right", np.int64),
    ("sink", np.int64),
    ("batch", np.int32),
    ("nheads_q", np.int32),
    ("nheads_kv", np.int32),
    ("section_keys", np.int32),
    ("scale", np.float32),
)

BACKWARD = _struct(
    "BackwardParams",
    ("forward", FORWARD.dtype),
    ("dout", POINTER),
    ("dlse", POINTER),
    ("dq", POINTER),
    ("dk", POINTER),
    ("dv", POINTER),
    ("row_delta", POINTER),
    ("dq_sum", POINTER),
    ("dout_strides", _STRIDES),
    ("dq_strides", _STRIDES),
    ("dk_strides", _STRIDES),
    ("dv_strides", _STRIDES),
    ("section_queries", np.int32),
)

SM90_FORWARD = _struct(
    "Sm90ForwardParams",
    ("forward", FORWARD.dtype),
    ("next_work", POINTER),
    ("arrived", POINTER),
    ("partials", POINTER),
    ("row_bound_q", np.int32),
    ("row_bound_k", np.int32),
    ("kept_tiles", np.int32),
    ("stream_k", _STREAM_K),
)

SCHEDULE = _struct(
    "ScheduleParams",
    ("q_side", SIDE),
    ("k_side", SIDE),
    ("order", POINTER),
    ("first_tile", POINTER),
    ("batch", np.int32),
    ("tile_q", np.int32),
)

REPACK = _struct(
    "RepackParams",
    ("from", POINTER),
    ("to", POINTER),
    ("strides", _STRIDES),
    ("rows", np.int64),
    ("batch", np.int32),
    ("nheads", np.int32),
)

PADDING = _struct(
    "PaddingParams",
    ("out", POINTER),
    ("lse", POINTER),
    ("out_strides", _STRIDES),
    ("lse_batch", np.int64),
    ("lse_head", np.int64),
    ("side", SIDE),
    ("batch", np.int32),
    ("nheads", np.int32),
    ("headdim", np.int32),
    ("element_bytes", np.int32),
    ("parts", np.int32),
)

# Launches carry at most 4096 bytes of parameters on every driver that this library runs with.
WORDS_A_LAUNCH = 1000
WORDS = _struct(
    "WordsParams", ("to", POINTER), ("count", np.int32), ("words", np.uint32, (WORDS_A_LAUNCH,))
)


def offset(struct: Struct, path: str) -> int:
    """Where a field is, such as "forward.q_side.start.data"."""
    at, dtype = 0, struct.dtype
    for name in path.split("."):
        assert dtype.fields is not None
        dtype, start = dtype.fields[name][:2]
        at += start
    return at


def fill(struct: Struct, values: Mapping[str, Any]) -> bytes:
    """The bytes of a struct with these fields, given by path, and zeros elsewhere."""
    packed = struct.zeros()
    for path, value in values.items():
        *outer, last = path.split(".")
        record: Any = packed[0]
        for name in outer:
            record = record[name]
        record[last] = value
    return packed.tobytes()


@functools.cache
def assertions(struct: Struct) -> tuple[str, ...]:
    """C++ that does not compile unless the kernel's struct is laid out like this one."""
    told = "the host lays it out so"
    lines = [
        f'static_assert(OFFSET_OF({struct.name}, {path}) == {at}, "{told}");'
        for path, at in _leaves(struct.dtype)
    ]
    return (
        *lines,
        f'static_assert(sizeof({struct.name}) == {struct.dtype.itemsize}, "{told}");',
    )


def _leaves(dtype: np.dtype[Any]) -> Iterator[tuple[str, int]]:
    assert dtype.fields is not None
    for name, (inner, start, *_) in dtype.fields.items():
        if inner.fields is None:
            yield name, start
        else:
            yield from ((f"{name}.{path}", start + at) for path, at in _leaves(inner))
