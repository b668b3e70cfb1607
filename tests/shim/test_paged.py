"""The portable forward on paged keys, on the simulator: pages within tiles, tiles within pages, invalid page ids."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests import exhaustive
from tests.paged import BFLOAT16, paged
from tests.shim.device import MakeDevice
from tests.shim.paged import (
    OPTIONS,
    finite,
    normal,
    run,
    run_on_device,
    verify_kernel,
    with_any_ids,
)
from tests.shim.whole import small_tiles

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
WAVES = (32, 64)
LENS = (70, 3, 0, 129)


# Key tiles have 16 keys: smaller, equal and larger pages.
@pytest.mark.parametrize(
    ("page_size", "pair"),
    exhaustive.thin(itertools.product((3, 1, 8, 16, 24, 64, 100, 1000), (False, True)), 5),
)
def test_pages(machine: MakeDevice, page_size: int, pair: bool) -> None:
    integers = np.int64 if pair == (page_size % 8 == 0) else np.int32
    knobs = {"integers": integers, "heads_first": page_size % 3 == 0}
    call = paged(LENS, page_size, pair=pair, rows=3, **knobs)
    verify_kernel(machine(WAVES[pair]), call, causal=True)
    verify_kernel(machine(WAVES[pair]), call, on_device=True)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    exhaustive.thin(itertools.product(((5, 1), (12, 2), (7, 1)), (F16, BFLOAT16, F32)), 4),
    ids=str,
)
def test_rows_and_groups_of_heads(machine: MakeDevice, heads: tuple[int, int], dtype: Any) -> None:
    for rows in (1, 5, 40):
        verify_kernel(machine(), paged(LENS, 5, rows=rows, heads=heads, dtype=dtype), causal=True)


@pytest.mark.parametrize("headdim", exhaustive.thin([34, 1, 7, 36, 64], 5))
def test_widths(machine: MakeDevice, headdim: int) -> None:
    """Head dims whose rows in pages allow copies of 4, 2, 2, 8 and 16 bytes are right."""
    for wave in WAVES:
        verify_kernel(machine(wave), paged((33, 20), 3, dims=(headdim, headdim), dtype=F16))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_group_mode(machine: MakeDevice, pair: bool, on_device: bool) -> None:
    call = paged((70, 9, 0, 129), 12, rows=(40, 9, 4, 1), packed=True, pair=pair)
    verify_kernel(machine(), call, on_device=on_device, causal=True)


def test_padded_batch(machine: MakeDevice) -> None:
    call = paged((70, 9, 5, 129), 16, rows=(5, 0, 2, 1), room_q=6)
    verify_kernel(machine(), call, causal=True)


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize(
    "mask",
    [{"window": (12, 0)}, {"window": (40, 3), "sink": 8}, {"window": (0, 0), "sink": 33}],
    ids=str,
)  # fmt: skip
def test_masks(machine: MakeDevice, align: str, mask: dict[str, Any]) -> None:
    verify_kernel(machine(), paged((150, 33, 5), 7, rows=37), align=align, **mask)


@pytest.mark.parametrize(
    ("name", "pair"), exhaustive.thin(itertools.product(OPTIONS, (False, True)), 5)
)
def test_options_of_scores(machine: MakeDevice, name: str, pair: bool) -> None:
    call = paged((150, 33, 0), 5, rows=9, pair=pair)
    verify_kernel(machine(), call, on_device=pair, **OPTIONS[name])


def test_sequences_share_pages(machine: MakeDevice) -> None:
    verify_kernel(machine(), paged((70, 90, 49), 10, shared=3, rows=2), causal=True)


def test_pages_behind_the_window_are_the_sequences_no_more(machine: MakeDevice) -> None:
    """Block-table entries of pages before the window may hold anything: the pages that they lead to hold NaN."""
    call = paged((150, 75), 5, rows=2)
    table = call.block_table + 1
    table[0, 1:23] = -1  # the window of the first row begins at key 118
    table[1, 1:8] = 1 << 30
    ends = [(1, 1), (0, 0), (0, 0), (0, 0)]
    pools = {
        name: np.pad(getattr(call, name).astype(F32), ends, constant_values=np.nan).astype(BFLOAT16)
        for name in ("k_pages", "v_pages")
    }
    freed = replace(call, **pools, block_table=table)
    for options in ({"window": (30, 0), "sink": 3}, {"window": (30, None), "sink": 1}):
        verify_kernel(machine(), freed, **options)


@pytest.mark.parametrize("integers", [np.int32, np.int64])
@pytest.mark.parametrize("pair", [False, True])
def test_no_integer_leads_outside(machine: MakeDevice, integers: Any, pair: bool) -> None:
    """No page id leads to an access outside the arrays (the simulator would fault)."""
    call = paged((70, 9, 30), 6, integers=integers, pair=pair, rows=3)
    with small_tiles():
        out, _ = run(machine(checked=True), with_any_ids(finite(call)), on_device=True)
    assert np.isfinite(out.astype(F32)).all()


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(
    "option", [{}, {"mask": normal(1, 3, 200) > -1, "window": (20, 0)}], ids=["plain", "mask"]
)
def test_lengths_on_the_device_are_cut(machine: MakeDevice, pair: bool, option: Any) -> None:
    """A length beyond the pages counts as what they hold, also for the position of the diagonal; one below 0 counts as 0."""
    room = (66, 12, 30)
    call = paged(room, 6, pair=pair, rows=3, spare=0)
    if not pair:  # each row of the block table has room for the longest sequence
        call = paged((66, 66, 66), 6, rows=3, spare=0)
    seqlen_k = call.seqlen_k.copy()
    device = machine()
    with small_tiles():
        wanted = run(device, call, causal=True, **option)
        for change in (1, 6, 5000):
            cut = replace(call, seqlen_k=seqlen_k + change)
            # The host does not know these lengths.
            got = run_on_device(device, cut, causal=True, **option)
            for x, y in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(x, y)
        out, _ = run_on_device(device, replace(call, seqlen_k=-seqlen_k), causal=True, **option)
        assert not np.any(out.astype(F32))


def test_bounds_of_an_indptr_on_the_device(machine: MakeDevice) -> None:
    """Bounds that leave the page ids, or that decrease, are clamped: a sequence has only pages that there are."""
    call = paged((40, 12), 6, pair=True, rows=2, spare=0)
    device = machine(checked=True)
    _, ids = call.block_table
    good = replace(finite(call), block_table=(np.array([0, 7, 9]), ids))
    for wild in ([-5, 7, 1 << 30], [8, 3, 9], [1 << 30, -1, 0]):
        with small_tiles(), device.telling(start=np.array(wild, np.int32)):
            out, _ = run(device, good, on_device=True)
        assert np.isfinite(out.astype(F32)).all()
