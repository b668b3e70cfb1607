"""Biases in Hopper's forward: brought by the copy engine where they lie so, else read by lanes from memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn._kernels.sm90 import forward as sm90_forward
from tests.shim.device import Device
from tests.shim.launch import Machine
from tests.shim.shim import Builder
from tests.shim.whole import small_tiles, verify_forward

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)

# tile_k, consumers, stages, cluster, ping_pong, late_scaling, consumer_registers, tensor_stores
PAIR_OF_CONSUMERS = (16, 2, 2, 1, True, True, 232, False)
THREE = (80, 3, 2, 1, False, False, 160, False)
LONE = (32, 1, 1, 1, False, False, 240, False)
STORED = (64, 2, 2, 1, True, False, 232, True)
SHAPES = (PAIR_OF_CONSUMERS, THREE, LONE, STORED)

MakeDevice = Callable[..., Device]


@pytest.fixture
def hopper(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> MakeDevice:
    def make(seed: int = 1, checked: bool = False) -> Device:
        device = Device(Machine(builder, checked=checked, seed=seed), sm90_forward.ARCH)
        device.install(monkeypatch)
        return device

    return make


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
    """With -inf in a third of it, and in all of its first row."""
    bias[np.random.default_rng(2).random(bias.shape) < 1 / 3] = -np.inf
    bias[..., 0, :] = -np.inf
    return bias


def by_engine(device: Device) -> bool:
    (summary,) = (each for each in device.summaries if each.startswith("sm90 forward"))
    return "bias_boxes" in summary


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


@pytest.mark.parametrize("n", range(len(PATTERNS)))
def test_every_broadcast(hopper: MakeDevice, n: int) -> None:
    batch, heads, rows = PATTERNS[n]
    dtype = (BFLOAT16, FLOAT16)[n % 2]
    device = hopper(seed=n)
    bias = normal(batch, heads, rows, 152, dtype=dtype)
    bias = hiding(bias) if rows > 1 else bias
    with small_tiles(sm90_forward=SHAPES[n % 4]):
        q, k, v = arrays(dtype, 2, (136, 152), (4, 2), (16, 40, 64)[n % 3])
        verify_forward(device, "sm90", q, k, v, bias=bias, **MASKS[n // 2 % 4])
    assert by_engine(device)
