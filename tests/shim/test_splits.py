"""Split-KV on the simulator: any number of pieces, of any tiles, in any order of arrival."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests import exhaustive
from tests.paged import BFLOAT16, paged
from tests.shim.device import MakeDevice
from tests.shim.paged import OPTIONS, normal, run, verify_kernel
from tests.shim.whole import small_tiles, verify_forward

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LENS = (70, 3, 0, 129, 16)


# Key tiles have 16 keys, so 129 keys make 9 tiles.
@pytest.mark.parametrize("num_splits", [2, 3, 9, 256])
@pytest.mark.parametrize("wave", [32, 64])
def test_any_number(machine: MakeDevice, num_splits: int, wave: int) -> None:
    device = machine(wave, checked=num_splits == 9)
    verify_kernel(device, paged(LENS, 24, rows=3), num_splits=num_splits, causal=True)
    assert sum("split" in each.split() for each in device.summaries) == 1


@pytest.mark.parametrize(
    ("dtype", "headdim", "rows"),
    exhaustive.thin(itertools.product((BFLOAT16, F32, F16), (34, 64, 7), (1, 40)), 4),
    ids=str,
)
def test_dtypes_and_widths(machine: MakeDevice, dtype: Any, headdim: int, rows: int) -> None:
    call = paged(LENS, 16, rows=rows, heads=(6, 2), dims=(headdim, headdim + 3), dtype=dtype)
    verify_kernel(machine(), call, num_splits=4)


@pytest.mark.parametrize(("name", "wave"), exhaustive.thin(itertools.product(OPTIONS, (32, 64)), 3))
def test_options_of_scores(machine: MakeDevice, name: str, wave: int) -> None:
    """Options of scores are right: a learned sink counts once, and dropout depends on the key's position, not on the piece."""
    verify_kernel(machine(wave), paged((150, 33, 0), 5, rows=9), num_splits=4, **OPTIONS[name])


@pytest.mark.parametrize(
    "mask", [{"window": (12, 0)}, {"window": (40, 3), "sink": 8}, {"causal": True, "align": "top-left"}], ids=str
)  # fmt: skip
def test_masks(machine: MakeDevice, mask: dict[str, Any]) -> None:
    """Split keys are right under masks that leave few keys of many to split, and some rows no key in a piece."""
    verify_kernel(machine(), paged((150, 33, 5), 7, rows=37), num_splits=3, **mask)


@pytest.mark.parametrize("on_device", [False, True])
def test_group_mode(machine: MakeDevice, on_device: bool) -> None:
    call = paged((70, 9, 0, 129), 12, rows=(40, 9, 4, 1), packed=True)
    verify_kernel(machine(), call, num_splits=5, on_device=on_device, causal=True)


def test_the_same_bits(machine: MakeDevice) -> None:
    """Results are the same bits whichever block arrives last, also in a second call with the same counters."""
    call = paged(LENS, 8, rows=20)
    results = []
    for wave in (32, 32):
        device = machine(wave)
        with small_tiles():
            results += [run(device, call, num_splits=3) for _ in range(2)]
    for got in results[1:]:
        for x, y in zip(got, results[0], strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("num_splits", [None, 1, 2])
def test_rows_side_by_side(machine: MakeDevice, num_splits: int | None) -> None:
    """Keys that are not paged are split as well: two query tiles leave one of the simulated GPU's three SMs idle."""
    q, k, v = (normal(1, n, heads, 16) for n, heads in ((3, 2), (2100, 1), (2100, 1)))
    device = machine()
    with small_tiles():
        verify_forward(device, "portable", q, k, v, causal=True, num_splits=num_splits)
    split = sum("split" in each.split() for each in device.summaries)
    assert split == (num_splits != 1)
