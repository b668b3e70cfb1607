"""Arrays of over 2^31 elements, and strides of over 2^31, wherever an offset is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import reference
from tests.frameworks import CuPy
from tests.memory import DTYPES
from tests.tolerance import check, check_lse, low_precision_attention

cupy = pytest.importorskip("cupy")

CUPY = CuPy()
BFLOAT16 = DTYPES["bfloat16"]
_HEADS, _DIM = 8, 128
_ROWS = (1 << 31) // (_HEADS * _DIM) + 333  # rows of _HEADS x _DIM: just over 2^31 elements
_NAN = 0x7FC0


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of free GPU memory, there are {free >> 30}")
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def _filled(shape: tuple[int, ...], bits: int) -> Any:
    array = cupy.empty(shape, np.uint16)
    array.fill(bits)
    return array.view(BFLOAT16)


def _normal(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(list(shape))
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def _set(array: Any, rows: slice, values: np.ndarray) -> None:
    array.view(np.uint16)[rows] = cupy.asarray(values.view(np.uint16))


def _compare(got: Any, lse: Any, q: Any, k: Any, v: Any, what: str, **options: Any) -> None:
    """Checks `got` (rows, heads, dim) and `lse` (heads, rows) against the reference of one sequence."""
    arrays = [x[None] for x in (q, k, v)]
    exact, exact_lse = reference.attention(*arrays, **options, return_lse=True)
    low, low_lse = low_precision_attention(*arrays, **options)
    check(CUPY.host(got)[None], exact, low, what=what)
    check_lse(CUPY.host(lse)[None], exact_lse, low_lse, what=f"lse of {what}")


# The first rows, those about 2^30 and 2^31 elements in, the last ones.
_ROWS_AT = [
    slice(0, 7),
    slice((1 << 30) // (_HEADS * _DIM) - 5, (1 << 30) // (_HEADS * _DIM) + 5),
    slice((1 << 31) // (_HEADS * _DIM) - 5, (1 << 31) // (_HEADS * _DIM) + 5),
    slice(_ROWS - 7, _ROWS),
]


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "group"])
def test_many_queries(packed: bool) -> None:
    """q and out may have over 2^31 elements."""
    q = _filled((_ROWS, _HEADS, _DIM), 0)
    k, v = _normal(2, 70, _HEADS, _DIM)
    some = _normal(len(_ROWS_AT), 10, _HEADS, _DIM)
    for at, values in zip(_ROWS_AT, some, strict=True):
        _set(q, at, values[: at.stop - at.start])
    on_gpu = [_filled(k.shape, 0), _filled(v.shape, 0)]
    for array, values in zip(on_gpu, (k, v), strict=True):
        _set(array, slice(None), values)
    if packed:
        seqs = rawattn.SeqLayout(seqstart_q=[0, _ROWS], seqstart_k=[0, 70])
        out, lse = rawattn.attention(q, *on_gpu, seqs=seqs, return_lse=True)
    else:
        out, lse = rawattn.attention(q[None], *(x[None] for x in on_gpu), return_lse=True)
        out, lse = out[0], lse[0]
    for at, values in zip(_ROWS_AT, some, strict=True):
        rows = values[: at.stop - at.start]
        _compare(out[at], lse[:, at], rows, k, v, f"rows {at.start} to {at.stop}")


def test_many_keys() -> None:
    """k and v may have over 2^31 elements. Rows see a window and sinks; the keys between them are NaN and never read."""
    sink, last, rows = 4, 600, 40
    k, v = _filled((_ROWS, _HEADS, _DIM), _NAN), _filled((_ROWS, _HEADS, _DIM), _NAN)
    real = _normal(2, sink + last, _HEADS, _DIM)
    # The kernel reads whole key tiles, so the keys beside the visible ones hold numbers too.
    for array, values in zip((k, v), real, strict=True):
        _set(array, slice(0, 256), np.zeros((256, _HEADS, _DIM), BFLOAT16))
        _set(array, slice(0, sink), values[:sink])
        _set(array, slice(_ROWS - last, _ROWS), values[sink:])
    q = _normal(rows, _HEADS, _DIM)
    on_gpu = _filled(q.shape, 0)
    _set(on_gpu, slice(None), q)
    options = {"causal": True, "window": (300, 0), "sink": sink}
    out, lse = rawattn.attention(on_gpu[None], k[None], v[None], **options, return_lse=True)
    # The window counts from the last key, so the keys that no row sees can be left out for the reference.
    _compare(out[0], lse[0], q, *real, "the last queries", **options)


def test_sequences_far_into_the_arrays() -> None:
    """Packed sequences may begin over 2^31 elements into q, k, v and out. Padding rows hold NaN."""
    q, k, v = (_filled((_ROWS, _HEADS, _DIM), _NAN) for _ in range(3))
    out = cupy.zeros((_ROWS, _HEADS, _DIM), np.uint16).view(BFLOAT16)
    first = _ROWS - 300
    values = _normal(3, 300, _HEADS, _DIM)
    for array, rows in zip((q, k, v), values, strict=True):
        _set(array, slice(first, _ROWS), rows)
    starts = cupy.asarray(np.array([first, first + 200, first + 300], np.int64))
    seqs = rawattn.SeqLayout(seqstart_q=starts, max_seqlen_q=200, max_seqlen_k=200)
    _, lse = rawattn.attention(q, k, v, seqs=seqs, causal=True, out=out, return_lse=True)
    for begin, end in ((0, 200), (200, 300)):
        at = slice(first + begin, first + end)
        rows = (x[begin:end] for x in values)
        _compare(out[at], lse[:, at], *rows, f"sequence at {at.start}", causal=True)
    assert int(cupy.count_nonzero(out.view(np.uint16)[:first])) == 0, "rows of out= were touched"


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "row", "head"])
def test_long_strides(axis: int) -> None:
    """The last index of one axis times its stride may pass 2^31. The other strides are those of a small array."""
    shape = (2, 3, 4, 64)
    elements = int(np.prod(shape))
    far = (1 << 31) // (shape[axis] - 1) // 8 * 8 + 64
    strides = [shape[1] * shape[2] * 64, shape[2] * 64, 64, 1]
    strides[axis] = far
    # q, k, v and out lie in one buffer: the gaps of each array hold the others.
    memory = _filled((far * (shape[axis] - 1) + 5 * elements,), _NAN)
    arrays = [
        cupy.ndarray(
            shape, BFLOAT16, memory.data + 2 * n * elements, tuple(2 * stride for stride in strides)
        )
        for n in range(4)
    ]
    values = _normal(3, *shape)
    for array, some in zip(arrays, values, strict=False):
        array.view(np.uint16)[...] = cupy.asarray(some.view(np.uint16))
    q, k, v, out = arrays
    given, lse = rawattn.attention(q, k, v, out=out, causal=True, return_lse=True)
    assert given is out
    for batch in range(shape[0]):
        _compare(out[batch], lse[batch], *values[:, batch], f"batch {batch}", causal=True)
    for array, some in zip(arrays, values, strict=False):
        np.testing.assert_array_equal(CUPY.host(array).view(np.uint16), some.view(np.uint16))


def test_captured_arrays_of_long_steps() -> None:
    """A captured array may take more than 2^31 bytes from one element of an axis to the next."""
    step = (1 << 31) + 64
    memory = cupy.cuda.alloc(2 * step + 4 * 90)
    shape, strides = (3, 90), (step, 4)
    table = cupy.ndarray(shape, np.float32, memory, strides)
    values = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    for row, numbers in zip(table, values, strict=True):
        row[...] = cupy.asarray(numbers)
    q, k, v = _normal(3, 90, 3, 64)
    on_gpu = [_filled(q.shape, 0) for _ in range(3)]
    for array, numbers in zip(on_gpu, (q, k, v), strict=True):
        _set(array, slice(None), numbers)
    text = "score + table[head, kv_idx]"
    out, lse = rawattn.attention(
        *(x[None] for x in on_gpu), score_mod=rawattn.ScoreMod(text, table=table), return_lse=True
    )
    _compare(out[0], lse[0], q, k, v, "out", score_mod=rawattn.ScoreMod(text, table=values))
