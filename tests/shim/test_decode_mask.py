"""Masks in both decode kernels, on the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import exhaustive
from tests.paged import BFLOAT16, paged
from tests.shim.device import Device, MakeDevice
from tests.shim.paged import verify_kernel
from tests.shim.whole import run_forward, small_tiles, verify_forward

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
KEYS = 330
# Key tiles of 16 and 32: a row's mask bits of a tile are half a 32-bit word, or a whole one.
TILES = {
    "16": {"portable_decode": (16, 2, 3, 1), "sm90_decode": (16, 2, 3, 1)},
    "32": {"portable_decode": (32, 3, 2, 1), "sm90_decode": (32, 3, 2, 1)},
}
Make = Callable[[], Device]


@pytest.fixture(params=["portable", "sm90"])
def device(request: pytest.FixtureRequest, machine: MakeDevice, hopper: MakeDevice) -> Make:
    return machine if request.param == "portable" else hopper


def arrays(
    rows: int, heads: tuple[int, int], keys: int = KEYS, dtype: Any = BFLOAT16, batch: int = 2
) -> list[np.ndarray]:
    rng = np.random.default_rng([rows, *heads, keys])
    shapes = ((batch, rows, heads[0], 24), (batch, keys, heads[1], 24), (batch, keys, heads[1], 16))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def keep(*shape: int, block: int = 48, seed: int = 0) -> np.ndarray:
    """A mask with blocks of keys that are hidden, seen and mixed; the second head, query or sequence has a row without keys."""
    rng = np.random.default_rng([*shape, seed])
    kinds = np.repeat(rng.integers(0, 3, (*shape[:3], -(-shape[3] // block))), block, 3)
    mask = np.where(kinds == 1, rng.random((*shape[:3], kinds.shape[3])) < 0.5, kinds == 2)
    mask = mask[..., : shape[3]]
    mask[-1, -1, -1] = shape[:3] == (1, 1, 1)
    return mask


BROADCAST = itertools.product((1, 2), (1, 2, 6), (1, 3), (1, KEYS))


@pytest.mark.parametrize(("batch", "heads", "rows", "keys"), exhaustive.thin(BROADCAST, 8))
def test_every_way_to_broadcast(device: Make, batch: int, heads: int, rows: int, keys: int) -> None:
    with small_tiles(**TILES["16" if rows == 1 else "32"]):
        verify_forward(device(), "decode", *arrays(3, (6, 2)), mask=keep(batch, heads, rows, keys))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(
    ("rows", "heads"), [(1, (4, 4)), (1, (8, 2)), (3, (7, 1)), (9, (6, 2)), (1, (34, 1))], ids=str
)
def test_rows_of_heads(device: Make, rows: int, heads: tuple[int, int], tiles: str) -> None:
    """Masks are right in tiles of 16 and 32 rows, full or not, and in one that holds the last heads of a GQA group."""
    with small_tiles(**TILES[tiles]):
        mask = keep(2, heads[0], rows, KEYS)
        verify_forward(device(), "decode", *arrays(rows, heads, dtype=F16), mask=mask)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top-left"},
    "window": {"window": (100, 0), "sink": 20},
    "softcap": {"softcap": 2.0, "scale": -0.3},
    "sinks": {"sink_logits": np.array([1, -np.inf, 0.5, -3, 0, 2], np.float32)},
}


@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: Make, name: str, num_splits: int | None) -> None:
    with small_tiles():
        mask = keep(2, 6, 3, KEYS)
        call = arrays(3, (6, 2))
        verify_forward(device(), "decode", *call, mask=mask, num_splits=num_splits, **OPTIONS[name])


@pytest.mark.parametrize("wave", [32, 64])
def test_waves(machine: MakeDevice, wave: int) -> None:
    with small_tiles():
        verify_forward(machine(wave), "decode", *arrays(3, (6, 2), dtype=F32), mask=keep(2, 6, 3, KEYS))  # fmt: skip


@pytest.mark.parametrize("page_size", [8, 24])
@pytest.mark.parametrize("shape", [(4, 1, 1, 150), (1, 4, 3, 150)], ids=str)
def test_pages(device: Make, shape: tuple[int, ...], page_size: int) -> None:
    call = paged((150, 33, 0, 16), page_size, rows=3)
    verify_kernel(device(), call, family="decode", mask=keep(*shape), num_splits=2)


def test_group_mode(device: Make) -> None:
    call = paged((70, 9, 0, 129), 16, rows=(4, 9, 0, 1), packed=True)
    verify_kernel(device(), call, family="decode", causal=True, mask=keep(4, 2, 9, 129))


@pytest.mark.parametrize("tiles", TILES)
def test_hidden_keys_hold_anything(device: Make, tiles: str) -> None:
    """NaN in keys that no row of a tile sees, whole key tiles or part of one, does not reach the output."""
    q, k, v = arrays(2, (6, 2))
    mask = np.broadcast_to(keep(2, 1, 1, KEYS), (2, 1, 2, KEYS)).copy()
    with small_tiles(**TILES[tiles]):
        wanted = run_forward(device(), "decode", q, k, v, mask=mask)
        hidden = ~mask[:, 0, 0]
        k[hidden] = v[hidden] = np.nan
        found = run_forward(device(), "decode", q, k, v, mask=mask)
    for got, clean in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, clean)


def test_nothing_is_seen(device: Make) -> None:
    q, k, v = arrays(2, (4, 2))
    v[:] = np.nan
    with small_tiles():
        out, lse = run_forward(device(), "decode", q, k, v, mask=np.zeros((2, 1, 2, KEYS), bool))
    assert not np.any(out)
    assert np.all(lse == -np.inf)
