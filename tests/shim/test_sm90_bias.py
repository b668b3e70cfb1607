"""Biases in Hopper's forward: loaded by TMA if strides allow it, else row by row if keys are contiguous, else by lanes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn._call.options import ArrayForm
from rawattn._call.problem import Problem
from rawattn._kernels import aligned_bias
from rawattn._kernels.operands import Operands
from rawattn._kernels.sm90 import bias_slots
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from rawattn._kernels.target import Target
from tests import exhaustive
from tests.shim.device import Device, MakeDevice
from tests.shim.whole import small_tiles, verify_forward
from tests.tiles import splitting

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)

# (tile_k, consumers, stages, cluster, ping_pong, late_scaling, consumer_registers, tensor_stores)
PAIR_OF_CONSUMERS = (16, 2, 2, 1, True, True, 232, False)
THREE = (80, 3, 2, 1, False, False, 160, False)
LONE = (32, 1, 1, 1, False, False, 256, False)
STORED = (64, 2, 2, 1, True, False, 232, True)
SHAPES = (PAIR_OF_CONSUMERS, THREE, LONE, STORED)


def arrays(
    dtype: Any, batch: int, rows: tuple[int, int], heads: tuple[int, int], dim: int = 16
) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((batch, rows[n > 0], heads[n > 0], dim) for n in range(3))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def normal(*shape: int, dtype: Any = BFLOAT16) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def hiding(bias: np.ndarray) -> np.ndarray:
    """The bias with -inf in a third of its elements and in all of its first row."""
    bias[np.random.default_rng(2).random(bias.shape) < 1 / 3] = -np.inf
    bias[..., 0, :] = -np.inf
    return bias


def in_boxes(device: Device) -> bool:
    return "bias_boxes" in summary_of(device)


def by_rows(device: Device) -> bool:
    return "bias_rows" in summary_of(device)


def summary_of(device: Device) -> str:
    (summary,) = (each for each in device.summaries if each.startswith("sm90 forward"))
    return summary


def shifted(bias: np.ndarray, by: int = 1) -> np.ndarray:
    """The same bias at an unaligned address and with rows of an odd length, strides that no tensor map can have."""
    around = np.full((*bias.shape[:-1], bias.shape[-1] + 9), np.nan, bias.dtype)
    inside = around[..., by : by + bias.shape[-1]]
    inside[:] = bias
    return inside


PATTERNS = [
    (batch, heads, rows)
    for batch in (1, 2)
    for heads in (1, 2, 4)
    for rows in (1, 136)
]  # fmt: skip
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (40, 9), "sink": 3},
    {"window": (None, 3), "align": "top-left"},
)


@pytest.mark.parametrize("n", exhaustive.thin(range(len(PATTERNS)), 6))
def test_every_broadcast(hopper: MakeDevice, n: int) -> None:
    batch, heads, rows = PATTERNS[n]
    dtype = (BFLOAT16, FLOAT16)[n % 2]
    device = hopper(seed=n)
    bias = normal(batch, heads, rows, 152, dtype=dtype)
    bias = hiding(bias) if rows > 1 else bias
    with small_tiles(sm90_forward=SHAPES[n % 4]):
        q, k, v = arrays(dtype, 2, (136, 152), (4, 2), (16, 40, 64)[n % 3])
        verify_forward(device, "sm90", q, k, v, bias=bias, **MASKS[n // 2 % 4])
    assert in_boxes(device)


ALONE = {
    "a key for all": lambda: normal(2, 4, 136, 1),
    "keys apart": lambda: normal(2, 151, 136, 4).transpose(0, 3, 2, 1),
    "float32": lambda: normal(1, 2, 136, 151, dtype=np.float32),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_lanes_read_from_memory(hopper: MakeDevice, name: str) -> None:
    device = hopper()
    with small_tiles(sm90_forward=SHAPES[len(name) % 4]):
        given = arrays(BFLOAT16, 2, (136, 151), (4, 2))
        verify_forward(device, "sm90", *given, bias=ALONE[name](), causal=True)
    assert not in_boxes(device)
    assert not by_rows(device)


ODD = {
    "odd keys": lambda: normal(2, 4, 136, 151),
    "rows reversed": lambda: normal(2, 4, 136, 152)[:, :, ::-1, :151],
    "begins at 2 bytes": lambda: normal(2, 4, 136, 160)[..., 1:152],
    "rows of whole words": lambda: normal(1, 4, 136, 154)[..., 2:],
    "heads apart, instead of rows": lambda: normal(2, 136, 4, 151).swapaxes(1, 2),
}


@pytest.mark.parametrize(
    ("name", "shape"), exhaustive.thin(itertools.product(ODD, SHAPES), 3), ids=str
)
def test_rows_that_no_map_describes(hopper: MakeDevice, name: str, shape: tuple[int, ...]) -> None:
    device = hopper()
    bias = ODD[name]()
    with small_tiles(sm90_forward=shape):
        given = arrays(BFLOAT16, 2, (136, bias.shape[-1]), (4, 2))
        verify_forward(device, "sm90", *given, bias=bias, causal=True)
    assert by_rows(device)


@pytest.mark.parametrize("n", exhaustive.thin(range(2 * len(PATTERNS)), 7))
def test_every_broadcast_by_rows(hopper: MakeDevice, n: int) -> None:
    """Every broadcast of a bias is right when it is loaded row by row; NaNs surround the bias."""
    batch, heads, rows = PATTERNS[n // 2]
    dtype = (BFLOAT16, FLOAT16)[n // 2 % 2]
    device = hopper(seed=n)
    bias = normal(batch, heads, rows, 152, dtype=dtype)
    bias = shifted(hiding(bias) if rows > 1 else bias, 1 + n % 8)
    with as_it_lies(), small_tiles(sm90_forward=SHAPES[n // 2 % 4]):
        q, k, v = arrays(dtype, 2, (136, 152), (4, 2), (16, 40, 64)[n % 3])
        verify_forward(device, "sm90", q, k, v, bias=bias, **MASKS[n // 2 % 4])
    assert by_rows(device)


@pytest.mark.parametrize(
    ("heads", "options"), exhaustive.thin(itertools.product((1, 2), MASKS), 3), ids=str
)
def test_copies_that_many_scores_share(
    hopper: MakeDevice, heads: int, options: dict[str, Any]
) -> None:
    """A bias that many scores share is copied once into aligned rows, unexpanded, and loaded by TMA."""
    device = hopper()
    bias = shifted(hiding(normal(1, heads, 136, 151)))
    if heads == 2:
        bias = np.broadcast_to(bias, (2, 2, 136, 151))
    with small_tiles(sm90_forward=SHAPES[heads]):
        given = arrays(BFLOAT16, 4 if heads == 1 else 2, (136, 151), (8, 2))
        verify_forward(device, "sm90", *given, bias=bias, **options)
    assert in_boxes(device)
    assert device.launched.count("rawattn_align_bias") == 1


def test_copies_of_ragged_batches(hopper: MakeDevice) -> None:
    device = hopper()
    bias = shifted(normal(1, 2, 170, 184))
    q, k, v = (x[0] for x in arrays(BFLOAT16, 1, (201, 210), (8, 2)))
    with small_tiles(sm90_forward=SHAPES[1]):
        verify_forward(device, "sm90", q, k, v, seqs=RAGGED, bias=bias, causal=True)
    assert in_boxes(device)
    assert "rawattn_align_bias" in device.launched


WIDE = {
    "rows apart": lambda: normal(1, 1, 100, 168)[..., :101],
    "heads apart, instead of rows": lambda: normal(2, 100, 4, 104).swapaxes(1, 2)[..., :101],
    "expanded": lambda: np.broadcast_to(normal(1, 2, 1, 104), (2, 2, 100, 104))[..., :101],
    "begins at 16 bytes": lambda: normal(2, 1, 100, 112)[..., 8:109],
}


@pytest.mark.parametrize("name", WIDE)
def test_views_in_rows_of_whole_16_bytes(hopper: MakeDevice, name: str) -> None:
    """Views of odd length in aligned rows are loaded by TMA, which does not use the elements behind a row's last key."""
    device = hopper()
    with small_tiles(sm90_forward=SHAPES[len(name) % 4]):
        given = arrays(BFLOAT16, 2, (100, 101), (4, 2))
        verify_forward(device, "sm90", *given, bias=WIDE[name](), window=(50, 0))
    assert in_boxes(device)


