"""Hopper's forward on paged keys, on the simulator: TMA boxes of pages, zeros behind the last key, pages that are not read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rawattn._kernels.sm90 import line_estimate, stream_k
from tests import exhaustive
from tests.paged import BFLOAT16, paged
from tests.shim.device import MakeDevice
from tests.shim.paged import LATE, OPTIONS, WIDE, finite, run_on_device, verify_sm90, with_any_ids
from tests.shim.whole import small_tiles
from tests.tiles import sharing, splitting

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

THREE = (16, 3, 2, 1, False, True, 160, False)
THREE_SLOTS = (16, 3, 3, 1, False, True, 160, False)
TURNS = (48, 3, 3, 1, True, False, 160, True)
FOUR = (32, 4, 4, 1, False, True, 112, False)
LONE = (64, 1, 2, 1, False, True, 256, False)
SHAPES = (LATE, WIDE, LONE)
F16 = np.dtype(np.float16)
LENS = (70, 3, 0, 129)
KNOBS: dict[str, Any] = {"dims": (32, 16), "rows": 40}


# Page sizes for boxes of 8 or 16 rows, pages within a tile, tiles within a page, and neither. Pages that boxes of 8 rows do
# not divide are copied row by row.
@pytest.mark.parametrize(
    ("page_size", "shape"),
    exhaustive.thin(itertools.product((1, 3, 8, 16, 20, 24, 64, 128, 1000), SHAPES), 7),
)
def test_pages(hopper: MakeDevice, page_size: int, shape: Any) -> None:
    pair = page_size % 16 == 0
    knobs = {**KNOBS, "integers": np.int64 if pair else np.int32, "heads_first": page_size == 64}
    call = paged(LENS, page_size, pair=pair, **knobs)
    verify_sm90(hopper(), call, shape, causal=True)
    verify_sm90(hopper(2), call, shape, on_device=True)


# Heads of a page interleaved or one after the other, one head, one page; more blocks of columns in keys, or in values.
@pytest.mark.parametrize(
    ("page_size", "dims", "heads", "heads_first"),
    exhaustive.thin([
        (8, (128, 64), (4, 2), False),
        (16, (128, 128), (2, 1), False),
        (24, (64, 128), (3, 3), True),
        (64, (192, 128), (2, 2), True),
        (1000, (128, 128), (2, 1), True),
    ], 3),
)  # fmt: skip
def test_boxes_of_whole_rows(
    hopper: MakeDevice,
    page_size: int,
    dims: tuple[int, int],
    heads: tuple[int, int],
    heads_first: bool,
) -> None:
    lens = (70,) if page_size == 1000 else (70, 3, 129)
    call = paged(lens, page_size, rows=40, dims=dims, heads=heads, heads_first=heads_first)
    for seed, options in enumerate(({"causal": True}, {"window": (20, 4)}), 1):
        device = hopper(seed)
        verify_sm90(device, call, LATE, **options)
        assert any(" whole" in each for each in device.summaries)


@pytest.mark.parametrize(
    ("page_size", "shape", "align", "mask"),
    exhaustive.thin(
        itertools.product(
            (8, 3),
            SHAPES,
            ("bottom-right", "top-left"),
            ({"window": (12, 0)}, {"window": (40, 3), "sink": 8}, {"causal": True}),
        ),
        5,
    ),
    ids=str,
)
def test_masks(
    hopper: MakeDevice, page_size: int, shape: Any, align: str, mask: dict[str, Any]
) -> None:
    call = paged((150, 33, 5), page_size, rows=37, dims=(16, 24), heads=(6, 2), dtype=F16)
    verify_sm90(hopper(), call, shape, align=align, **mask)


@pytest.mark.parametrize(
    ("page_size", "name"), exhaustive.thin(itertools.product((8, 5), OPTIONS), 5)
)
def test_options_of_scores(hopper: MakeDevice, page_size: int, name: str) -> None:
    """Options of scores are right; rows of a page behind the sequence's last key hold NaN."""
    call = paged((150, 33, 0), page_size, rows=9, dims=(16, 16))
    verify_sm90(hopper(), call, on_device=True, **OPTIONS[name])


@pytest.mark.parametrize(("page_size", "shape"), [(8, LATE), (16, WIDE), (3, LONE)], ids=str)
def test_alibi_on_both_sides(hopper: MakeDevice, page_size: int, shape: tuple[Any, ...]) -> None:
    """ALiBi on both sides of the diagonal is right, where the tile with the sequence's end, NaN behind it, is not the last."""
    call = paged((170, 3, 0, 129), page_size, **KNOBS)
    slopes = np.float32([0.5, -0.2, 0.01, 2])[: call.q.shape[-2]]
    verify_sm90(hopper(), call, shape, alibi_slopes=slopes)


@pytest.mark.parametrize("page_size", [24, 1])
def test_batches(hopper: MakeDevice, page_size: int) -> None:
    packed = paged((70, 9, 0, 129), page_size, rows=(40, 9, 4, 1), packed=True, pair=True)
    padded = paged((70, 9, 5, 129), 16, rows=(50, 0, 2, 1), room_q=51)
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
    """Split keys are right with lengths on the device, also if a sequence has fewer key tiles than pieces."""
    packed = paged((200, 9, 0, 129), 24, rows=(140, 9, 4, 1), packed=True, pair=True)
    padded = paged((150, 9, 75), 8, rows=37, dims=(16, 24), heads=(6, 2), dtype=F16)
    by_rows = paged((150, 9, 75), 1, rows=37, dims=(72, 24), heads=(6, 2))
    with splitting():
        for seed, call in enumerate((packed, padded, by_rows), 1):
            device = hopper(seed)
            verify_sm90(device, call, shape, on_device=seed == 1, **options)
            assert any("stream_k" in each for each in device.summaries)


