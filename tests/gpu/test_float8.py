"""Chunks of new rows on pages of 8 bits, by Hopper's forward: whatever such a call may be with 16-bit pages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn import paged_attention
from rawattn._kernels.selection import only
from tests.gpu.pages import check_pages, lengths_of, on_gpu
from tests.paged import BFLOAT16, FLOAT8, Paged, paged, verify
from tests.tiles import splitting

cupy = pytest.importorskip("cupy")

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LIMITS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (100, 0), "sink": 4},
    {"window": (300, 20), "align": "top-left"},
]
SHAPES: list[dict[str, Any]] = [
    {"page_size": 16, "dims": (128, 128), "heads": (32, 8), "float8": "arrays"},
    {"page_size": 8, "dims": (64, 64), "heads": (24, 24), "float8": "numbers"},
    {"page_size": 64, "dims": (96, 96), "heads": (24, 4), "float8": "arrays", "pair": True},
    {"page_size": 128, "dims": (192, 128), "heads": (24, 3), "float8": "plain"},
    {"page_size": 1000, "dims": (256, 256), "heads": (32, 1), "float8": "arrays"},
    {"page_size": 24, "dims": (80, 48), "heads": (30, 5), "float8": "arrays", "heads_first": True},
    {"page_size": 16, "dims": (64, 256), "heads": (8, 2), "float8": "arrays"},
    {"page_size": 32, "dims": (176, 16), "heads": (7, 1), "float8": "numbers"},
    {"page_size": 16, "dims": (40, 40), "heads": (4, 2), "float8": "arrays"},  # the portable one
]


@pytest.mark.parametrize("dtype", [BFLOAT16, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks(shape: dict[str, Any], dtype: Any) -> None:
    """Chunks are right in packed batches, in padded batches and alone. Rows outside all sequences hold NaN."""
    packed = paged((900, 3, 130, 690), **shape, dtype=dtype, rows=(300, 3, 130, 200), packed=True)
    for options in LIMITS:
        check_pages(packed, "sm90", num_splits=1, **options)
    padded = paged((700, 0, 390), **shape, dtype=dtype, rows=(300, 0, 130), room_q=310)
    check_pages(padded, "sm90", num_splits=1, causal=True)
    alone = paged((777,), **shape, dtype=dtype, rows=100)
    check_pages(alone, "sm90", num_splits=1, causal=True)


@pytest.mark.parametrize("dtype", [BFLOAT16, F16], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_keys_that_end_anywhere(dim: int, dtype: Any) -> None:
    """Keys may end within a TMA box, between boxes or between key tiles, with NaN behind the last key."""
    lens = tuple(itertools.chain(range(1, 18), range(60, 68), range(78, 84), (111, 112, 113, 240)))
    shape: dict[str, Any] = {"dims": (dim, dim), "dtype": dtype, "rows": 17, "float8": "arrays"}
    for page_size in (8, 16, 128):
        check_pages(paged(lens, page_size, **shape), "sm90", num_splits=1)


@pytest.mark.parametrize("options", LIMITS[:3], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_tiles_split_by_keys(shape: dict[str, Any], options: dict[str, Any]) -> None:
    packed = paged((1700, 3, 130, 900), **shape, rows=(300, 3, 130, 200), packed=True)
    alone = paged((1500,), **shape, rows=400, dtype=F16)
    with splitting():
        for call in (packed, alone):
            check_pages(call, "sm90", **options)


def test_long_keys_split_as_they_are() -> None:
    """Calls with long keys are right as they choose to split them among blocks: one sequence, whose query tiles leave SMs idle,
    and two."""
    shape: dict[str, Any] = {"dims": (128, 128), "heads": (32, 8), "float8": "arrays"}
    for lens, dtype in (((9000,), BFLOAT16), ((9000,), F16), ((8400, 9000), BFLOAT16)):
        call = paged(lens, 16, **shape, rows=256, dtype=dtype)
        check_pages(call, "sm90", causal=True)


@pytest.mark.parametrize("dtype", [BFLOAT16, F16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_options_of_scores(dims: tuple[int, int], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    call = paged((700, 130), 16, rows=100, dims=dims, dtype=dtype, float8="arrays")
    each: list[dict[str, Any]] = [
        {"bias": rng.standard_normal((2, 4, 100, 800)).astype(dtype)},
        {"bias": rng.standard_normal((1, 1, 100, 800)).astype(F32)},
        {"mask": rng.random((2, 1, 100, 700)) < 0.3},
        {"alibi_slopes": rng.random(4).astype(F32), "causal": True},
        {"sink_logits": rng.standard_normal(4).astype(F32), "window": (300, 2), "sink": 2},
        {"softcap": 5.0},
        {"softcap": 0.5, "scale": -0.3},
        {"scale": 0.0},
        {"dropout_p": 0.2, "seed": 3},
    ]
    whole: dict[str, Any] = {}
    for options in (
        each[0],
        each[2],
        each[4],
        each[5],
        each[8],
        {"alibi_slopes": each[3]["alibi_slopes"]},
    ):
        whole |= options
    for options in (*each, whole):
        arrays = {
            n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()
        }
        inputs = [on_gpu(x) for x in call.inputs]
        scales = {n: cupy.asarray(x) for n, x in call.scales.items()}
        with only("sm90"):
            out, lse = paged_attention(
                *inputs,
                **lengths_of(call, on_device=True),
                **scales,
                **arrays,
                num_splits=1,
                return_lse=True,
            )
        verify(call, out.get(), lse.get(), **options)


def poisoned(call: Paged) -> Paged:
    """Adds a page of NaN, of no sequence, at both ends of the pools. Unused entries of the block table lead to such a page or
    to none."""
    ends = [(1, 1), (0, 0), (0, 0), (0, 0)]
    pools = {
        name: np.pad(getattr(call, name).view(np.uint8), ends, constant_values=0x7F).view(FLOAT8)
        for name in ("k_pages", "v_pages")
    }
    return replace(call, **pools, block_table=call.block_table + 1)


@pytest.mark.parametrize("dtype", [BFLOAT16, F16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_that_no_row_sees_are_not_read(dim: int, dtype: Any) -> None:
    shape: dict[str, Any] = {"dims": (dim, dim), "dtype": dtype, "float8": "arrays"}
    call = poisoned(paged((700, 475), 8, rows=20, **shape))
    call.block_table[0, 1:70] = -1  # the window of the first row begins at key 650
    call.block_table[1, 1:40] = 1 << 30
    check_pages(call, "sm90", num_splits=1, window=(30, 0), sink=3)


@pytest.mark.parametrize("power", [40, -40])
def test_queries_beyond_float16(power: int) -> None:
    shape: dict[str, Any] = {"rows": 130, "heads": (8, 2), "dims": (128, 128), "float8": "arrays"}
    call = paged((700, 130), 16, **shape)
    sized = replace(call, q=(call.q.astype(F32) * 2.0**power).astype(BFLOAT16))
    check_pages(sized, "sm90", scale=2.0**-power / 11, num_splits=1)


def test_all_numbers_of_8_bits() -> None:
    """With one key the output is that key's value: all 256 bit patterns come out exactly, NaN included."""
    every = np.arange(256, dtype=np.uint8).view(FLOAT8)
    call = paged((1,), 8, rows=40, heads=(1, 1), dims=(256, 256), float8="plain")
    pools = {name: np.zeros((1, 8, 1, 256), FLOAT8) for name in ("k_pages", "v_pages")}
    pools["v_pages"][:] = every
    table = np.zeros((1, 1), np.int32)
    for dtype in (F16, BFLOAT16):
        given = replace(call, q=call.q.astype(dtype), block_table=table, **pools)
        inputs = [on_gpu(x) for x in given.inputs]
        with only("sm90"):
            out = paged_attention(*inputs, seqlen_k=[1], num_splits=1)
        wanted = np.broadcast_to(every.astype(F32), (40, 256))
        np.testing.assert_array_equal(out.get().reshape(40, 256).astype(F32), wanted)


def test_the_same_bits_again() -> None:
    """A repeated call gives the same bits, in whatever order its converters, producers and consumers reach their barriers."""
    call = paged((1700, 900), 16, rows=300, heads=(32, 8), dims=(128, 128), float8="arrays")
    inputs = [on_gpu(x) for x in call.inputs]
    with only("sm90"):
        results = [
            paged_attention(*inputs, **call.lengths, **call.scales, causal=True, num_splits=1)
            for _ in range(50)
        ]
    first = results[0].view(cupy.uint16)
    assert all(bool((each.view(cupy.uint16) == first).all()) for each in results)
