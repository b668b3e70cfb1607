"""Keys and values in pages of 8-bit elements, on the simulator: each portable kernel that reads or writes such pages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._kernels.portable import splits
from tests import exhaustive
from tests.paged import BFLOAT16, FLOAT8, paged, verify
from tests.shim.device import MakeDevice
from tests.shim.paged import OPTIONS, each_decoded, run, verify_decode, verify_kernel

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LENS = (70, 3, 0, 129)
SCALES = ("plain", "numbers", "arrays")


@pytest.mark.parametrize(
    ("page_size", "dtype", "wave"),
    exhaustive.thin(
        itertools.product((3, 16, 24, 64, 1000), (BFLOAT16, F16, F32), (32, 64)), 6
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", ["decode", "portable"])
def test_pages(machine: MakeDevice, family: str, page_size: int, dtype: Any, wave: int) -> None:
    """Results are right for every page size; rows of pages that no sequence has hold NaN."""
    knobs = {"dtype": dtype, "pair": page_size == 24, "heads_first": page_size == 3}
    for n, float8 in enumerate(SCALES):
        call = paged(LENS, page_size, rows=3, float8=float8, heads=(6, 2), **knobs)
        device = machine(wave)
        verify_kernel(device, call, family=family, on_device=n == 1, causal=True)
        kernel = {"decode": "rawattn_decode", "portable": "rawattn_forward"}[family]
        assert kernel in device.launched


# Head dims that lead to accesses of 16, 8, 4 and 1 bytes.
@pytest.mark.parametrize(
    ("dims", "dtype"),
    exhaustive.thin(
        itertools.product(
            ((64, 64), (24, 40), (36, 4), (34, 70), (7, 1), (24, 250)), (BFLOAT16, F16, F32)
        ),
        10,
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", ["decode", "portable"])
def test_widths(machine: MakeDevice, family: str, dims: tuple[int, int], dtype: Any) -> None:
    for page_size in (16, 5):
        call = paged((33, 20), page_size, dims=dims, dtype=dtype, float8="arrays")
        verify_kernel(machine(checked=page_size == 5), call, family=family)


@pytest.mark.parametrize("num_splits", exhaustive.thin([None, 2, 5, 256], 2))
@each_decoded
def test_decode(machine: MakeDevice, options: dict[str, Any], num_splits: int | None) -> None:
    call = paged((150, 33, 0), 7, rows=3, float8="arrays")
    verify_decode(machine(), call, num_splits=num_splits, **options)


def test_parts_of_a_line(machine: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "LEAST_PART_KEYS", 48)
    call = paged((1500, 3, 0, 129, 16, 33), 16, rows=2, float8="numbers", heads=(8, 2))
    for num_splits in (None, 2):
        verify_decode(machine(), call, causal=True, num_splits=num_splits)


@pytest.mark.parametrize(
    ("name", "pair"), exhaustive.thin(itertools.product(OPTIONS, (False, True)), 5)
)
def test_options_of_scores(machine: MakeDevice, name: str, pair: bool) -> None:
    """Every option of scores is right on 8-bit pages in the portable forward, the kernel that has all options."""
    call = paged((150, 33, 0), 5, rows=9, pair=pair, float8="arrays")
    for num_splits in (None, 3):
        device = machine()
        verify_kernel(device, call, on_device=pair, num_splits=num_splits, **OPTIONS[name])
        assert "rawattn_forward" in device.launched


@pytest.mark.parametrize("name", ["mask", "mask-and-window", "mask-of-kept-keys", "alibi"])
def test_masks_of_24_rows(machine: MakeDevice, name: str) -> None:
    """18 rows that share keys are one tile of three blocks of eight."""
    call = paged((150, 33, 0), 5, rows=9, heads=(4, 2), float8="arrays")
    for num_splits in (None, 3):
        verify_decode(machine(), call, num_splits=num_splits, **OPTIONS[name])


@pytest.mark.parametrize("rows", [4, 10])
@pytest.mark.parametrize("name", ["mask-of-kept-keys", "softcap", "sinks", "score_mod"])
def test_options_of_blocks_of_eight_rows(machine: MakeDevice, name: str, rows: int) -> None:
    call = paged((150, 33, 0), 5, rows=rows, heads=(4, 2), float8="arrays")
    verify_decode(machine(), call, num_splits=3, **OPTIONS[name])


def test_chunks(machine: MakeDevice) -> None:
    for dtype, float8 in ((BFLOAT16, "numbers"), (F32, "arrays")):
        call = paged(
            (170, 9, 0, 129), 12, rows=(140, 9, 4, 1), packed=True, dtype=dtype, float8=float8
        )
        verify_kernel(machine(), call, causal=True)


def test_all_numbers_of_8_bits(machine: MakeDevice) -> None:
    """With one key the output is its value, for each 8-bit number; NaN reaches only the row that sees it."""
    every = np.arange(256, dtype=np.uint8).view(FLOAT8)
    call = paged((1,), 1, heads=(1, 1), dims=(256, 256), dtype=F32, spare=0, float8="plain")
    for dtype, family in itertools.product((F16, BFLOAT16, F32), ("decode", "portable")):
        pool = every.reshape(1, 1, 1, 256)
        zeros = np.zeros((1, 1, 1, 256), FLOAT8)
        given = replace(call, q=call.q.astype(dtype), k_pages=zeros, v_pages=pool)
        out, _ = run(machine(), given, family=family)
        np.testing.assert_array_equal(out.reshape(-1).astype(F32), every.astype(F32))
    given = replace(call, k_pages=every.reshape(1, 1, 1, 256), v_pages=zeros)
    out, _ = run(machine(), given)
    assert np.isnan(out).all()


@pytest.mark.parametrize("family", ["decode", "portable"])
def test_queries_beyond_float16(machine: MakeDevice, family: str) -> None:
    """bfloat16 queries beyond the range of float16, in which products are computed, are right; inf affects only its row."""
    call = paged((33, 20), 16, rows=3, heads=(4, 2), dims=(40, 40), float8="arrays")
    for power in (40, -40):
        sized = (call.q.astype(F32) * 2.0**power).astype(BFLOAT16)
        scale = 2.0**-power / 6
        verify_kernel(machine(), replace(call, q=sized), family=family, scale=scale)
    infinite = sized.copy()
    infinite[0, 1, 2, 5] = np.inf
    out, _ = run(machine(), replace(call, q=infinite), family=family, scale=scale)
    exact, _ = run(machine(), replace(call, q=sized), family=family, scale=scale)
    infinite_row = np.zeros(out.shape[:-1], bool)
    infinite_row[0, 1, 2] = True
    np.testing.assert_array_equal(out[~infinite_row].astype(F32), exact[~infinite_row].astype(F32))


@pytest.mark.exhaustive
def test_shipped_tiles(machine: MakeDevice) -> None:
    for dtype, dim in itertools.product((BFLOAT16, F32), (64, 96, 128, 192, 256)):
        for family, rows in (("decode", 1), ("decode", 5), ("portable", 70)):
            dims = {"rows": rows, "heads": (4, 1), "dims": (dim, dim), "dtype": dtype}
            call = paged((400, 130), 16, **dims, float8="arrays")
            out, lse = run(machine(), call, family=family, num_splits=2)
            verify(call, out, lse)


def test_a_scale_of_pages_that_are_not_of_8_bits() -> None:
    call = paged((20,), 16)
    with pytest.raises(ValueError, match=r"^k_scale: got it with k_pages that are not float8"):
        rawattn.paged_attention(*call.inputs, **call.lengths, k_scale=2.0, backend="cpu")