@pytest.mark.parametrize("lens", [(330, 300, 320), (170,), (330, 100, 320)], ids=str)
@pytest.mark.parametrize("rows", [197, 310], ids=str)
def test_last_tiles_are_weighed(hopper: MakeDevice, rows: int, lens: tuple[int, ...]) -> None:
    """A line that weighs last tiles, of one sequence or several. Where lengths differ, last tiles count as others."""
    calls = [
        paged(lens, 8, rows=rows, dims=(16, 24), heads=(2, 2), dtype=F16),
        paged(lens, 24, rows=rows // 2, dims=(32, 16), heads=(8, 2)),
    ]
    share = mock.Mock(wraps=line_estimate.last_share)
    with splitting(), mock.patch.object(line_estimate, "last_share", share):
        for seed, call in enumerate(calls, 1):
            verify_sm90(hopper(seed), call, THREE, on_device=seed == 1)
            assert line_estimate.last_share(*share.call_args.args) > 0


@pytest.mark.parametrize("rows", [(197, 210, 255), (197, 255, 190), (197, 0, 250)], ids=str)
def test_last_tiles_are_weighed_by_lengths_on_the_device(
    hopper: MakeDevice, rows: tuple[int, ...]
) -> None:
    """The kernel weighs last tiles where all sequences have rows for four consumers, which it alone knows."""
    knobs: dict[str, Any] = {"rows": rows, "dims": (16, 24), "heads": (2, 2), "dtype": F16}
    lines: list[Any] = []

    def keep(*args: Any) -> Any:
        lines.append(split(*args))
        return lines[-1]

    split = stream_k.split
    with splitting(), mock.patch.object(stream_k, "split", keep):
        for seed, layout in enumerate(({"room_q": 255}, {"packed": True}), 1):
            call = paged((330, 300, 320), 8, **knobs, **layout)
            verify_sm90(hopper(seed), call, THREE, on_device=True)
            # A packed batch may have too few rows for that, which the host can tell.
            if "room_q" in layout or sum(rows) > 3 * 192:
                assert lines[-1].last_share > 0
                assert lines[-1].busy_consumers == 4


@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize(
    ("shape", "page_size", "dims"),
    [(THREE_SLOTS, 8, (16, 24)), (TURNS, 24, (40, 16)), (FOUR, 8, (64, 64))],
    ids=str,
)
def test_boxes_of_shared_tiles_are_divided(
    hopper: MakeDevice,
    shape: tuple[Any, ...],
    page_size: int,
    dims: tuple[int, int],
    seed: int,
) -> None:
    """Two warps divide the boxes of tiles that consumers share, before, between and after pieces whose tiles one warp loads
    alone: of fewer key tiles than slots, and of many."""
    full = 64 * shape[1]
    lens, rows = (330, 20, 150, 90, 400, 40, 200), (full + 20, 20, 30, full, 9, 50, full + 64)
    call = paged(lens, page_size, rows=rows, dims=dims, heads=(2, 2), dtype=F16, packed=True)
    with splitting(), sharing(144):
        device = hopper(seed, checked=seed == 6)
        verify_sm90(device, call, shape, on_device=True, causal=seed % 2 == 0)
        assert "stream_k" in device.summaries[-1]


@pytest.mark.parametrize("page_size", [8, 3])
def test_pages_that_no_row_sees_are_not_read(hopper: MakeDevice, page_size: int) -> None:
    """Block-table entries of pages that no row sees may hold anything: the pages that they lead to hold NaN."""
    call = paged((150, 75), page_size, rows=2, dims=(32, 32))
    table = call.block_table + 1
    table[0, 1 : 118 // page_size] = -1  # the window of the first row begins at key 118
    table[1, 1 : 43 // page_size] = 1 << 30
    ends = [(1, 1), (0, 0), (0, 0), (0, 0)]
    pools = {
        name: np.pad(getattr(call, name).astype(np.float32), ends, constant_values=np.nan)
        for name in ("k_pages", "v_pages")
    }
    freed = replace(
        call, **{name: x.astype(BFLOAT16) for name, x in pools.items()}, block_table=table
    )
    for shape in SHAPES:
        verify_sm90(hopper(), freed, shape, window=(30, 0), sink=3)
    behind = paged((150, 75), page_size, rows=20, dims=(32, 32))
    behind.block_table[:, 22 // page_size + 1 :] = -1  # the last row sees key 22
    for name in ("k_pages", "v_pages"):
        getattr(behind, name)[0] = np.nan  # where clamped ids lead
    verify_sm90(hopper(), behind, WIDE, window=(None, 3), align="top-left")


@pytest.mark.parametrize("page_size", [8, 3])
@pytest.mark.parametrize("pair", [False, True])
def test_no_integer_leads_outside(hopper: MakeDevice, pair: bool, page_size: int) -> None:
    """No page id leads to an access outside the arrays (the simulator would fault)."""
    call = paged((70, 9, 30), page_size, pair=pair, rows=3, dims=(16, 16))
    bad = with_any_ids(finite(call))
    lengths = np.array([10_000, -3, 2**31 - 1], np.int32)
    device = hopper(checked=True)
    with small_tiles(sm90_forward=WIDE):
        out, _ = run_on_device(device, replace(bad, seqlen_k=lengths), family="sm90")
    assert np.isfinite(out.astype(np.float32)).all()
