"""Every kernel that reads pages: chunks of rows, few rows of many heads, tiles split among blocks, many sequences."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from rawattn import paged_attention
from rawattn._kernels.sm90 import line_estimate
from tests.gpu.pages import CHUNKS, F16, LENS, LIMITS, MASKS, SHAPES, check_pages, on_gpu
from tests.paged import paged, verify
from tests.tiles import splitting


@pytest.mark.parametrize("num_splits", [None, 1, 6])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages(shape: dict[str, Any], options: dict[str, Any], num_splits: int | None) -> None:
    check_pages(paged(LENS, **shape), num_splits=num_splits, **options)


@pytest.mark.parametrize("options", LIMITS, ids=str)
@pytest.mark.parametrize("shape", CHUNKS, ids=str)
def test_chunks(shape: dict[str, Any], options: dict[str, Any]) -> None:
    """Chunks are right by the kernel that calls choose (Hopper's, where it serves the call) and by the portable kernel."""
    rows = (300, 3, 130, 1290)
    packed = paged((1700, 3, 130, 1290), **shape, rows=rows, packed=True)
    check_pages(packed, num_splits=1, **options)
    check_pages(packed, "portable", num_splits=1, **options)
    padded = paged((700, 0, 1290), **shape, rows=(300, 0, 130), room_q=310)
    check_pages(padded, num_splits=1, **options)


@pytest.mark.parametrize("options", LIMITS[:3], ids=str)
def test_tiles_split_by_keys(options: dict[str, Any]) -> None:
    rows = (300, 3, 130, 200)
    shape: dict[str, Any] = {"dims": (128, 128), "heads": (32, 8)}
    packed = paged((1700, 3, 130, 900), 16, **shape, rows=rows, packed=True)
    alone = paged((1500,), 24, **shape, rows=400, dtype=F16)
    with splitting():
        for call in (packed, alone):
            check_pages(call, "sm90", **options)


@pytest.mark.parametrize("options", LIMITS[:2], ids=str)
@pytest.mark.parametrize("lens", [(1500,), (1500, 1480, 1300), (1500, 200), (900,) * 90], ids=len)
def test_last_tiles_are_weighed(lens: tuple[int, ...], options: dict[str, Any]) -> None:
    """Query tiles of few rows count less where sequences have about as many keys; else all count the same."""
    share = mock.Mock(wraps=line_estimate.last_share)
    with splitting(), mock.patch.object(line_estimate, "last_share", share):
        for page_size, rows, heads in ((16, 120, (16, 4)), (24, 200, (3, 3)), (16, 75, (8, 2))):
            call = paged(lens, page_size, rows=rows, dims=(128, 128), heads=heads, dtype=F16)
            check_pages(call, "sm90", **options)
            if share.call_args is not None:  # a GPU that has the kernel
                assert line_estimate.last_share(*share.call_args.args) > 0


@pytest.mark.parametrize("options", [{"causal": True}, {}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
def test_few_rows_of_several_heads(dims: tuple[int, int], options: dict[str, Any]) -> None:
    """Speculative steps and short chunks, of few sequences and of many, are right by the kernels that calls choose."""
    for lens, rows, heads in (
        ((4100, 1025, 33, 3000), (20, 7, 33, 40), (32, 8)),
        ((5000,), 33, (16, 2)),
        (tuple(range(200, 520, 5)), 12, (8, 2)),
    ):
        packed = type(rows) is tuple
        call = paged(lens, 16, rows=rows, heads=heads, dims=dims, packed=packed)
        check_pages(call, **options)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 0), "sink": 3}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
def test_chunks_of_heads_that_no_tile_divides(
    dims: tuple[int, int], options: dict[str, Any]
) -> None:
    """GQA groups that divide no tile are right, in whole and in split tiles, with pages that TMA boxes fetch and with pages
    whose rows are copied lane by lane."""
    for page_size, heads, rows in ((16, (5, 1), (30, 0, 1, 77)), (7, (14, 2), (20, 33, 9, 1))):
        packed = paged(
            (900, 33, 100, 2100), page_size, rows=rows, heads=heads, dims=dims, packed=True
        )
        padded = paged(
            (900, 33), page_size, rows=(rows[0], rows[2]), room_q=40, heads=heads, dims=dims
        )
        for call in (packed, padded):
            check_pages(call, "sm90", **options)
            with splitting():
                check_pages(call, "sm90", **options)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 0), "sink": 3}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_more_heads_than_a_tile_has_rows(dims: tuple[int, int], options: dict[str, Any]) -> None:
    """A GQA packed may fill several tiles, the last of which holds fewer heads."""
    lens = (700, 33, 0, 1290)
    for heads, rows in (((71, 1), 1), ((71, 1), 2), ((74, 2), 1), ((20, 1), 3), ((128, 1), 1)):
        check_pages(paged(lens, 16, rows=rows, heads=heads, dims=dims), **options)
    check_pages(paged((500, 400), 7, rows=1, heads=(71, 1), dims=dims, pair=True), **options)


