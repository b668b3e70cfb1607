"""The tiles that the portable decoding kernel chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rawattn._call.options import ArrayForm
from rawattn._call.pages import PageForm
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import decode, decode_tiles
from tests.problems import CALL_OF_MANY, H200


@pytest.mark.parametrize(
    ("dtype", "headdim", "keys", "batch", "shape"),
    [
        # eight kv heads; shape: waves and blocks on an SM
        ("float16", 128, 9000, 16, (8, 1)),  # 128 streams
        ("float16", 128, 9000, 17, (2, 4)),
        ("float16", 64, 2047, 16, (8, 1)),
        ("float16", 64, 2048, 7, (8, 1)),
        ("float16", 64, 2048, 8, (3, 4)),
        ("float16", 96, 2048, 16, (8, 1)),
        ("float16", 96, 100, 17, (3, 4)),
        ("float16", 256, 100, 17, (3, 2)),
        ("float8", 128, 9000, 16, (8, 1)),
        ("float8", 128, 9000, 17, (2, 4)),
        ("float8", 192, 100, 17, (4, 2)),  # as with few streams
        ("float32", 32, 100, 16, (4, 2)),
        ("float32", 32, 100, 17, (3, 4)),
        ("float32", 128, 100, 17, (3, 2)),
        ("float32", 192, 100, 17, (3, 1)),
    ],
)
def test_blocks_of_many_streams(
    dtype: str, headdim: int, keys: int, batch: int, shape: tuple[int, int]
) -> None:
    problem = replace(CALL_OF_MANY, batch=batch, nheads_q=32, nheads_kv=8)
    problem = replace(problem, rows_k=keys, max_seqlen_k=keys, headdim=headdim, headdim_v=headdim)
    if dtype == "float8":
        pages = PageForm(1, batch * keys, keys, False, "int32")
        problem = replace(problem, ragged=True, pages=pages, float8=True)
    else:
        problem = replace(problem, dtype=dtype)
    config = decode.choose(problem, H200, Operands())
    assert (config.waves, config.blocks_per_sm) == shape


def test_small_blocks_where_an_sm_has_no_room_for_as_many() -> None:
    problem = replace(CALL_OF_MANY, batch=17, nheads_q=32, nheads_kv=8, headdim=128, headdim_v=128)
    assert decode.choose(problem, H200, Operands()).blocks_per_sm == 4
    ada = replace(H200, arch="sm_89", shared_limit=101376)
    assert decode.choose(problem, ada, Operands()).blocks_per_sm == 1


def test_wide_tiles_stay_in_one_block() -> None:
    problem = replace(CALL_OF_MANY, batch=17, nheads_q=256, nheads_kv=8, headdim=64, headdim_v=64)
    config = decode.choose(problem, H200, Operands())
    assert (config.tile_rows, config.blocks_per_sm) == (32, 1)


@pytest.mark.parametrize("headdim", [8, 32, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8"])
@pytest.mark.parametrize("heads", [8, 32, 160])
@pytest.mark.parametrize("batch", [1, 100])
def test_some_tile_fits_every_gpu(heads: int, batch: int, dtype: str, headdim: int) -> None:
    """A block of a consumer GPU may use 99 KiB of shared memory."""
    dims = {"headdim": headdim, "headdim_v": headdim, "rows_k": 4096, "max_seqlen_k": 4096}
    problem = replace(CALL_OF_MANY, batch=batch, nheads_q=heads, nheads_kv=8, **dims)
    if dtype == "float8":
        pages = PageForm(1, 8, 8, False, "int32")
        problem = replace(problem, ragged=True, pages=pages, float8=True)
    else:
        problem = replace(problem, dtype=dtype)
    ada = replace(H200, arch="sm_89", shared_limit=101376)
    assert decode.choose(problem, ada, Operands()).shared_bytes <= 101376


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize(
    ("group", "rows", "shape"),
    [
        # shape: rows, heads and queries of a tile
        (4, 1, (8, 4, 1)),
        (4, 2, (8, 4, 2)),
        (4, 3, (16, 4, 4)),
        (8, 3, (24, 8, 3)),
        (5, 4, (24, 5, 4)),
        (7, 4, (32, 7, 4)),
        (8, 5, (32, 8, 4)),  # two tiles
        (20, 1, (24, 20, 1)),
        (40, 1, (24, 20, 1)),
    ],
)
def test_blocks_of_eight_rows(
    group: int, rows: int, shape: tuple[int, int, int], float8: bool
) -> None:
    """Where they fill a tile of float8 better than blocks of sixteen."""
    problem = replace(CALL_OF_MANY, nheads_q=group, rows_q=rows, max_seqlen_q=rows)
    if float8:
        problem = replace(problem, float8=True, pages=PageForm(16, 8, 8, False, "int32"))
        problem = replace(problem, ragged=True)
    else:
        fits, heads, queries = shape
        wider = {8: 16, 24: 32}.get(fits, fits)
        shape = (wider, heads, queries if rows == 1 else wider // heads)
    config = decode.choose(problem, H200, Operands())
    assert (config.tile_rows, config.heads, config.tile_q) == shape
    form = ArrayForm("bfloat16", (1, 1, 1, 128), (1, 1, 1, 128))
    assert decode_tiles.in_blocks_of_eight(replace(problem, bias=form)) is None
    assert decode_tiles.in_blocks_of_eight(replace(problem, dtype="float32")) is None
    wide_waves = decode.choose(problem, replace(H200, wave=64), Operands())
    assert wide_waves.tile_rows in {16, 32}
