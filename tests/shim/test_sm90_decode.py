"""sm90/decode.cu on the simulator: TMA boxes in rings of waves, the swizzle, keys that no row may see."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._kernels.portable import splits
from tests import exhaustive
from tests.paged import BFLOAT16, Paged, paged, verify
from tests.shim.device import Device, MakeDevice
from tests.shim.paged import (
    OPTIONS,
    each_decoded,
    finite,
    normal,
    run,
    run_on_device,
    verify_kernel,
    with_any_ids,
)
from tests.shim.whole import small_tiles, verify_forward

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

F16 = np.dtype(np.float16)
LENS = (70, 3, 0, 129, 16)


def verify_decode(device: Device, call: Paged, **options: Any) -> None:
    verify_kernel(device, call, family="decode", **options)
    assert "rawattn_sm90_decode" in device.launched


@pytest.mark.parametrize(
    ("heads", "rows"),
    exhaustive.thin(
        itertools.product(((4, 4), (8, 2), (5, 1), (12, 2), (34, 1), (74, 2)), (1, 3)), 5
    ),
    ids=str,
)
def test_rows_of_heads(hopper: MakeDevice, heads: tuple[int, int], rows: int) -> None:
    verify_decode(hopper(), paged(LENS, 16, rows=rows, heads=heads), causal=True)


# Head dims for which blocks of 64 columns are full, half full, or behind the last column.
@pytest.mark.parametrize(
    ("dims", "dtype"),
    exhaustive.thin(
        itertools.product(((64, 64), (32, 16), (72, 136), (128, 64), (8, 256)), (F16, BFLOAT16)), 5
    ),
    ids=str,
)
def test_widths(hopper: MakeDevice, dims: tuple[int, int], dtype: Any) -> None:
    call = paged(LENS, 32, rows=2, heads=(6, 2), dims=dims, dtype=dtype)
    for num_splits in (1, 3):
        verify_decode(hopper(num_splits, checked=num_splits == 1), call, num_splits=num_splits)


@pytest.mark.parametrize(("page_size", "pair"), [(8, False), (16, False), (24, True), (1024, True)])
def test_pages(hopper: MakeDevice, page_size: int, pair: bool) -> None:
    knobs = {"integers": np.int64 if pair else np.int32, "heads_first": pair}
    call = paged(LENS, page_size, pair=pair, rows=3, **knobs)
    verify_decode(hopper(), call, causal=True)
    verify_decode(hopper(2), call, on_device=True)


@pytest.mark.parametrize(
    ("page_size", "dims", "heads", "heads_first"),
    [
        (16, (128, 128), (4, 2), False),
        (8, (128, 64), (4, 1), False),
        (24, (64, 128), (3, 3), True),
        (48, (256, 192), (8, 2), True),
        (16, (192, 256), (2, 2), False),
    ],
)
def test_boxes_of_whole_rows(
    hopper: MakeDevice,
    page_size: int,
    dims: tuple[int, int],
    heads: tuple[int, int],
    heads_first: bool,
) -> None:
    """Values of rows that no query row sees hold NaN: behind the last key, and of a key that a mask hides."""
    knobs: dict[str, Any] = {"dims": dims, "heads": heads, "heads_first": heads_first}
    call = paged(LENS, page_size, rows=2, **knobs)
    keep = np.random.default_rng(0).random((len(LENS), 1, 1, max(LENS))) < 0.6
    keep[..., 5] = False
    for seed, options in enumerate(({"causal": True}, {"window": (20, 4)}, {"mask": keep}), 1):
        device = hopper(seed)
        if "mask" in options:
            for sequence in (0, 3, 4):  # the others are shorter
                page = call.block_table[sequence, 5 // page_size]
                call.v_pages[page, 5 % page_size] = np.nan
        verify_decode(device, call, **options)
        assert any(" whole" in each for each in device.summaries)


@pytest.mark.parametrize(
    ("lens", "heads", "dim", "page_size"),
    [(5000, (2, 2), 128, 16), (300, (8, 1), 64, 24), (200, (2, 1), 128, 8)],
    ids=str,
)
def test_one_sequence(
    hopper: MakeDevice, lens: int, heads: tuple[int, int], dim: int, page_size: int
) -> None:
    """A call with one sequence, in which lanes issue TMA loads before the block's first barrier, is right."""
    call = paged((lens,), page_size, rows=1, heads=heads, dims=(dim, dim))
    for seed in (1, 2, 3):
        device = hopper(seed)
        verify(call, *run(device, call, family="decode"))
        assert "rawattn_sm90_decode" in device.launched