@pytest.mark.parametrize("packed", [False, True])
def test_most_sequences_without_queries(packed: bool) -> None:
    """A batch padded with empty sequences is right: it has fewer units of work than blocks."""
    for lens, rows in (((1000, *(700,) * 63), (1, *(0,) * 63)), ((90,) * 200, (*(0,) * 199, 1))):
        room = None if packed else 1
        call = paged(
            lens, 16, rows=rows, room_q=room, packed=packed, heads=(32, 8), dims=(128, 128)
        )
        for _ in range(2):
            check_pages(call, causal=True)


@pytest.mark.parametrize("lens", [(90,) * 40, (5000,), (300, 20)], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "gap"), [((8, 8), 256, 4), ((24, 1), 96, 1), ((8, 2), 128, 1)]
)
def test_queries_anywhere(
    lens: tuple[int, ...], heads: tuple[int, int], dim: int, gap: int
) -> None:
    """Queries may begin at addresses that TMA cannot read, beside keys that it can."""
    call = paged(lens, 16, rows=1, heads=heads, dims=(dim, dim))
    wide = np.zeros((*call.q.shape[:-1], dim + gap), call.q.dtype)
    wide[..., :dim] = call.q
    inputs = [on_gpu(x) for x in (call.q, *call.inputs[1:])]
    inputs[0] = on_gpu(wide)[..., :dim]
    out, lse = paged_attention(*inputs, seqlen_k=call.seqlen_k, return_lse=True)
    verify(call, out.get(), lse.get())


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 128)], ids=str)
def test_heads_that_become_rows(dims: tuple[int, int], options: dict[str, Any]) -> None:
    """With so many sequences Hopper's forward serves large GQA groups, as rows of a head (rawattn/_kernels/sm90/folded.py)."""
    lens = tuple(int(n) for n in np.random.default_rng(0).integers(0, 300, 140))
    for heads in ((71, 1), (200, 1), (74, 2)):
        check_pages(paged(lens, 16, rows=1, heads=heads, dims=dims), **options)
    first = paged(lens, 24, rows=1, heads=(40, 1), dims=dims, heads_first=True, pair=True)
    check_pages(first, **options)


@pytest.mark.parametrize("heads", [(8, 1), (4, 2), (40, 1)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_bunches_of_parts(dims: tuple[int, int], heads: tuple[int, int]) -> None:
    """Where very many blocks share a query tile, their partial results are merged in two steps."""
    for lens in ((40000,), (300, 25000, 0, 700)):
        check_pages(paged(lens, 16, rows=1, heads=heads, dims=dims), causal=True)
    check_pages(paged((20000,), 24, rows=1, heads=heads, dims=dims), "decode", num_splits=100)


@pytest.mark.parametrize("float8", ["", "arrays"], ids=("16-bit", "8-bit"))
@pytest.mark.parametrize("sequences", [20, 70])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256)], ids=str)
def test_many_short_sequences(dims: tuple[int, int], sequences: int, float8: str) -> None:
    """Short sequences are right where several blocks run on an SM and each has several sequences."""
    lens = tuple(int(n) for n in np.random.default_rng(0).integers(0, 200, sequences))
    call = paged(lens, 16, rows=1, heads=(8, 8), dims=dims, float8=float8)
    for options in ({}, {"softcap": 5.0}, {"window": (60, 0)}):
        check_pages(call, "decode", causal=True, **options)
    check_pages(call, causal=True)
    for rows in (3, 7):  # in tiles of 16 and of 32 rows
        several = paged((*lens, 1290), 24, rows=rows, heads=(24, 8), dims=dims, float8=float8)
        check_pages(several, "decode", causal=True)
