"""Hopper's forward on pages of 8-bit elements, on the simulator: converted key tiles, queries converted to float16."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests import exhaustive
from tests.paged import BFLOAT16, FLOAT8, Paged, paged, verify
from tests.shim.device import MakeDevice
from tests.shim.paged import (
    LATE,
    OPTIONS,
    WIDE,
    run,
    run_on_device,
    verify_kernel,
    verify_sm90,
    with_any_ids,
)
from tests.shim.whole import small_tiles
from tests.tiles import splitting

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

LONE = (64, 1, 3, 1, False, True, 256, False)
SHAPES = (LATE, WIDE, LONE)
F16 = np.dtype(np.float16)
LENS = (70, 3, 0, 129)
SCALES = ("plain", "numbers", "arrays")
KNOBS: dict[str, Any] = {"dims": (32, 16), "rows": 40}
_OWN: dict[str, Any] = {"dims": (16, 16), "float8": "arrays"}


@pytest.mark.parametrize(
    ("page_size", "shape"),
    exhaustive.thin(itertools.product((1, 8, 16, 20, 24, 64, 128, 1000), SHAPES), 7),
)
def test_pages(hopper: MakeDevice, page_size: int, shape: Any) -> None:
    """Results are right for every page size; rows of pages that no sequence has hold NaN."""
    pair = page_size % 16 == 0
    knobs = {**KNOBS, "integers": np.int64 if pair else np.int32, "heads_first": page_size == 64}
    for n, float8 in enumerate(SCALES):
        dtype = F16 if n == 1 else BFLOAT16
        call = paged(LENS, page_size, pair=pair, float8=float8, dtype=dtype, **knobs)
        verify_sm90(hopper(n), call, shape, on_device=n == 1, causal=n != 1)


# Head dims for which boxes of 128 columns of 8 bits are full, half full or less, and become one or two blocks of 64 columns.
@pytest.mark.parametrize(
    ("dims", "dtype"),
    exhaustive.thin(
        itertools.product(
            ((64, 64), (96, 96), (128, 80), (144, 256), (16, 192), (256, 32)), (BFLOAT16, F16)
        ),
        5,
    ),
    ids=str,
)
def test_widths(hopper: MakeDevice, dims: tuple[int, int], dtype: Any) -> None:
    call = paged((70, 33), 16, rows=40, heads=(6, 2), dims=dims, dtype=dtype, float8="arrays")
    for seed, shape in enumerate((LATE, WIDE)):
        verify_sm90(hopper(seed, checked=seed == 1), call, shape, window=(50, 0), sink=4)


@pytest.mark.parametrize("name", exhaustive.thin(OPTIONS, 4))
def test_options_of_scores(hopper: MakeDevice, name: str) -> None:
    for dtype in (BFLOAT16, F16):
        call = paged((150, 33, 0), 8, rows=9, dtype=dtype, **_OWN)
        options = {n: x.astype(dtype) if n == "bias" else x for n, x in OPTIONS[name].items()}
        verify_sm90(hopper(), call, on_device=True, **options)


@pytest.mark.parametrize(
    ("align", "mask"),
    exhaustive.thin(
        itertools.product(
            ("bottom-right", "top-left"),
            ({"window": (12, 0)}, {"window": (40, 3), "sink": 8}, {"causal": True}),
        ),
        4,
    ),
    ids=str,
)
def test_masks(hopper: MakeDevice, align: str, mask: dict[str, Any]) -> None:
    call = paged((150, 33, 5), 8, rows=37, dims=(16, 32), heads=(6, 2), float8="numbers")
    for shape in (LATE, LONE):
        verify_sm90(hopper(), call, shape, align=align, **mask)


def test_batches(hopper: MakeDevice) -> None:
    packed = paged((70, 9, 0, 129), 24, rows=(40, 9, 4, 1), packed=True, pair=True, **_OWN)
    padded = paged((70, 9, 5, 129), 16, rows=(50, 0, 2, 1), room_q=51, **_OWN)
    for call in (packed, padded):
        verify_sm90(hopper(), call, LATE, causal=True)
        verify_sm90(hopper(), call, WIDE, on_device=True)


@pytest.mark.parametrize(
    ("shape", "options"),
    exhaustive.thin(
        itertools.product(SHAPES, ({}, {"causal": True}, {"window": (60, 0), "sink": 5})), 4
    ),
    ids=str,
)
def test_tiles_split_by_keys(hopper: MakeDevice, shape: Any, options: dict[str, Any]) -> None:
    """Split keys are right: each piece of a tile scales queries by a unit of its own, and all use the values' scale."""
    packed = paged((200, 9, 0, 129), 24, rows=(140, 9, 4, 1), packed=True, pair=True, **_OWN)
    padded = paged((150, 9, 75), 8, rows=37, heads=(6, 2), dtype=F16, **_OWN)
    with splitting():
        for seed, call in enumerate((packed, padded), 1):
            device = hopper(seed)
            verify_sm90(device, call, shape, on_device=seed == 1, **options)
            assert any("stream_k" in each for each in device.summaries)