@pytest.mark.parametrize(
    ("lens", "heads", "dim", "gap"),
    [((90,) * 8, (2, 2), 256, 4), ((300,) * 2, (24, 1), 96, 1), ((5000,), (2, 2), 128, 1)],
    ids=str,
)
def test_queries_anywhere(
    hopper: MakeDevice, lens: tuple[int, ...], heads: tuple[int, int], dim: int, gap: int
) -> None:
    """Queries at any alignment are right. Keys are aligned for TMA; among the shipped tiles are some of three and six waves."""
    call = paged(lens, 16, rows=1, heads=heads, dims=(dim, dim))
    wide = np.zeros((*call.q.shape[:-1], dim + gap), call.q.dtype)
    wide[..., :dim] = call.q
    call = replace(call, q=wide[..., :dim])
    device = hopper()
    verify(call, *run(device, call, family="decode"))
    assert "rawattn_sm90_decode" in device.launched


@pytest.mark.parametrize("num_splits", exhaustive.thin([None, 2, 5, 256], 2))
@each_decoded
def test_options(hopper: MakeDevice, options: dict[str, Any], num_splits: int | None) -> None:
    """Options are right; rows of a page behind the sequence's last key hold NaN."""
    verify_decode(hopper(), paged((150, 33, 0), 16, rows=3), num_splits=num_splits, **options)


@pytest.mark.parametrize("pair", [False, True])
def test_group_mode(hopper: MakeDevice, pair: bool) -> None:
    call = paged((70, 9, 0, 129), 16, rows=(4, 9, 0, 1), packed=True, pair=pair)
    verify_decode(hopper(), call, on_device=pair, causal=True, num_splits=3)


def test_padded_batch(hopper: MakeDevice) -> None:
    call = paged((70, 9, 5, 129), 16, rows=(5, 0, 2, 1), room_q=6)
    verify_decode(hopper(), call, causal=True)


@pytest.mark.parametrize("num_splits", [None, 2])
@pytest.mark.parametrize("least", exhaustive.thin([16, 48, 300], 2))
@pytest.mark.parametrize(
    "call",
    [
        paged((1500, 3, 0, 129, 16, 33, 400, 1, 0), 16, rows=2),
        paged((33,) * 150, 16, rows=1, heads=(2, 1), dims=(16, 16)),
        paged((70, 300, 0, 129), 16, rows=(4, 30, 0, 1), packed=True, heads=(8, 2)),
    ],
    ids=("uneven", "many", "group"),
)
def test_parts_of_a_line(
    hopper: MakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    call: Paged,
    least: int,
    num_splits: int | None,
) -> None:
    """Blocks that handle several parts are right: a ring's slots hold key tiles, then partial results, then tiles again."""
    monkeypatch.setattr(splits, "LEAST_PART_KEYS", least)
    for seed in (1, 2):
        verify_decode(hopper(seed), call, causal=True, num_splits=num_splits)


@pytest.mark.parametrize("ragged", [False, True])
def test_keys_in_rows(hopper: MakeDevice, ragged: bool) -> None:
    """Keys in rows are right. Values behind a sequence's last key, which hold NaN, do not reach the output."""
    device = hopper()
    options: dict[str, Any] = {"causal": True}
    q, k, v = (normal(2, n, heads, 32, dtype=BFLOAT16) for n, heads in ((2, 6), (300, 3), (300, 3)))
    if ragged:
        lengths = np.array([150, 299], np.int32)
        for n, length in enumerate(lengths):
            v[n, length:] = np.nan
        options["seqs"] = rawattn.SeqLayout(seqlen_k=lengths)
    with small_tiles():
        verify_forward(device, "decode", q, k, v, **options)
    assert "rawattn_sm90_decode" in device.launched


