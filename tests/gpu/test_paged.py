"""`paged_attention` on the GPU: frameworks, repeated calls, validation, graphs whose lengths grow, random calls."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import paged_attention
from rawattn._kernels.selection import only
from tests.gpu.pages import F16, F32, LENS, lengths_of, on_gpu
from tests.paged import paged, verify
from tests.random_pages import RandomPages, random_batch, random_pages

cupy = pytest.importorskip("cupy")

_FIRST, _COUNT = map(int, os.environ.get("RAWATTN_FUZZ", "0:160").split(":"))


def test_numpy_and_torch() -> None:
    call = paged(LENS, 16, rows=2, dtype=F16)
    out, lse = paged_attention(*call.inputs, **call.lengths, return_lse=True)
    assert isinstance(out, np.ndarray)
    verify(call, out, lse)
    torch = pytest.importorskip("torch")
    q, k_pages, v_pages, table = (torch.from_numpy(x).cuda() for x in call.inputs)
    seqlen_k = torch.from_numpy(call.seqlen_k).cuda()
    for ids in (table, call.block_table):
        out, lse = paged_attention(q, k_pages, v_pages, ids, seqlen_k=seqlen_k, return_lse=True)
        assert isinstance(out, torch.Tensor)
        verify(call, out.cpu().numpy(), lse.cpu().numpy())


@pytest.mark.parametrize("framework", ["cupy", "torch"])
@pytest.mark.parametrize("pair", [False, True])
def test_repeated_steps(pair: bool, framework: str) -> None:
    """Repeated calls, found by the form of their arrays, use their own pages, lengths, results, streams and captures."""
    put: Any = on_gpu
    if framework == "torch":
        torch = pytest.importorskip("torch")

        def put(x: Any) -> Any:
            return tuple(map(put, x)) if isinstance(x, tuple) else torch.from_numpy(x).cuda()

    out = None
    for seed in range(5):
        call = paged(LENS, 16, rows=2, dtype=F16, pair=pair, seed=seed)
        given = [put(x) for x in (*call.inputs, call.seqlen_k)]
        out, lse = paged_attention(
            *given[:4],
            seqlen_k=given[4],
            causal=True,
            return_lse=True,
            out=out if seed > 3 else None,
        )
        assert type(out) is type(given[0])
        verify(
            call,
            *(np.asarray(x.get() if framework == "cupy" else x.cpu()) for x in (out, lse)),
            causal=True,
        )
    if framework == "torch":
        return
    lengths = given[4]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        results = paged_attention(*given[:4], seqlen_k=lengths, causal=True, return_lse=True)
        graph = stream.end_capture()
        for part in (0.0, 0.3, 1.0):
            now = (call.seqlen_k * part).astype(np.int32)
            lengths.set(now.astype(lengths.dtype))
            graph.launch(stream)
            stream.synchronize()
            wanted = paged_attention(
                *call.inputs, seqlen_k=now, causal=True, return_lse=True, backend="cpu"
            )
            for got, expected in zip(results, wanted, strict=True):
                np.testing.assert_allclose(got.get().astype(F32), expected.astype(F32), atol=2e-3)


def test_validate_reads_what_is_on_the_device() -> None:
    """`validate` checks integers on the device. Without it bad integers cause no access outside the arrays, and the context
    stays usable."""
    call = paged((70, 30), 16, rows=1, dtype=F32)
    inputs = [on_gpu(x) for x in call.inputs]
    good, bad = inputs[3], inputs[3].copy()
    bad[1, 1] = len(call.k_pages)
    lengths = cupy.asarray(call.seqlen_k)
    paged_attention(*inputs, seqlen_k=lengths, validate=True)
    with pytest.raises(ValueError, match=r"^block_table: got page id \d+ for page 1 of sequence 1"):
        paged_attention(*inputs[:3], bad, seqlen_k=lengths, validate=True)
    too_long = lengths + 16 * good.shape[1]
    with pytest.raises(ValueError, match=r"^seqlen_k: got length"):
        paged_attention(*inputs, seqlen_k=too_long, validate=True)
    bad[:] = cupy.asarray([[-1, 1 << 30], [-(2**31), 2**31 - 1]]).repeat(good.shape[1], 1)[
        :, : good.shape[1]
    ]
    paged_attention(*inputs[:3], bad, seqlen_k=too_long)
    cupy.cuda.get_current_stream().synchronize()
    out, lse = paged_attention(*inputs, seqlen_k=lengths, return_lse=True)
    verify(call, out.get(), lse.get())


def test_nothing_waits() -> None:
    """No call waits for the device: a capture refuses any call that would."""
    call = paged(LENS, 16, rows=1)
    inputs, lengths = [on_gpu(x) for x in call.inputs], cupy.asarray(call.seqlen_k)
    paged_attention(*inputs, seqlen_k=lengths, return_lse=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        out, lse = paged_attention(*inputs, seqlen_k=lengths, return_lse=True)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    verify(call, out.get(), lse.get())


@pytest.mark.parametrize("pair", [False, True])
def test_a_captured_plan_of_growing_lengths(pair: bool) -> None:
    call = paged((250, 100), 16, rows=1, pair=pair, dtype=F16)
    inputs = [on_gpu(x) for x in call.inputs]
    lengths = cupy.zeros(2, np.int32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        made = rawattn.plan(paged_attention, *inputs, seqlen_k=lengths, return_lse=True)
        out, lse = made()
        stream.begin_capture()
        made()
        graph = stream.end_capture()
        for part in (0.0, 0.3, 1.0):
            now = (call.seqlen_k * part).astype(np.int32)
            lengths.set(now)
            graph.launch(stream)
            stream.synchronize()
            wanted = paged_attention(*call.inputs, seqlen_k=now, return_lse=True, backend="cpu")
            np.testing.assert_allclose(out.get().astype(F32), wanted[0].astype(F32), atol=2e-3)
            np.testing.assert_allclose(lse.get(), wanted[1], atol=1e-3)
        other = lengths.copy()
        other[1] = 0
        ids = inputs[3][1] if pair else inputs[3]
        changed = made(*inputs[:3], ids, seqlen_k=other)
        stream.synchronize()
        assert not changed[0].get()[1].any()


@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT // 4))
def test_random(seed: int) -> None:
    _check(random_pages(seed))


@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT // 4))
def test_random_batch(seed: int) -> None:
    _check(random_batch(seed))


def _check(drawn: RandomPages) -> None:
    call, options, on_device, portable = drawn
    arrays = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    scales = {
        n: cupy.asarray(x) if on_device and isinstance(x, np.ndarray) else x
        for n, x in call.scales.items()
    }
    inputs = [on_gpu(x) for x in call.inputs]
    table = inputs[3] if on_device else call.block_table
    given = {**lengths_of(call, on_device=on_device), **scales, **arrays, "return_lse": True}
    with only("portable") if portable else nullcontext():
        out, lse = paged_attention(*inputs[:3], table, **given)
    verify(call, out.get(), lse.get(), **options)