def test_queries_beyond_float16(hopper: MakeDevice) -> None:
    """bfloat16 queries beyond the range of float16, in which products are computed, are right; inf affects only its row."""
    call = paged((33, 20), 16, rows=30, heads=(4, 2), dims=(48, 48), float8="arrays")
    for power in (40, -40):
        sized = (call.q.astype(np.float32) * 2.0**power).astype(BFLOAT16)
        scale = 2.0**-power / 6
        verify_sm90(hopper(), replace(call, q=sized), scale=scale)
    infinite = sized.copy()
    infinite[0, 1, 2, 5] = np.inf
    results = []
    for q in (sized, infinite):
        with small_tiles(sm90_forward=WIDE):
            out, _ = run(hopper(), replace(call, q=q), family="sm90", scale=scale)
        results.append(out.astype(np.float32))
    others = np.ones(out.shape[:-1], bool)
    others[0, 1, 2] = False
    np.testing.assert_array_equal(results[1][others], results[0][others])


@pytest.mark.parametrize("dtype", [BFLOAT16, F16], ids=str)
def test_all_numbers_of_8_bits(hopper: MakeDevice, dtype: Any) -> None:
    """With one key the output is its value, for each 8-bit number; NaN reaches only the row that sees it."""
    every = np.arange(256, dtype=np.uint8).view(FLOAT8)
    call = paged((1,), 8, rows=40, heads=(1, 1), dims=(256, 256), dtype=dtype, float8="plain")
    zeros, pool = np.zeros_like(call.k_pages), np.full_like(call.v_pages, np.nan)
    page = call.block_table[0, 0]
    pool[page, 0] = every
    for pools in ((zeros, pool), (pool, zeros)):
        with small_tiles(sm90_forward=LONE):
            given = replace(call, k_pages=pools[0], v_pages=pools[1])
            out, _ = run(hopper(), given, family="sm90")
        rows = out.reshape(40, 256).astype(np.float32)
        if pools[1] is pool:
            np.testing.assert_array_equal(
                rows, np.broadcast_to(every.astype(np.float32), (40, 256))
            )
        else:
            assert np.isnan(rows).all()


def test_pages_that_no_row_sees_are_not_read(hopper: MakeDevice) -> None:
    """Block-table entries of pages that no row sees may hold anything: the pages that they lead to hold NaN."""
    call = paged((150, 75), 8, rows=2, dims=(32, 32), float8="arrays")
    table = call.block_table + 1
    table[0, 1:14] = -1  # the window of the first row begins at key 118
    table[1, 1:5] = 1 << 30
    pools = {}
    for name in ("k_pages", "v_pages"):
        pool = getattr(call, name).view(np.uint8)
        ends = [(1, 1), (0, 0), (0, 0), (0, 0)]
        pools[name] = np.pad(pool, ends, constant_values=0x7F).view(FLOAT8)
    freed = replace(call, **pools, block_table=table)
    for shape in SHAPES:
        verify_sm90(hopper(), freed, shape, window=(30, 0), sink=3)


@pytest.mark.parametrize("pair", [False, True])
def test_no_integer_leads_outside(hopper: MakeDevice, pair: bool) -> None:
    """No page id leads to an access outside the arrays (the simulator would fault)."""
    call = paged((70, 9, 30), 8, pair=pair, rows=3, **_OWN)
    bad = with_any_ids(call)
    lengths = np.array([10_000, -3, 2**31 - 1], np.int32)
    with small_tiles(sm90_forward=WIDE):
        run_on_device(hopper(checked=True), replace(bad, seqlen_k=lengths), family="sm90")


@pytest.mark.parametrize(
    "call",
    [
        paged((70,), 16, rows=40, **_OWN, dtype=np.float32),
        paged((70,), 16, rows=40, dims=(24, 24), float8="arrays"),  # rows of 24 bytes
    ],
    ids=("float32", "stride"),
)
def test_what_the_engine_cannot_bring(hopper: MakeDevice, call: Paged) -> None:
    device = hopper()
    verify_kernel(device, call, family="sm90")
    assert "rawattn_forward" in device.launched


@pytest.mark.exhaustive
def test_shipped_tiles(hopper: MakeDevice) -> None:
    for dim, dtype in zip((64, 96, 128, 192, 256), itertools.cycle((BFLOAT16, F16)), strict=False):
        call = paged(
            (300, 130), 16, rows=70, heads=(4, 1), dims=(dim, dim), dtype=dtype, float8="arrays"
        )
        device = hopper()
        out, lse = run(device, call, family="sm90")
        verify(call, out, lse)
        assert "rawattn_sm90_forward" in device.launched