RAGGED = rawattn.SeqLayout(seqstart_q=[0, 40, 40, 201], seqstart_k=[0, 33, 40, 210])
PADDED = rawattn.SeqLayout(seqlen_q=[201, 30], seqlen_k=[60, 210])


@pytest.mark.parametrize(
    ("heads", "on_device", "odd"),
    exhaustive.thin(itertools.product((1, 2, 8), (False, True), (False, True)), 7),
)
def test_ragged_batches(hopper: MakeDevice, heads: int, on_device: bool, odd: bool) -> None:
    """A bias applies by positions within the sequence. It is larger than any sequence, and NaN beyond them."""
    device = hopper(checked=heads == 2)
    bias = hiding(normal(3, heads, 170, 184))
    bias[:, :, 161:], bias[:, :, :, 170:] = np.nan, np.nan
    bias = shifted(bias) if odd else bias
    q, k, v = (x[0] for x in arrays(BFLOAT16, 1, (201, 210), (8, 2)))
    with as_it_lies(), small_tiles(sm90_forward=SHAPES[heads % 3]):
        verify_forward(
            *(device, "sm90", q, k, v),
            seqs=RAGGED, bias=bias, causal=True, align="top-left", on_device=on_device,
        )  # fmt: skip
    assert by_rows(device) if odd else in_boxes(device)


