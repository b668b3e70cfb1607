"""Hopper's forward where a query tile has rows for one consumer alone, and all consumers of the block share its keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn._compile import compiler
from rawattn._kernels.selection import only
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._runtime import on_gpu
from tests.cases import Case, dense, padded, ragged
from tests.frameworks import CuPy
from tests.gpu.pages import check_pages
from tests.paged import paged
from tests.score_arrays import Pairs
from tests.tiles import sharing, splitting, whole_tiles
from tests.verify import verify

CUPY = CuPy()
# Query rows of a tile at a head dim, and the window that selects tiles whose consumers share keys, if it takes one.
TILE_ROWS = {64: 256, 96: 256, 128: 192, 192: 128, 256: 128}
WINDOWS: dict[int, dict[str, Any]] = {96: {"window": (1400, None)}}


def check(case: Case) -> None:
    verify(case, CUPY)
    if compiler.device_arch(0) == sm90_forward.ARCH:
        (call,) = on_gpu._prepared.values()
        assert call.prepared.config.shares_keys
    on_gpu._prepared.clear()


@pytest.mark.parametrize("rows", [1, 33, 64])
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_rows_of_one_consumer(headdim: int, rows: int) -> None:
    """With every number of key tiles that one consumer may have less than another, and too few keys to share."""
    knobs: dict[str, Any] = {"headdim": headdim, **WINDOWS.get(headdim, {})}
    with whole_tiles():
        for keys in (1, 447, 520, 560, 620, 690, 760, 830, 901, 1290):
            for seqlen_q in (rows, TILE_ROWS[headdim] + rows):
                check(dense("full", 1, seqlen_q, keys, **knobs))
        for nheads_q, nheads_kv in ((3, 3), (5, 1)):
            heads = {"nheads_q": nheads_q, "nheads_kv": nheads_kv, "causal": headdim != 96}
            check(dense("causal", 2, TILE_ROWS[headdim] + rows, 800, **knobs, **heads))
        lens = (rows, 0, 2 * TILE_ROWS[headdim] + rows, 100), (900, 40, 1290, 700)
        check(padded("padded", *lens, 600, 1300, **knobs))
        check(ragged("ragged", *lens, **knobs, on_device=True, dtype="float16"))


@pytest.mark.parametrize(
    ("headdim", "headdim_v"), [(104, 128), (128, 72), (192, 128), (40, 64), (250, 193)]
)
def test_head_dims(headdim: int, headdim_v: int) -> None:
    dims: dict[str, Any] = {"headdim": headdim, "headdim_v": headdim_v, "nheads_q": 4}
    with whole_tiles():
        for rows in (20, 256 + 20):
            check(dense("dims", 2, rows, 1000, **dims, nheads_kv=4, causal=True))
            check(dense("odd", 1, rows, 1000, **dims, nheads_kv=4, layout="odd", give_out=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 7.0},
    "alibi": {"alibi_slopes": "batch", "causal": True},
    "alibi-both-sides": {"alibi_slopes": "heads"},
    "score-line": {"score_mod": "relative"},
    "score-mod": {"score_mod": "slopes"},
    "sinks": {"sink_logits": "hidden", "causal": True},
    "window": {"window": (900, 20), "sink": 70},
    "top-left": {"window": (900, 800), "align": "top-left"},
    "float32-bias": {"bias": Pairs(float32=True)},
    "dropout": {"dropout_p": 0.3},
    "negative-scale": {"scale": -0.2},
    "large": {"values": "large"},
}


@pytest.mark.parametrize("headdim", [64, 128, 192])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, headdim: int) -> None:
    """With few rows past a tile's end, and with rows of several heads in a tile."""
    knobs = {"headdim": headdim, **OPTIONS[name]}
    with whole_tiles():
        for rows, nheads_q in ((TILE_ROWS[headdim] + 30, 2), (30, 1)):
            verify(dense(name, 2, rows, 1100, **knobs, nheads_q=nheads_q, nheads_kv=nheads_q), CUPY)
        verify(dense(name, 1, 60, 1100, **knobs, nheads_q=8, nheads_kv=2), CUPY)


