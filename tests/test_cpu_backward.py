"""The CPU backend's backward: values, padding, memory, and reproducible bits."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rawattn import reference
from rawattn._call.layout import host_lengths
from rawattn._call.problem import describe, result_shapes
from rawattn._cpu import backward as cpu_backward
from rawattn._cpu import backward_tiles, threads, tiles
from rawattn._cpu import forward as cpu_forward
from tests import exhaustive
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import curated
from tests.gradients import NAMES, Backward, backward_of, check_gradient
from tests.random_cases import random_case
from tests.shim.traits import of_call
from tests.test_cpu import SHORT
from tests.verify import layout

CHEAP = [case for case in curated() if case.scores <= 300_000]
# Calls with several tiles of keys and of rows, for which dq takes a separate pass.
LONG = [
    dense("two-passes", 1, 600, 1100, headdim=40, causal=True),
    dense("two-passes-gqa", 1, 300, 700, nheads_q=6, nheads_kv=2, headdim=16, dtype="float32"),
    dense("two-passes-window", 1, 900, 1300, headdim=24, window=(200, 30), sink=5),
    dense("two-passes-tall", 1, 1300, 700, headdim=24, window=(90, 0), sink=600),
    ragged("two-passes-ragged", (700, 0, 40), (30, 600, 900), headdim=32, causal=True),
    padded("two-passes-padded", (30, 400), (700, 0), 500, 800, headdim=72, headdim_v=20),
]


def gradients(call: Backward) -> tuple[np.ndarray, ...]:
    """Return dq, dk, dv, in the arrays of the call or in arrays that hold NaN where nothing was written.

    `out` and `lse` come from the backend's own forward. With scores near 100, the rounding of another forward would be the
    largest error in float32.
    """
    inputs = call.inputs
    q, k, v = (x.view() for x in (inputs.q, inputs.k, inputs.v))
    problem, bound = describe(q, k, v, **inputs.options, seqs=layout(inputs))
    lengths = host_lengths(bound)
    out = call.out.view()
    cpu_forward.forward(problem, lengths, q, k, v, out, call.lse)
    if call.into is None:
        into = tuple(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v))
    else:
        into = tuple(x.view() for x in call.into)
    arguments = (call.dout.view(), q, k, v, out, call.lse, call.dlse)
    cpu_backward.backward(problem, lengths, *arguments, *into)
    return into


def verify(case: Case) -> None:
    call = backward_of(case)
    before = [x.buffer.copy() for x in call.into or ()]
    got = gradients(call)
    for n, (name, array, rows) in enumerate(zip(NAMES, got, call.rows, strict=True)):
        check_gradient(call, n, array[rows])
        if call.into is None:
            assert np.isnan(array[~rows].astype(np.float32)).all(), f"padding of {name} written"
    for strided, buffer, rows in zip(call.into or (), before, call.rows, strict=False):
        bits = f"u{buffer.itemsize}"
        touched = strided.buffer.view(bits) != buffer.view(bits)
        inside = replace(strided, buffer=np.zeros(buffer.shape, bool))
        inside.view()[rows] = True
        assert not np.any(touched & ~inside.buffer), "memory outside the logical rows changed"
        strided.buffer[:] = buffer  # restored, because the call is cached


@pytest.mark.parametrize(
    "case", [*exhaustive.mark(CHEAP, of_call), *SHORT, *exhaustive.thin(LONG, 2)], ids=str
)
def test_curated(case: Case) -> None:
    verify(case)


@settings(max_examples=10)
@given(st.integers(0, 1 << 32))
def test_random(seed: int) -> None:
    verify(random_case(seed))


@pytest.mark.exhaustive
@settings(max_examples=80)
@given(st.integers(0, 1 << 32))
def test_more_random(seed: int) -> None:
    verify(random_case(seed))


@st.composite
def masks(draw: st.DrawFn) -> Case:
    """Draw calls of few rows and keys with any mask: every edge of what a row sees and of what sees a key."""
    end = st.none() | st.integers(0, 12)
    return dense(
        "mask",
        1,
        draw(st.integers(0, 12)),
        draw(st.integers(0, 12)),
        headdim=4,
        nheads_q=2,
        nheads_kv=1,
        dtype="float32",
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.none() | st.tuples(end, end)),
        sink=draw(st.integers(0, 6)),
    )


@pytest.mark.parametrize(
    "shape", exhaustive.thin([((4, 2),), ((3, 4),), ((256, 512),)], 2), ids=str
)
def test_masks_and_tiles(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """Tiles of a few rows and keys give every case edges that full-size tiles do not have."""
    monkeypatch.setattr(tiles, "ROWS", shape[0])
    monkeypatch.setattr(tiles, "KEYS", shape[1])
    monkeypatch.setattr(backward_tiles, "KEYS", shape[1])

    @settings(max_examples=100)
    @given(masks())
    @example(dense("sinks", 1, 9, 9, headdim=4, window=(0, 0), sink=3, dtype="float32"))
    def check_one(case: Case) -> None:
        verify(case)

    check_one()


def call_of(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, **options: Any
) -> tuple[np.ndarray, ...]:
    """Run forward and backward on the CPU; return the gradients."""
    problem, bound = describe(q, k, v, **options)
    lengths = host_lengths(bound)
    out_shape, lse_shape = result_shapes(problem)
    out, lse = np.zeros(out_shape, q.dtype), np.full(lse_shape, -np.inf, np.float32)
    cpu_forward.forward(problem, lengths, q, k, v, out, lse)
    into = tuple(np.zeros_like(x) for x in (q, k, v))
    cpu_backward.backward(problem, lengths, dout, q, k, v, out, lse, None, *into)
    return into


def test_row_without_keys_gives_and_gets_exact_zeros() -> None:
    """A row without keys has dq 0 and adds nothing to dk and dv, whatever its dout holds."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 8, 2, 16), np.float32)
    dout[:, :5] = np.nan
    dq, dk, dv = call_of(q, k[:, :3], v[:, :3], dout, causal=True)
    assert not dq[:, :5].any()
    assert np.isfinite(dq).all() and np.isfinite(dk).all() and np.isfinite(dv).all()


