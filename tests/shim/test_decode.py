"""portable/decode.cu on the simulator: rows of several heads in a tile, rings of waves, their merge, split keys."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn._kernels.portable import splits
from tests import exhaustive
from tests.paged import BFLOAT16, Paged, paged, verify
from tests.shim.device import ATTRIBUTES, MakeDevice
from tests.shim.paged import each_decoded, normal, run, verify_decode
from tests.shim.whole import small_tiles, verify_forward

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LENS = (70, 3, 0, 129, 16)


@pytest.mark.parametrize(
    ("heads", "rows", "wave"),
    exhaustive.thin(
        itertools.product(((4, 4), (8, 2), (5, 1), (7, 1), (12, 2), (34, 1), (17, 1), (74, 2)), (1, 3), (32, 64)),
        5,
    ),
    ids=str,
)  # fmt: skip
def test_rows_of_heads(machine: MakeDevice, heads: tuple[int, int], rows: int, wave: int) -> None:
    verify_decode(machine(wave), paged(LENS, 16, rows=rows, heads=heads), causal=True)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    exhaustive.thin(
        itertools.product((BFLOAT16, F32, F16), ((64, 64), (34, 70), (7, 1), (24, 250))), 3
    ),
    ids=str,
)
def test_dtypes_and_widths(machine: MakeDevice, dtype: Any, dims: tuple[int, int]) -> None:
    call = paged(LENS, 24, rows=2, heads=(6, 2), dims=dims, dtype=dtype)
    for num_splits in (1, 3):
        verify_decode(machine(checked=num_splits == 1), call, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [None, 2, 5, 256])
@each_decoded
def test_options(machine: MakeDevice, options: dict[str, Any], num_splits: int | None) -> None:
    verify_decode(machine(), paged((150, 33, 0), 7, rows=3), num_splits=num_splits, **options)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_group_mode(machine: MakeDevice, pair: bool, on_device: bool) -> None:
    call = paged((70, 9, 0, 129), 12, rows=(4, 9, 0, 1), packed=True, pair=pair)
    verify_decode(machine(), call, on_device=on_device, causal=True, num_splits=3)


def test_padded_batch(machine: MakeDevice) -> None:
    call = paged((70, 9, 5, 129), 16, rows=(5, 0, 2, 1), room_q=6)
    verify_decode(machine(), call, causal=True)


def test_the_same_bits(machine: MakeDevice) -> None:
    call = paged(LENS, 8, rows=2)
    device = machine()
    with small_tiles():
        first = run(device, call, family="decode", num_splits=3)
        again = run(device, call, family="decode", num_splits=3)
    for got, wanted in zip(again, first, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("num_splits", [None, 2])
@pytest.mark.parametrize("least", [16, 48, 300])
@pytest.mark.parametrize(
    "call",
    [
        paged((1500, 3, 0, 129, 16, 33, 400, 1, 0), 16, rows=2),
        paged((700,), 24, rows=1, heads=(6, 3)),
        paged((33,) * 150, 8, rows=1, heads=(2, 1), dims=(16, 16)),
        paged((70, 300, 0, 129), 12, rows=(4, 30, 0, 1), packed=True, heads=(8, 2)),
    ],
    ids=("uneven", "one", "many", "group"),
)  # fmt: skip
def test_parts_of_a_line(
    machine: MakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    call: Paged,
    least: int,
    num_splits: int | None,
) -> None:
    """Results are right where few blocks have many query tiles each, and where several blocks share a query tile."""
    monkeypatch.setattr(splits, "LEAST_PART_KEYS", least)
    verify_decode(machine(), call, causal=True, num_splits=num_splits)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2)], ids=str)
def test_bunches_of_parts(
    machine: MakeDevice, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]
) -> None:
    """A sequence with so many parts that they are merged in two steps, and that begins and ends within a part, is right."""
    monkeypatch.setitem(ATTRIBUTES, "multiprocessors", 50 * heads[1])
    monkeypatch.setattr(splits, "LEAST_PART_KEYS", 16)
    call = paged((50, 2500, 0, 70, 700), 16, rows=1, heads=heads, dims=(16, 16))
    device = machine()
    for _ in range(2):  # counters are 0 again
        verify_decode(device, call)


@pytest.mark.parametrize(
    ("lens", "multiprocessors"),
    [
        ((70, 250, 0, 31, 16), 24),  # each sequence is a part of its own
        ((70, 5000, 0, 31, 16), 24),  # one sequence is long: parts of equal size
        ((600, 3, 0, 570), 24),  # each has as many pieces, some of them without keys
        ((40,) * 5, 24),
        ((10, 0, *range(1, 40)), 200),
        ((10, 0, *range(1, 70)), 500),  # more sequences than a block has threads
        ((90,), 24),
    ],
    ids=("short", "long", "pieces", "even", "some", "many", "one"),
)
@pytest.mark.parametrize(
    ("rows", "heads"),
    [(1, 3), (9, 3), (1, 7)],
    ids=("abreast", "rows", "ranks"),  # seven heads would leave three of 24 blocks idle
)
def test_query_tiles_in_pieces(
    machine: MakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    lens: tuple[int, ...],
    multiprocessors: int,
    rows: int,
    heads: int,
) -> None:
    monkeypatch.setitem(ATTRIBUTES, "multiprocessors", multiprocessors)
    call = paged(lens, 16, rows=rows, heads=(heads, heads), dims=(16, 16))
    device = machine()
    for _ in range(2):  # counters are 0 again
        verify_decode(device, call, causal=True, on_device=True)


@pytest.mark.parametrize("page_size", [7, 16])
def test_a_sequence_without_pages_looks_none_up(machine: MakeDevice, page_size: int) -> None:
    """The last sequence has none, so its entries of the block table begin where the table ends."""
    call = paged((8 * page_size, 0), page_size, pair=True, spare=0)
    verify_decode(machine(), call, causal=True)


@pytest.mark.parametrize("packed", [False, True])
def test_most_sequences_without_queries(
    machine: MakeDevice, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """A batch in which most sequences have no queries, so that there are fewer units than blocks, is right."""
    monkeypatch.setitem(ATTRIBUTES, "multiprocessors", 40)
    rows, lens = (1, *(0,) * 38, 1), (1000, *(5,) * 38, 40)
    room = None if packed else 1
    call = paged(lens, 16, rows=rows, room_q=room, packed=packed, heads=(1, 1), dims=(16, 16))
    device = machine()
    for _ in range(2):
        verify_decode(device, call, on_device=True)


@pytest.mark.parametrize("dtype", [F32, BFLOAT16], ids=str)
def test_keys_in_rows(machine: MakeDevice, dtype: Any) -> None:
    q, k, v = (normal(2, n, heads, 16, dtype=dtype) for n, heads in ((2, 6), (300, 3), (300, 3)))
    device = machine()
    with small_tiles():
        verify_forward(device, "decode", q, k, v, causal=True)
    assert "rawattn_decode" in device.launched


@pytest.mark.exhaustive
def test_shipped_tiles(machine: MakeDevice) -> None:
    """The tiles of every row of the tables work in the shared memory of an H100."""
    for dtype, dim in itertools.product((BFLOAT16, F32), (64, 96, 128, 192, 256)):
        call = paged((400, 30), 16, rows=1, heads=(4, 1), dims=(dim, dim), dtype=dtype)
        device = machine()
        out, lse = run(device, call, family="decode", num_splits=2)
        verify(call, out, lse)
        assert "rawattn_decode" in device.launched
