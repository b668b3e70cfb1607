"""The CPU backend's forward: values for every tiling, NaN, memory, speed, and reproducible bits."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rawattn import reference
from rawattn._call.layout import host_lengths
from rawattn._call.problem import describe, result_shapes
from rawattn._cpu import forward as cpu_forward
from rawattn._cpu import threads, tiles
from tests import exhaustive
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import curated
from tests.inputs import materialise
from tests.random_cases import random_case
from tests.tolerance import check, check_lse
from tests.verify import _by_row, expected, layout

# Calls with several tiles of keys, of rows, or of both.
LONG = [
    dense("tiles", 1, 600, 1100, headdim=40, causal=True),
    dense("tiles-gqa", 1, 300, 700, nheads_q=6, nheads_kv=2, headdim=16, dtype="float32"),
    dense("tiles-gqa-wide", 1, 2, 700, nheads_q=300, nheads_kv=1, headdim=8, dtype="float32"),
    dense("tiles-window", 1, 900, 1300, headdim=24, window=(200, 30), sink=5, dtype="float32"),
    dense("tiles-far-sinks", 1, 1300, 700, headdim=24, window=(90, 0), sink=600, dtype="float16"),
    dense("tiles-decode", 3, 1, 1500, nheads_q=8, nheads_kv=2, headdim=128, headdim_v=96),
    dense("tiles-layout", 1, 300, 600, layout="reversed", dtype="float32", headdim=256),
    ragged("tiles-ragged", (700, 0, 40), (30, 600, 900), headdim=32, causal=True),
    padded("tiles-padded", (30, 400), (700, 0), 500, 800, headdim=72, headdim_v=20),
]
# Short sequences, which are computed in bundles of equal lengths, wherever they lie in memory.
SHORT = [
    ragged("short", (5, 3, 5, 5, 3), (5, 3, 5, 5, 3), dtype="float32", causal=True),
    ragged(
        "short-gaps",
        *((5, 4, 5, 5, 0, 4), (6, 2, 6, 6, 3, 2)),
        room_q=(7, 4, 5, 9, 2, 6),
        room_k=(6, 9, 8, 6, 3, 2),
        by_q="seqlen",
        by_k="cu_seqlen",
        lead=3,
        tail=1,
        nheads_q=6,
        window=(2, 1),
        sink=1,
    ),
    ragged("short-regular-gaps", (3,) * 9, (4,) * 9, room_q=(5,) * 9, by_q="seqlen", causal=True),
    ragged("short-without-keys", (3, 3, 2), (0, 0, 0), dtype="float32"),
    padded("short-padded", (5, 2, 5, 2, 2, 0), (7, 4, 7, 4, 4, 4), 6, 9, nheads_q=8, headdim_v=24),
    padded("short-rows-without-keys", (5, 5, 2), (3, 3, 0), 6, 5, causal=True, dtype="float32"),
    dense("short-vectors", 9, 1, 7, nheads_q=3, nheads_kv=1, headdim=1, headdim_v=40),
    dense("short-one-key", 4, 6, 1, dtype="float16", layout="reversed", scale=-0.3),
    dense("short-several-bundles", 90, 9, 11, nheads_q=8, nheads_kv=4, dtype="float32"),
]
FULL_SIZE = [case for case in curated() if case.name.startswith("long-")]


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, with_lse: bool = True, **options: Any
) -> tuple[np.ndarray, Any]:
    """Return out and lse. They hold NaN where nothing was written."""
    problem, bound = describe(q, k, v, **options)
    out_shape, lse_shape = result_shapes(problem)
    out = np.full(out_shape, np.nan, q.dtype)
    lse = np.full(lse_shape, np.nan, np.float32) if with_lse else None
    cpu_forward.forward(problem, host_lengths(bound), q, k, v, out, lse)
    return out, lse


def verify(case: Case) -> None:
    inputs = materialise(case)
    arrays = [x.view() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = forward(*arrays, **inputs.options, seqs=layout(inputs))
    exact, rows, by_row = expected(case), inputs.rows, _by_row(lse)
    # The rounding of a single probability gives an error relative to v, not to out, which shows if out has few elements.
    v = np.abs(np.nan_to_num(arrays[2].astype(np.float32))).max(initial=0)
    score = np.abs(exact.lse, where=np.isfinite(exact.lse), out=np.zeros_like(exact.lse))
    units = 8 + score.max(initial=0) if out.itemsize == 4 else 0
    floor = None if exact.out.size > 4096 else max(units * 2.0**-23, 0.5 * eps(out)) * v
    check(out[rows], exact.out, exact.low_out, what="out", floor=floor)
    check_lse(by_row[rows], exact.lse, exact.low_lse)
    assert np.isnan(out[~rows].astype(np.float32)).all(), "padding of out written"
    assert np.isnan(by_row[~rows]).all(), "padding of lse written"


def eps(array: np.ndarray) -> float:
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}[array.dtype.name]


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_short(case: Case) -> None:
    verify(case)


@pytest.mark.parametrize("case", exhaustive.thin([*LONG, *FULL_SIZE], 2), ids=str)
def test_long(case: Case) -> None:
    verify(case)


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_random(seed: int) -> None:
    verify(random_case(seed))


@pytest.mark.exhaustive
@settings(max_examples=150)
@given(st.integers(0, 1 << 32))
def test_more_random(seed: int) -> None:
    verify(random_case(seed))


@st.composite
def masks(draw: st.DrawFn) -> Case:
    """Draw calls of few rows and keys, with any mask and any small GQA group."""
    end = st.none() | st.integers(0, 12)
    nheads_kv = draw(st.integers(1, 3))
    return dense(
        "mask",
        draw(st.integers(1, 2)),
        draw(st.integers(0, 12)),
        draw(st.integers(0, 12)),
        headdim=draw(st.sampled_from([1, 4])),
        headdim_v=draw(st.sampled_from([1, 4])),
        nheads_q=nheads_kv * draw(st.integers(1, 3)),
        nheads_kv=nheads_kv,
        dtype="float32",
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.none() | st.tuples(end, end)),
        sink=draw(st.integers(0, 14)),
    )


@pytest.mark.parametrize(
    "shape", exhaustive.thin([((256, 512),), ((3, 4),), ((4, 2),), ((1, 1),)], 2), ids=str
)
def test_masks_and_tiles(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """Tiles of a few rows and keys give every case edges that full-size tiles do not have."""
    monkeypatch.setattr(tiles, "ROWS", shape[0])
    monkeypatch.setattr(tiles, "KEYS", shape[1])

    @settings(max_examples=100)
    @given(masks())
    @example(dense("sinks", 1, 9, 9, headdim=4, window=(0, 0), sink=3, dtype="float32"))
    @example(dense("all-sinks", 1, 9, 9, headdim=4, window=(0, 2), sink=9, dtype="float32"))
    def check_one(case: Case) -> None:
        verify(case)

    check_one()


def test_tiles_that_nobody_sees_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: list[tuple[int, int]] = []
    multiply_transposed = cpu_forward.multiply_transposed

    def counting(queries: Any, keys: Any, pieces: Any) -> Any:
        visited.append(pieces.shape)
        return multiply_transposed(queries, keys, pieces)

    monkeypatch.setattr(cpu_forward, "multiply_transposed", counting)
    monkeypatch.setattr(threads, "available_threads", lambda: 1)

    def scores(**options: Any) -> int:
        visited.clear()
        forward(*np.zeros((3, 1, 4096, 1, 8), np.float32), **options)
        return sum(rows * keys for rows, keys in visited)

    everything = 4096**2
    assert scores() == everything
    assert scores(causal=True) <= 0.55 * everything
    assert scores(window=(256, 0)) <= 0.15 * everything
    assert scores(window=(256, 0), sink=64) <= 0.2 * everything
    assert scores(window=(256, 0), sink=64) > scores(window=(256, 0))


@pytest.mark.parametrize("nkeys", [20, 900])
def test_nan_stays_with_those_that_see_it(nkeys: int) -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 1, nkeys, 2, 8), np.float32)
    bad = nkeys - 7
    clean, clean_lse = forward(q, k, v, causal=True)
    v[:, bad, 0] = np.inf
    out, lse = forward(q, k, v, causal=True)
    np.testing.assert_allclose(out[:, :bad], clean[:, :bad], atol=1e-6)
    np.testing.assert_allclose(out[:, :, 1], clean[:, :, 1], atol=1e-6)
    assert np.all(out[:, bad:, 0] == np.inf)
    np.testing.assert_array_equal(lse, clean_lse)
    k[:, bad, 0] = np.nan
    out, lse = forward(q, k, v, causal=True)
    np.testing.assert_allclose(out[:, :bad], clean[:, :bad], atol=1e-6)
    np.testing.assert_allclose(out[:, :, 1], clean[:, :, 1], atol=1e-6)
    np.testing.assert_array_equal(lse[:, :, :bad], clean_lse[:, :, :bad])
    assert np.isnan(out[:, bad:, 0]).all() and np.isnan(lse[:, 0, bad:]).all()


def test_nan_stays_with_its_sequence() -> None:
    """NaN reaches only the rows of its sequence that see it, though sequences are computed together."""
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 30, 6, 2, 8), np.float32)
    clean, clean_lse = forward(q, k, v, causal=True)
    v[7, 4, 1], v[9, 5, 0, 2], k[11, 3, 0] = np.nan, -np.inf, np.nan
    out, lse = forward(q, k, v, causal=True)
    spoilt = np.zeros(out.shape, bool)
    spoilt[7, 4:, 1] = spoilt[9, 5:, 0, 2] = spoilt[11, 3:, 0] = True
    np.testing.assert_array_equal(np.isfinite(out), ~spoilt)
    np.testing.assert_allclose(out[~spoilt], clean[~spoilt], atol=1e-6)
    assert np.all(out[9, 5, 0, 2] == -np.inf)
    np.testing.assert_array_equal(lse[11, 0, 3:], np.full(3, np.nan))
    lse[11, 0, 3:] = clean_lse[11, 0, 3:]
    np.testing.assert_array_equal(lse, clean_lse)


def test_dense_batch_needs_no_lengths() -> None:
    for seqlen in (6, 300):
        q, k, v = np.random.default_rng(0).standard_normal((3, 3, seqlen, 2, 16), np.float32)
        problem, _ = describe(q, k, v)
        out, lse = np.empty_like(q), np.empty((3, 2, seqlen), np.float32)
        cpu_forward.forward(problem, None, q, k, v, out, lse)
        with_lengths, with_lengths_lse = forward(q, k, v)
        np.testing.assert_array_equal(out, with_lengths)
        np.testing.assert_array_equal(lse, with_lengths_lse)


def test_rows_without_keys_are_written() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 16), np.float32)
    out, lse = forward(q, k[:, :3], v[:, :3], causal=True)
    assert not out[:, :5].any() and np.all(lse[:, :, :5] == -np.inf)
    out, lse = forward(q, k[:, :0], v[:, :0])
    assert not out.any() and np.all(lse == -np.inf)


def test_infinite_scores_hide_like_a_mask() -> None:
    """A key with a score of -inf counts as hidden, also in a row's first tile."""
    q = np.ones((1, 2, 1, 1), np.float32)
    k = np.full((1, 600, 1, 1), -np.inf, np.float32)
    k[:, 550] = 1
    v = np.arange(600, dtype=np.float32).reshape(1, 600, 1, 1)
    out, lse = forward(q, k, v)
    assert np.all(out == 550) and np.all(lse == 1)