def test_row_of_a_larger_softmax_without_keys() -> None:
    """A row whose lse is -inf contributes nothing, though it sees keys here and its dout is NaN."""
    rng = np.random.default_rng(3)
    q, k, v, dout, out = rng.standard_normal((5, 1, 9, 1, 8), np.float32)
    lse = np.full((1, 1, 9), 2, np.float32)
    lse[..., 4], dout[:, 4] = -np.inf, np.nan
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    results = []
    for rows in (slice(None), rest):
        arguments = (dout[:, rows], q[:, rows], k, v, out[:, rows], lse[..., rows], None)
        problem, bound = describe(*arguments[1:4])
        into = tuple(np.empty_like(x) for x in arguments[1:4])
        cpu_backward.backward(problem, host_lengths(bound), *arguments, *into)
        results.append(into)
    (dq, dk, dv), (dq_rest, dk_rest, dv_rest) = results
    assert not dq[:, 4].any()
    for got, exact in ((dq[:, rest], dq_rest), (dk, dk_rest), (dv, dv_rest)):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nkeys", [20, 600])
def test_nan_stays_with_those_that_see_it(nkeys: int) -> None:
    """NaN in a logical row reaches only the gradients of rows and keys that see it."""
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 1, nkeys, 1, 8), np.float32)
    bad = nkeys - 7
    clean = call_of(q, k, v, dout, causal=True)
    k[:, bad], v[:, bad] = np.nan, np.inf
    dq, dk, dv = call_of(q, k, v, dout, causal=True)
    np.testing.assert_allclose(dq[:, :bad], clean[0][:, :bad], atol=1e-5)
    assert np.isnan(dq[:, bad:]).all()

    k[:, bad], v[:, bad] = 0, 0
    clean = call_of(q, k, v, dout, causal=True)
    dout[:, 5] = np.nan
    dq, dk, dv = call_of(q, k, v, dout, causal=True)
    assert np.isnan(dv[:, :6]).all() and np.isnan(dk[:, :6]).all()
    for got, exact in zip((dq, dk, dv), clean, strict=True):
        np.testing.assert_allclose(got[:, 6:], exact[:, 6:], atol=1e-5)