@pytest.mark.parametrize("heads", [(8, 2), (10, 2), (4, 4)])
@pytest.mark.parametrize("page_size", [16, 48, 7])
def test_pages(page_size: int, heads: tuple[int, int]) -> None:
    rows = (48 * 3 + 16, 3, 16, 200)
    call = paged(
        (1700, 33, 900, 1290), page_size, rows=rows, dims=(128, 128), heads=heads, packed=True
    )
    for options in ({"causal": True}, {"window": (700, 0), "sink": 5}, {}):
        with whole_tiles():
            check_pages(call, "sm90", **options)
        with splitting():
            check_pages(call, "sm90", **options)


@pytest.mark.parametrize("page_size", [32, 9])
def test_split_tiles_in_pages(page_size: int) -> None:
    call = paged((60_000,), page_size, rows=48 + 16, dims=(128, 128), heads=(8, 2))
    with splitting():
        check_pages(call, "sm90", causal=True)


@pytest.mark.parametrize("page_size", [16, 40, 640])
def test_pieces_in_pages(page_size: int) -> None:
    """Pieces with rows for one consumer, and for all, in any order. Boxes of the former's tiles are divided among warps."""
    draw = np.random.default_rng(page_size)
    lens = tuple(int(n) for n in draw.integers(1, 4000, 40))
    rows = tuple(
        int(min(n, m)) for n, m in zip(lens, draw.choice([9, 16, 48, 60, 130], 40), strict=True)
    )
    call = paged(lens, page_size, rows=rows, dims=(128, 128), heads=(8, 2), packed=True)
    with splitting(), sharing(240):
        for options in ({"causal": True}, {}):
            check_pages(call, "sm90", **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [16, 3 * 48 + 10])
def test_split_tiles(rows: int, causal: bool) -> None:
    """Split tiles whose parts have enough keys to share, and too few."""
    knobs: dict[str, Any] = {"nheads_q": 8, "nheads_kv": 2, "headdim": 128, "causal": causal}
    with only("sm90"), splitting():
        for batch, keys in ((1, 3000), (40, 1500), (3, 30_000)):
            verify(dense("split", batch, rows, keys, **knobs), CUPY)


def test_what_merging_leaves_behind() -> None:
    """Tiles that follow a shared one in the same memory have the same bits as without it.

    Of tiles with five interleaved heads some rows belong to no query. Were the outputs of consumers left there, these would be
    other rows' queries: huge ones, and NaN.
    """
    import cupy

    import rawattn

    draw = cupy.random.default_rng(3)
    q, k, v = (
        draw.standard_normal((600, n, heads, 128), dtype=np.float32).astype(np.float16)
        for n, heads in ((38 + 10, 5), (700, 1), (700, 1))
    )
    v *= 1000
    with whole_tiles():
        found = rawattn.attention(q, k, v).view(np.uint16)
        if compiler.device_arch(0) == sm90_forward.ARCH:
            (call,) = on_gpu._prepared.values()
            assert call.prepared.config.interleaved
            assert call.prepared.config.shares_keys
        alone = rawattn.attention(q[:, :38], k, v).view(np.uint16)
    assert (found[:, :38] == alone).all()


def test_same_bits_each_time() -> None:
    import cupy

    import rawattn

    draw = cupy.random.default_rng(7)
    q, k, v = (
        draw.standard_normal((1, n, 16, 128), dtype=np.float32).astype(np.float16)
        for n in (192 + 40, 2000, 2000)
    )
    with whole_tiles():
        first, *others = [rawattn.attention(q, k, v).view(np.uint16) for _ in range(40)]
    assert all((x == first).all() for x in others)