def test_packed_keys(hopper: MakeDevice) -> None:
    device = hopper()
    q, k, v = (normal(n, heads, 24, dtype=F16) for n, heads in ((7, 4), (333, 2), (333, 2)))
    seqs = rawattn.SeqLayout(
        seqstart_q=np.array([0, 2, 3, 7]), seqstart_k=np.array([0, 130, 131, 333])
    )
    with small_tiles():
        verify_forward(device, "decode", q, k, v, seqs=seqs, window=(100, 0))
    assert "rawattn_sm90_decode" in device.launched


@pytest.mark.parametrize("pair", [False, True])
def test_no_integer_leads_outside(hopper: MakeDevice, pair: bool) -> None:
    """No page id leads to an access outside the arrays (the simulator would fault)."""
    call = paged((70, 9, 30), 16, pair=pair, rows=3, dims=(16, 16))
    bad = with_any_ids(finite(call))
    lengths = np.array([10_000, -3, 2**31 - 1], np.int32)
    device = hopper(checked=True)
    with small_tiles():
        out, _ = run_on_device(device, replace(bad, seqlen_k=lengths), family="decode")
    assert "rawattn_sm90_decode" in device.launched
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize(
    "call",
    [
        paged((70,), 12, rows=1),
        paged((70,), 16, rows=1, dtype=np.float32),
        paged((70,), 16, rows=1, dims=(20, 20)),  # rows of 40 bytes
    ],
    ids=("page", "float32", "stride"),
)
def test_what_the_engine_cannot_bring(hopper: MakeDevice, call: Paged) -> None:
    device = hopper()
    verify_kernel(device, call, family="decode")
    assert "rawattn_decode" in device.launched


@pytest.mark.exhaustive
def test_shipped_tiles(hopper: MakeDevice) -> None:
    for dim, rows in itertools.product((64, 128, 192, 256), (1, 5)):
        call = paged((400, 30), 16, rows=rows, heads=(4, 1), dims=(dim, dim), dtype=BFLOAT16)
        device = hopper()
        out, lse = run(device, call, family="decode", num_splits=2)
        verify(call, out, lse)
        assert "rawattn_sm90_decode" in device.launched


# Head dims for which boxes of 128 columns are full, half full, or behind the last column.
@pytest.mark.parametrize(
    ("dims", "dtype"),
    exhaustive.thin(
        itertools.product(((128, 128), (64, 16), (144, 256), (256, 32)), (F16, BFLOAT16)), 4
    ),
    ids=str,
)
@pytest.mark.parametrize("float8", ["plain", "numbers", "arrays"])
def test_pages_of_8_bits(
    hopper: MakeDevice, dims: tuple[int, int], dtype: Any, float8: str
) -> None:
    for page_size, num_splits in ((16, 3), (24, None)):
        call = paged(LENS, page_size, rows=2, heads=(6, 2), dims=dims, dtype=dtype, float8=float8)
        checked = page_size == 24
        device = hopper(page_size, checked=checked)
        verify_decode(device, call, num_splits=num_splits, window=(50, 0), sink=4)


@pytest.mark.exhaustive
def test_shipped_tiles_of_8_bits(hopper: MakeDevice) -> None:
    for dim, rows in itertools.product((64, 128, 192, 256), (1, 5)):
        call = paged((400, 30), 16, rows=rows, heads=(4, 1), dims=(dim, dim), float8="arrays")
        device = hopper()
        out, lse = run(device, call, family="decode", num_splits=2)
        verify(call, out, lse)
        assert "rawattn_sm90_decode" in device.launched


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"dropout"}))
def test_options_of_24_rows_of_8_bits(hopper: MakeDevice, name: str) -> None:
    """18 rows that share float8 keys are one tile of three blocks of eight; with a bias they are two of sixteen."""
    call = paged((150, 33, 0), 16, rows=9, heads=(4, 2), float8="arrays")
    verify_kernel(hopper(), call, family="decode", num_splits=3, **OPTIONS[name])