@pytest.mark.parametrize(
    ("shape", "odd"), exhaustive.thin(itertools.product(SHAPES, (False, True)), 3), ids=str
)
def test_padded_batches(hopper: MakeDevice, shape: tuple[int, ...], odd: bool) -> None:
    bias = normal(2, 4, 201, 216)
    bias[0, :, :, 60:], bias[1, :, 30:], bias[1, :, :, 210:] = np.nan, np.nan, np.nan
    bias = shifted(bias, 3) if odd else bias
    device = hopper()
    with small_tiles(sm90_forward=shape):
        given = arrays(BFLOAT16, 2, (201, 216), (4, 4))
        verify_forward(device, "sm90", *given, seqs=PADDED, bias=bias, window=(70, None))
    assert by_rows(device) if odd else in_boxes(device)


@pytest.mark.parametrize(
    ("group", "shared", "odd"),
    exhaustive.thin(itertools.product((2, 3, 8, 12), (False, True), (False, True)), 11),
)
def test_rows_of_a_group_in_one_tile(
    hopper: MakeDevice, group: int, shared: bool, odd: bool
) -> None:
    """A bias per head, or one for all heads of a tile, is right; some consumers see keys that others do not."""
    device = hopper(seed=group)
    for n, mask in enumerate(MASKS):
        bias = normal(2, 2 if shared else 2 * group, 70, 88)
        bias = shifted(bias, 5) if odd else bias
        with as_it_lies(), small_tiles(sm90_forward=SHAPES[(n + group) % 4]):
            given = arrays(BFLOAT16, 2, (70, 88), (2 * group, 2))
            verify_forward(device, "sm90", *given, bias=bias, **mask)
    form = "bias_rows" if odd else "bias_boxes"
    assert sum(form in each for each in device.summaries) == len(MASKS)


@pytest.mark.parametrize("odd", [False, True])
def test_what_joins_a_bias(hopper: MakeDevice, odd: bool) -> None:
    """A bias is right together with every other option of scores and with split keys."""
    device = hopper()
    bias = hiding(normal(1, 4, 136, 152))
    bias = shifted(bias) if odd else bias
    more = {"alibi_slopes": normal(4, dtype=np.float32), "sink_logits": normal(4, dtype=np.float32)}
    more |= {"softcap": 2.0, "scale": -0.7, "dropout_p": 0.2, "seed": 7}
    mask = np.random.default_rng(3).random((1, 1, 136, 152)) < 0.5
    given = arrays(BFLOAT16, 2, (136, 152), (4, 4))
    with as_it_lies(), small_tiles(sm90_forward=PAIR_OF_CONSUMERS):
        verify_forward(device, "sm90", *given, bias=bias, **more)
        with splitting():
            verify_forward(device, "sm90", *given, bias=bias)
        bias[~np.broadcast_to(mask, bias.shape)] = np.nan
        verify_forward(device, "sm90", *given, bias=bias, mask=mask)
    form = "bias_rows" if odd else "bias_boxes"
    assert sum(form in each for each in device.summaries) == 3
    assert sum("stream_k" in each for each in device.summaries) == 1


@pytest.mark.parametrize("seed", exhaustive.thin(range(16), 5))
def test_orders_of_arrival(hopper: MakeDevice, seed: int) -> None:
    """A bias is right with one slot or two in its ring, and with threads and copies in many orders."""
    whole = normal(1, 2, 200, 128)
    bias = shifted(whole) if seed % 2 else whole
    device = hopper(seed=seed)
    with as_it_lies(), small_tiles(sm90_forward=SHAPES[seed // 2 % 4]), stages(1 + seed // 8):
        given = arrays(BFLOAT16, 1, (200, 128), (4, 2))
        verify_forward(device, "sm90", *given, bias=bias, causal=seed % 4 < 2)
    assert by_rows(device) if seed % 2 else in_boxes(device)


@contextmanager
def as_it_lies() -> Iterator[None]:
    """Turns off the aligned copy of a bias that many scores share."""
    with mock.patch.object(aligned_bias, "LEAST_SCORES_PER_ELEMENT", 1 << 20):
        yield


@contextmanager
def stages(count: int) -> Iterator[None]:
    with mock.patch.object(bias_slots, "STAGES", count):
        yield


def test_too_little_shared_memory_leaves_it_to_the_lanes() -> None:
    """The config has as many bias slots as shared memory allows: two, one, or none, which leaves the bias to the lanes."""
    chosen = [
        config(Target(sm90_forward.ARCH, limit)).bias_stages for limit in (232448, 181248, 165000)
    ]
    assert chosen == [2, 1, 0]


def config(target: Target, **knobs: Any) -> sm90_forward_config.Config:
    problem = dataclasses.replace(PROBLEM, **knobs)
    strides = (2 * 128 * 128, 2 * 128 * 128, 2 * 128, 2)
    return sm90_forward.choose(
        problem, target, Operands(option_strides={"bias": strides}, alignments={"bias": 0})
    )


PROBLEM = Problem(
    dtype="bfloat16", batch=1, nheads_q=1, nheads_kv=1, headdim=96, headdim_v=96, packed=False,
    rows_q=128, rows_k=128, max_seqlen_q=128, max_seqlen_k=128, ragged=False, window_left=None,
    window_right=0, sink=0, top_left=False, scale=1.0,
    bias=ArrayForm("bfloat16", (1, 1, 128, 128), (1, 1, 128, 128)),
)  # fmt: skip