def test_overflow_is_silent() -> None:
    v = np.array([65504.0, 65504.0], np.float16).reshape(1, 2, 1, 1)
    q, k = np.zeros((1, 1, 1, 1), np.float16), np.zeros((1, 2, 1, 1), np.float16)
    out, _ = forward(q, k, v)
    assert np.all(out == np.float16(65504))
    q[:], k[:] = 60000, 60000
    out, lse = forward(q, k, v, scale=1e30)
    assert np.isnan(out).all() and np.all(np.isnan(lse) | np.isinf(lse))


def test_lse_is_optional() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 2, 16), np.float32)
    out, _ = forward(q, k, v, causal=True)
    alone, lse = forward(q, k, v, causal=True, with_lse=False)
    assert lse is None
    np.testing.assert_array_equal(out, alone)


@pytest.mark.parametrize("case", [*LONG[:4], SHORT[1], SHORT[-1]], ids=str)
def test_same_call_gives_the_same_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call gives the same bits with any number of threads."""
    monkeypatch.setattr(threads, "WORK_OF_A_THREAD", 1)
    inputs = materialise(case)
    arrays = [x.view() for x in (inputs.q, inputs.k, inputs.v)]

    def bits() -> list[bytes]:
        return [x.tobytes() for x in forward(*arrays, **inputs.options, seqs=layout(inputs))]

    first = bits()
    for cores in (1, 2, 5, 2):
        monkeypatch.setattr(threads, "available_threads", lambda cores=cores: cores)
        assert bits() == first


@pytest.mark.parametrize("headdim", [1, 32, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("rows", [1, 5, 64, 65, 256])
def test_products_stay_on_the_calling_thread(headdim: int, rows: int) -> None:
    """Matrix products are small enough for OpenBLAS to compute them on the calling thread.

    The limits are 2**18 multiplications for a product of matrices, and 9216 for a matrix and a vector.
    """
    problem, _ = describe(*np.zeros((3, 1, 1, 1, headdim), np.float32))
    for keys in (1, 33, 512):
        pieces = tiles.divide(problem, rows, keys)
        work = pieces.rows_each * pieces.keys_each * headdim
        is_matrix = min(pieces.rows_each, pieces.keys_each) > 1
        assert work <= (1 << 18 if is_matrix else 9216)
        assert pieces.shape[0] >= rows and pieces.shape[1] >= keys
        assert pieces.shape[0] < rows + max(2, pieces.rows)
        assert pieces.shape[1] < keys + max(1, pieces.keys)


def of_length(seqlen: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, seqlen, 8, 64), np.float32) for _ in "qkv")  # type: ignore[return-value]


@pytest.mark.parametrize("cores", [None, 16])
def test_memory_beyond_inputs_and_outputs(
    monkeypatch: pytest.MonkeyPatch, cores: int | None
) -> None:
    """The backend allocates less than 64 MiB beside inputs and outputs; the scores of naive NumPy would take 1 GiB here."""
    if cores is not None:
        monkeypatch.setattr(threads, "available_threads", lambda: cores)
    q, k, v = of_length(4096)
    problem, bound = describe(q, k, v, causal=True)
    out, lse = np.empty_like(q), np.empty((1, 8, 4096), np.float32)
    tracemalloc.start()
    try:
        cpu_forward.forward(problem, host_lengths(bound), q, k, v, out, lse)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def naive(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one sequence, with all scores at once."""
    seqlen, _, headdim = q.shape[1:]
    scores = q[0].swapaxes(0, 1) @ k[0].transpose(1, 2, 0) * np.float32(1 / math.sqrt(headdim))
    scores[:, ~np.tri(seqlen, dtype=bool)] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    out: np.ndarray = (scores @ v[0].swapaxes(0, 1)).swapaxes(0, 1)[None]
    return out


@pytest.mark.slow
def test_faster_than_naive_numpy() -> None:
    """The forward is faster than naive NumPy: best of three runs in turn, since other work may share the CPU."""
    q, k, v = of_length(2048)

    def seconds(function: Callable[[], Any]) -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    def ours() -> np.ndarray:
        return forward(q, k, v, causal=True, with_lse=False)[0]

    np.testing.assert_allclose(ours(), naive(q, k, v), atol=2e-5)
    runs = [(seconds(ours), seconds(lambda: naive(q, k, v))) for _ in range(3)]
    best, best_naive = (min(column) for column in zip(*runs, strict=True))
    assert best < best_naive, f"{best:.3f} s, naive NumPy {best_naive:.3f} s"


def test_exact_where_one_key_is_seen() -> None:
    """Where a row sees one key, out is exactly v."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 300, 2, 32)).astype(np.float16) for _ in "qkv")
    out, lse = forward(q, k, v, window=(0, 0))
    np.testing.assert_array_equal(out, v)
    exact = reference.attention(q, k, v, window=(0, 0), return_lse=True)[1]
    np.testing.assert_allclose(lse, exact, atol=1e-5)