def test_nan_stays_with_its_sequence() -> None:
    """NaN reaches only the gradients in its sequence that see it, though sequences are computed together."""
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 30, 6, 2, 8), np.float32)
    clean = call_of(q, k, v, dout, causal=True)
    dout[7, 3, 1], k[9, 4, 0] = np.nan, np.nan
    gradients = call_of(q, k, v, dout, causal=True)
    for n, gradient in enumerate(gradients):
        same = np.ones(gradient.shape, bool)
        # Rows from 4 on see the key, so their probabilities are NaN, and so are the gradients of all keys that they see.
        same[9, 4 if n == 0 else 0 :, 0] = False
        same[7, 3 if n == 0 else 0 : 4, 1] = False
        np.testing.assert_allclose(gradient[same], clean[n][same], atol=1e-5)
        assert np.isnan(gradient[9, 4:, 0]).all() and np.isnan(gradient[7, 3, 1]).all()


def test_keys_in_two_halves_add_up() -> None:
    """With `out` and `lse` of the whole softmax, the gradients over two halves of the keys add up to the whole."""
    rng = np.random.default_rng(2)
    q, k, v, dout = rng.standard_normal((4, 1, 300, 2, 16), np.float32)
    problem, bound = describe(q, k, v)
    out, lse = np.zeros_like(q), np.empty((1, 2, 300), np.float32)
    cpu_forward.forward(problem, host_lengths(bound), q, k, v, out, lse)
    exact = reference.attention_backward(dout, q, k, v, out, lse)
    total, parts = np.zeros_like(q), []
    for half in (slice(0, 130), slice(130, 300)):
        into = np.zeros_like(q), np.zeros_like(k[:, half]), np.zeros_like(v[:, half])
        problem, bound = describe(q, k[:, half], v[:, half])
        cpu_backward.backward(
            problem, host_lengths(bound), dout, q, k[:, half], v[:, half], out, lse, None, *into
        )
        total += into[0]
        parts.append(into)
    np.testing.assert_allclose(total, exact.dq, atol=2e-6)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts], 1), exact.dk, atol=2e-6)
    np.testing.assert_allclose(np.concatenate([p[2] for p in parts], 1), exact.dv, atol=2e-6)


@pytest.mark.parametrize("case", [*LONG[:3], SHORT[1], SHORT[-1]], ids=str)
def test_same_call_gives_the_same_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call gives the same bits with any number of threads."""
    monkeypatch.setattr(threads, "WORK_OF_A_THREAD", 1)
    call = backward_of(case)
    first = [x.tobytes() for x in gradients(call)]
    for cores in (1, 2, 5, 2):
        monkeypatch.setattr(threads, "available_threads", lambda cores=cores: cores)
        assert [x.tobytes() for x in gradients(call)] == first


@pytest.mark.parametrize("seqlen", [2048, 8192])
def test_memory_is_a_few_tiles(monkeypatch: pytest.MonkeyPatch, seqlen: int) -> None:
    """One thread needs the memory of a few tiles, whatever the sequence length."""
    monkeypatch.setattr(threads, "available_threads", lambda: 1)
    shape = (1, seqlen, 1, 64)
    # The gradients are zero; only memory is measured.
    q = k = v = dout = out = np.zeros(shape, np.float16)
    problem, bound = describe(q, k, v, window=(64, 0))
    into = [np.empty_like(q) for _ in range(3)]
    lse = np.zeros((1, 1, seqlen), np.float32)
    tracemalloc.start()
    try:
        lengths = host_lengths(bound)
        cpu_backward.backward(problem, lengths, dout, q, k, v, out, lse, None, *into)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tile = tiles.ROWS * tiles.KEYS * 4
    assert peak <= 6 * tile


def test_float16_overflow_is_infinite_and_silent() -> None:
    q = np.ones((1, 8, 1, 8), np.float16)
    dout = np.full(q.shape, 6e4, np.float16)
    assert np.isinf(call_of(q, q[:, :4], q[:, :4], dout)[2]).all()
