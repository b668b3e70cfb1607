"""What a call means: the `Problem` of its shapes and options."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn._call.integers import LONGEST
from rawattn._call.problem import Problem, describe, result_shapes
from rawattn._call.seq_layout import SeqLayout
from tests.problems import BATCH, BFLOAT16, INT32_MAX, PACKED, arrays, problem

ROOT = Path(__file__).resolve().parents[1]
STARTS = SeqLayout(seqstart_q=[0, 5, 15], seqstart_k=[0, 7, 21])


def test_a_dense_batch() -> None:
    described, lengths = describe(**arrays(BATCH))
    assert described == Problem(
        dtype="float16",
        batch=3,
        nheads_q=4,
        nheads_kv=2,
        headdim=8,
        headdim_v=16,
        packed=False,
        rows_q=5,
        rows_k=7,
        max_seqlen_q=5,
        max_seqlen_k=7,
        ragged=False,
        window_left=None,
        window_right=None,
        sink=0,
        top_left=False,
        scale=1 / math.sqrt(8),
    )
    assert (lengths.batch, lengths.q.rows, lengths.k.rows) == (3, 5, 7)


def test_a_packed_batch() -> None:
    described, lengths = describe(**arrays(PACKED), seqs=STARTS)
    assert (described.packed, described.ragged, described.batch) == (True, True, 2)
    assert (described.rows_q, described.rows_k) == (15, 21)
    assert (described.max_seqlen_q, described.max_seqlen_k) == (10, 14)
    assert lengths.packed


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_k", "cu_seqlen_q", "cu_seqlen_k"])
def test_a_padded_batch_is_ragged(name: str) -> None:
    integers = [0, 1, 2, 3] if name.startswith("cu") else [1, 2, 3]
    described = problem(seqs=SeqLayout(**{name: integers}))
    assert (described.packed, described.ragged) == (False, True)


def test_a_layout_without_lengths_is_not_ragged() -> None:
    assert problem(seqs=SeqLayout()) == problem()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_dtypes(dtype: Any) -> None:
    assert describe(**arrays(BATCH, dtype))[0].dtype == np.dtype(dtype).name


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 2, np.float32(0.25), np.int64(3), 2.0**127])
def test_scale_becomes_a_float(scale: Any) -> None:
    described = problem(scale=scale).scale
    assert type(described) is float
    assert described == scale


def test_a_bfloat16_scale() -> None:
    assert problem(scale=ml_dtypes.bfloat16(0.25)).scale == 0.25


@pytest.mark.parametrize(
    ("options", "left", "right", "sink"),
    [
        pytest.param({}, None, None, 0, id="none"),
        pytest.param({"causal": True}, None, 0, 0, id="causal"),
        pytest.param({"causal": np.bool_(True)}, None, 0, 0, id="numpy-causal"),
        pytest.param({"causal": np.bool_(False)}, None, None, 0, id="numpy-not-causal"),
        pytest.param({"window": (3, 4)}, 3, 4, 0, id="window"),
        pytest.param({"window": (0, 0)}, 0, 0, 0, id="diagonal"),
        pytest.param({"window": (None, 4)}, None, 4, 0, id="right-alone"),
        pytest.param({"window": (3, None)}, 3, None, 0, id="left-alone"),
        pytest.param({"window": (None, None)}, None, None, 0, id="unbounded"),
        pytest.param({"window": (np.int32(3), np.int64(4))}, 3, 4, 0, id="numpy-window"),
        pytest.param({"window": (3, 4), "causal": True}, 3, 0, 0, id="causal-over-right"),
        pytest.param({"window": (3, None), "causal": True}, 3, 0, 0, id="causal-bounds-right"),
        pytest.param({"window": (2**70, 2**70)}, None, None, 0, id="huge"),
        pytest.param({"window": (3, 0), "sink": 2}, 3, 0, 2, id="sink"),
        pytest.param({"window": (3, 0), "sink": np.int64(2)}, 3, 0, 2, id="numpy-sink"),
        pytest.param({"causal": True, "sink": 2}, None, 0, 0, id="sink-without-left"),
        pytest.param({"window": (3, 0), "sink": 2**70}, 3, 0, INT32_MAX, id="huge-sink"),
    ],
)
def test_window_and_sink(
    options: dict[str, Any], left: int | None, right: int | None, sink: int
) -> None:
    described = problem(**options)
    assert (described.window_left, described.window_right, described.sink) == (left, right, sink)
    for value in (described.window_left, described.window_right, described.sink):
        assert value is None or type(value) is int


@pytest.mark.parametrize(("align", "top_left"), [("bottom-right", False), ("top-left", True)])
def test_align(align: str, top_left: bool) -> None:
    assert problem(align=align).top_left is top_left


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"seed": 7}, id="seed"),
        pytest.param({"seed": -(2**80)}, id="any-int-seed"),
        pytest.param({"seed": np.array([7])}, id="array-seed"),
        pytest.param({"dropout_p": 0}, id="int-dropout"),
        pytest.param({"dropout_p": np.float32(0)}, id="numpy-dropout"),
        pytest.param({"dropout_p": 0.0, "seed": np.int32(3)}, id="dropout-0-with-seed"),
    ],
)
def test_options_that_change_nothing(options: dict[str, Any]) -> None:
    assert problem(**options) == problem()


@pytest.mark.parametrize(
    ("change", "seqs"),
    [
        pytest.param({"q": (0, 5, 4, 8), "k": (0, 7, 2, 8), "v": (0, 7, 2, 16)}, None, id="batch"),
        pytest.param({"q": (3, 0, 4, 8)}, None, id="seqlen-q"),
        pytest.param({"k": (3, 0, 2, 8), "v": (3, 0, 2, 16)}, None, id="seqlen-k"),
        pytest.param(
            {"q": (0, 4, 8), "k": (0, 2, 8), "v": (0, 2, 16)},
            SeqLayout(seqstart_q=[0, 0]),
            id="totals",
        ),
        pytest.param(PACKED, SeqLayout(seqstart_q=[3], seqstart_k=[3]), id="packed-batch"),
    ],
)
def test_axes_of_length_0(change: dict[str, tuple[int, ...]], seqs: Any) -> None:
    described = problem(BATCH | change, seqs=seqs)
    assert min(described.batch, described.rows_q, described.rows_k) == 0


@pytest.mark.parametrize("headdim", [1, 3, 256])
@pytest.mark.parametrize("headdim_v", [1, 256])
def test_headdims(headdim: int, headdim_v: int) -> None:
    described = problem(
        {"q": (1, 2, 2, headdim), "k": (1, 2, 1, headdim), "v": (1, 2, 1, headdim_v)}
    )
    assert (described.headdim, described.headdim_v) == (headdim, headdim_v)


@pytest.mark.parametrize(
    ("shape", "dense"),
    [((5, 7), True), ((1, 7), True), ((5, 1), False), ((4, 1, 1), False), ((), False)],
)
def test_a_bias_is_dense_along_keys_that_it_has(shape: tuple[int, ...], dense: bool) -> None:
    for array in (np.zeros(shape, np.float16), np.zeros((*shape, 2), np.float16)[..., 0]):
        form = problem(bias=array).bias
        assert form is not None and form.dense == (dense and array.flags.c_contiguous)


def test_result_shapes() -> None:
    assert result_shapes(problem()) == ((3, 5, 4, 16), (3, 4, 5))
    assert result_shapes(problem(PACKED, seqs=STARTS)) == ((15, 4, 16), (4, 15))


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(
            {"q": (3, 5, INT32_MAX, 8), "k": (3, 7, 1, 8), "v": (3, 7, 1, 16)}, id="heads"
        ),
        pytest.param(
            {name: (INT32_MAX, 0, *shape[2:]) for name, shape in BATCH.items()}, id="batch"
        ),
    ],
)
def test_int32_itself_is_legal(shapes: dict[str, tuple[int, ...]]) -> None:
    described = problem(BATCH | shapes)
    assert max(described.nheads_q, described.batch) == INT32_MAX


def test_the_longest_sequence_is_the_one_of_the_kernels() -> None:
    """Kernels clamp lengths to `kLongest`, behind which the end of a tile would not fit an int."""
    header = (ROOT / "kernels_cu/attn/sequence.cuh").read_text()
    assert f"constexpr int kLongest = {LONGEST:#x};" in header
    described = problem(BATCH | {"q": (3, LONGEST, 4, 8)})
    assert described.max_seqlen_q == LONGEST


def test_a_total_past_int32_is_legal() -> None:
    rows = 2**32
    shapes = {"q": (rows, 4, 8), "k": (rows, 2, 8), "v": (rows, 2, 16)}
    described = problem(shapes, seqs=SeqLayout(seqstart_q=[0, LONGEST, 2**31]))
    assert (described.rows_q, described.max_seqlen_q) == (rows, LONGEST)


def test_describe_is_fast() -> None:
    """`describe` takes less than three times as long as making its result. A limit in seconds would depend on the computer."""
    given = arrays(BATCH, BFLOAT16)
    made, _ = describe(**given, causal=True)
    best = [math.inf, math.inf]
    for _ in range(20):
        for n, call in enumerate((lambda: describe(**given, causal=True), lambda: replace(made))):
            start = time.perf_counter()
            for _ in range(100):
                call()
            best[n] = min(best[n], time.perf_counter() - start)
    assert best[0] < 3 * best[1]


@pytest.mark.parametrize("splits", [1, 2, 256, np.int64(2)])
def test_splits_are_numbers(splits: Any) -> None:
    described = problem(num_splits=splits).num_splits
    assert described == splits and type(described) is int
