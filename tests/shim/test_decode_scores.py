"""Options that change scores, in tiles with rows of several heads: both decode kernels on the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from tests import exhaustive
from tests.paged import BFLOAT16, paged
from tests.shim.device import Device, MakeDevice
from tests.shim.paged import OPTIONS, normal, verify_kernel
from tests.shim.test_decode_mask import F16, F32, KEYS, TILES, arrays, keep
from tests.shim.whole import run_forward, small_tiles, verify_forward

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

Make = Callable[[], Device]


@pytest.fixture(params=["portable", pytest.param("sm90", marks=pytest.mark.exhaustive)])
def device(request: pytest.FixtureRequest, machine: MakeDevice, hopper: MakeDevice) -> Make:
    return machine if request.param == "portable" else hopper


BROADCAST = itertools.product((1, 2), (1, 2, 6), (1, 3), (1, KEYS, KEYS - 1), (BFLOAT16, F32))


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys", "dtype"), exhaustive.thin(BROADCAST, 8), ids=str
)
def test_every_way_to_broadcast_a_bias(
    device: Make, batch: int, heads: int, rows: int, keys: int, dtype: Any
) -> None:
    """Every broadcast of a bias is right, also in rows of an odd length, in which keys cannot be read in pairs."""
    call = [x[:, :keys] if x.shape[1] == KEYS and keys > 1 else x for x in arrays(3, (6, 2))]
    with small_tiles(**TILES["16" if rows == 1 else "32"]):
        bias = normal(batch, heads, rows, keys, dtype=dtype)
        verify_forward(device(), "decode", *call, bias=bias, causal=rows == 3)


def added(name: str, heads: int, rows: int) -> dict[str, Any]:
    """The keyword arguments of an option that differs from head to head and from query to query."""
    slopes = np.linspace(-0.3, 1, heads, dtype=F32)
    texts = {
        "line": "score + slope[head] * (kv_idx - 2 * q_idx)",
        "text": "where(kv_idx % 3 == head % 3, score * slope[head], score - abs(q_idx - kv_idx))",
    }
    if name in texts:
        return {"score_mod": rawattn.ScoreMod(texts[name], slope=slopes)}
    if name == "alibi":
        return {"alibi_slopes": slopes}
    return {"bias": normal(2, heads, rows, KEYS, dtype=BFLOAT16)}


ADDED = ("bias", "alibi", "line", "text")


ROWS = ((1, (4, 4)), (1, (8, 2)), (3, (7, 1)), (9, (6, 2)), (1, (34, 1)))


@pytest.mark.parametrize(
    ("rows", "heads", "name"),
    exhaustive.thin([(*each, name) for each in ROWS for name in ADDED], 4),
    ids=str,
)
def test_rows_of_heads(device: Make, rows: int, heads: tuple[int, int], name: str) -> None:
    """The option is right in tiles of 16 and 32 rows, full or not, and in one that holds the last heads of a GQA packed."""
    with small_tiles(**TILES["32" if rows == 3 else "16"]):
        options = added(name, heads[0], rows)
        verify_forward(device(), "decode", *arrays(rows, heads), **options, causal=rows == 9)


BESIDE: dict[str, dict[str, Any]] = {
    "top-left": {"causal": True, "align": "top-left"},
    "window": {"window": (100, 0), "sink": 20},
    "softcap": {"softcap": 2.0, "scale": -0.3},
    "sinks": {"sink_logits": np.array([1, -np.inf, 0.5, -3, 0, 2], F32)},
    "mask": {"mask": keep(2, 6, 3, KEYS)},
}


@pytest.mark.parametrize(
    ("name", "beside", "splits"),
    exhaustive.thin(itertools.product(ADDED, BESIDE, (None, 3)), 9),
    ids=str,
)
def test_beside_others(device: Make, name: str, beside: str, splits: int | None) -> None:
    with small_tiles():
        options = added(name, 6, 3) | BESIDE[beside]
        call = arrays(3, (6, 2))
        verify_forward(device(), "decode", *call, **options, num_splits=splits)


def test_all_at_once(device: Make) -> None:
    options = added("bias", 6, 3) | added("alibi", 6, 3) | added("text", 6, 3) | BESIDE["mask"]
    with small_tiles():
        call = arrays(3, (6, 2), dtype=F16)
        options |= {"bias": options["bias"].astype(F16)}
        verify_forward(device(), "decode", *call, **options, **BESIDE["sinks"])


@pytest.mark.parametrize(
    ("wave", "name"), exhaustive.thin(itertools.product((32, 64), ADDED), 3), ids=str
)
def test_waves(machine: MakeDevice, wave: int, name: str) -> None:
    options = added(name, 6, 3)
    if name == "bias":
        options["bias"] = options["bias"].astype(F32)
    with small_tiles():
        verify_forward(machine(wave), "decode", *arrays(3, (6, 2), dtype=F32), **options)


def test_steep_lines(device: Make) -> None:
    """Lines so steep that some overflow are right: the kernel adds them to each score."""
    slopes = np.array([3e38, 1e37, -0.5, 17, 3e38, 2], F32)
    mod = rawattn.ScoreMod("score + slope[head] * (kv_idx - q_idx)", slope=slopes)
    q, k, v = arrays(3, (6, 2))
    with small_tiles():
        verify_forward(device(), "decode", q, k[:, :3], v[:, :3], score_mod=mod, causal=True)


@pytest.mark.parametrize("name", ["bias", "alibi", "score_mod"])
def test_pages_of_8_bits(device: Make, name: str) -> None:
    call = paged((70, 9, 129), 24, rows=3, float8="arrays")
    verify_kernel(device(), call, family="decode", num_splits=2, **OPTIONS[name])


PAGED = ("bias", "bias-by-rows", "alibi", "score_mod", "softcap")


@pytest.mark.parametrize(
    ("packed", "name"), exhaustive.thin(itertools.product((False, True), PAGED), 3), ids=str
)
def test_pages(device: Make, packed: bool, name: str) -> None:
    """In pages, a bias applies by the key's logical position, for sequences of any length."""
    call = paged((70, 9, 129), 24, rows=(4, 9, 1) if packed else 3, packed=packed)
    verify_kernel(device(), call, family="decode", num_splits=2, **OPTIONS[name])


@pytest.mark.parametrize("tiles", TILES)
def test_keys_without_weight(device: Make, tiles: str) -> None:
    """A bias of -inf hides a key, and a row of hidden keys alone is 0. A whole row of -3e38 keeps its differences of scores."""
    bias = normal(2, 6, 2, KEYS, dtype=F32)
    bias[..., 100:200] = -np.inf
    bias[0, 1] = -np.inf
    bias[1, 2] = -3e38
    with small_tiles(**TILES[tiles]):
        verify_forward(device(), "decode", *arrays(2, (6, 2)), bias=bias)


def test_a_bias_of_hidden_keys_is_anything(device: Make) -> None:
    call = arrays(2, (6, 2))
    mask = keep(2, 6, 2, KEYS)
    bias = normal(2, 6, 2, KEYS, dtype=BFLOAT16)
    with small_tiles():
        wanted = run_forward(device(), "decode", *call, mask=mask, bias=bias)
        bias[~mask] = np.nan
        found = run_forward(device(), "decode", *call, mask=mask, bias=bias)
    for got, clean in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, clean)
