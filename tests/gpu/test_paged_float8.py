"""Pages of 8 bits on the GPU: every kernel, all numbers, scales, frameworks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import paged_attention
from rawattn._kernels.selection import only
from tests.gpu.pages import CHUNKS, F16, F32, LENS, LIMITS, MASKS, SHAPES, check_pages, on_gpu
from tests.paged import BFLOAT16, FLOAT8, OPTIONS, paged, verify

cupy = pytest.importorskip("cupy")

FLOAT8_SHAPES: list[dict[str, Any]] = [
    *SHAPES,
    {"page_size": 16, "rows": 1, "heads": (8, 2), "dims": (256, 128), "dtype": F16},
    {"page_size": 8, "rows": 6, "heads": (12, 2), "dims": (128, 128)},
    {"page_size": 32, "rows": 9, "heads": (4, 1), "dims": (64, 96)},
    {"page_size": 16, "rows": 2, "heads": (4, 1), "dims": (192, 192)},
]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(
    ("shape", "float8"),
    list(zip(FLOAT8_SHAPES, itertools.cycle(("plain", "numbers", "arrays")), strict=False)),
    ids=str,
)
def test_pages_of_8_bits(shape: dict[str, Any], float8: str, options: dict[str, Any]) -> None:
    for num_splits in (None, 6):
        check_pages(paged(LENS, **shape, float8=float8), num_splits=num_splits, **options)


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("rows", [4, 9])
@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"bias", "bias-of-keys", "dropout"}))
def test_options_of_scores_in_blocks_of_eight_rows(name: str, rows: int, page_size: int) -> None:
    """8 and 18 rows that share keys are one block and three blocks of eight."""
    call = paged((150, 33, 0), page_size, rows=rows, heads=(4, 2), dims=(128, 64), float8="arrays")
    for num_splits in (None, 3):
        check_pages(call, "decode", num_splits=num_splits, **OPTIONS[name])


@pytest.mark.parametrize("shape", CHUNKS, ids=str)
def test_chunks_on_pages_of_8_bits(shape: dict[str, Any]) -> None:
    rows = (300, 3, 130, 1290)
    call = paged((1700, 3, 130, 1290), **shape, rows=rows, packed=True, float8="arrays")
    for options in LIMITS[::3]:
        check_pages(call, "portable", num_splits=1, **options)


def test_all_numbers_of_8_bits() -> None:
    """With one key the output is that key's value: all 256 bit patterns come out exactly, NaN included."""
    every = np.arange(256, dtype=np.uint8).view(FLOAT8)
    call = paged((1,), 8, heads=(1, 1), dims=(256, 256), dtype=F32, spare=0, float8="plain")
    pools = {name: np.zeros((1, 8, 1, 256), FLOAT8) for name in ("k_pages", "v_pages")}
    pools["v_pages"][:] = every
    for dtype in (F16, BFLOAT16, F32):
        given = replace(call, q=call.q.astype(dtype), **pools)
        inputs = [on_gpu(x) for x in given.inputs]
        for family in ("decode", "portable"):
            with only(family):
                out = paged_attention(*inputs, seqlen_k=[1])
            np.testing.assert_array_equal(out.get().reshape(-1).astype(F32), every.astype(F32))


@pytest.mark.parametrize("power", [40, -40])
def test_queries_beyond_float16_on_pages_of_8_bits(power: int) -> None:
    shape: dict[str, Any] = {"rows": 3, "heads": (8, 2), "dims": (128, 128), "float8": "arrays"}
    call = paged(LENS, 16, **shape)
    sized = replace(call, q=(call.q.astype(F32) * 2.0**power).astype(BFLOAT16))
    for family in ("decode", "portable"):
        check_pages(sized, family, scale=2.0**-power / 11)


def test_scales_that_change_in_a_captured_graph() -> None:
    call = paged((250, 100), 16, rows=1, heads=(8, 2), float8="arrays")
    inputs, lengths = [on_gpu(x) for x in call.inputs], cupy.asarray(call.seqlen_k)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        scales = {name: cupy.ones(2, np.float32) for name in ("k_scale", "v_scale")}
        made = rawattn.plan(paged_attention, *inputs, seqlen_k=lengths, **scales, return_lse=True)
        out, lse = made()
        stream.begin_capture()
        made()
        graph = stream.end_capture()
        for name, array in scales.items():
            array.set(call.scales[name])
        graph.launch(stream)
        stream.synchronize()
        verify(call, out.get(), lse.get())


def test_numpy_and_torch_of_8_bits() -> None:
    call = paged(LENS, 16, rows=2, dtype=F16, float8="arrays")
    out, lse = paged_attention(*call.inputs, **call.lengths, **call.scales, return_lse=True)
    assert isinstance(out, np.ndarray)
    verify(call, out, lse)
    torch = pytest.importorskip("torch")
    q, table, seqlen_k, *scales = (
        torch.from_numpy(x).cuda()
        for x in (call.q, call.block_table, call.seqlen_k, call.k_scale, call.v_scale)
    )
    pools = [
        torch.from_numpy(x.view(np.uint8)).cuda().view(torch.float8_e4m3fn)
        for x in (call.k_pages, call.v_pages)
    ]
    given = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    for factors in (given, call.scales):
        out, lse = paged_attention(q, *pools, table, seqlen_k=seqlen_k, **factors, return_lse=True)
        assert isinstance(out, torch.Tensor)
        verify(call, out.cpu().numpy(), lse.cpu().numpy())
    with pytest.raises(NotImplementedError, match=r"^k_pages: got dtype float8_e5m2"):
        paged_attention(q, pools[0].view(torch.float8_e5m2), pools[1], table, seqlen_k=seqlen_k)
