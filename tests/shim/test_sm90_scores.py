"""ALiBi and dropout in Hopper's forward: ALiBi is added in the exponent, random bits are computed while products run."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn import ScoreMod, reference
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from tests import exhaustive
from tests.shim.device import MakeDevice
from tests.shim.test_sm90_bias import BFLOAT16, FLOAT16, arrays
from tests.shim.whole import run_forward, small_tiles, verify_forward

# (tile_k, consumers, stages, cluster, ping_pong, late_scaling, consumer_registers, tensor_stores)
LATE = (16, 2, 2, 1, True, True, 232, False)
LATE_LONE = (64, 1, 2, 1, False, True, 256, False)
EARLY = (48, 3, 2, 1, False, False, 160, False)
SHAPES = (LATE, LATE_LONE, EARLY)

SLOPES = {
    "usual": [0.5, 0.25, 0.125, 0.0625],
    "towards what is far": [-0.5, -0.01, -2.0, 0.0],
    "steep": [30.0, 5.0, 1000.0, -40.0],
    "of each sequence": [[0.5, -1.0, 8.0, 0.0], [0.1, 2.0, -3.0, 1.0]],
}
MASKS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": (40, 0), "sink": 3},
    {"window": (40, 5)},
    {},
)


@pytest.mark.parametrize(
    ("name", "mask"), exhaustive.thin(itertools.product(SLOPES, MASKS), 12), ids=str
)
def test_alibi(hopper: MakeDevice, name: str, mask: dict[str, Any]) -> None:
    slopes = np.array(SLOPES[name], np.float32)
    device = hopper()
    for n, shape in enumerate(SHAPES):
        q, k, v = arrays((BFLOAT16, FLOAT16)[n % 2], 2, (150, 170), (4, 2))
        with small_tiles(sm90_forward=shape):
            verify_forward(device, "sm90", 4 * q, k, v, alibi_slopes=slopes, **mask)
    assert device.launched.count(sm90_forward_config.ENTRY) == len(SHAPES)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_beside_a_score_function(hopper: MakeDevice, causal: bool) -> None:
    """ALiBi beside a score function is right: the kernel then adds the slopes' terms to each finished score."""
    device = hopper()
    slopes, mod = np.float32([0.5, 0.25]), ScoreMod("2 * score")
    given = arrays(BFLOAT16, 1, (70, 70), (2, 2))
    with small_tiles(sm90_forward=LATE_LONE):
        verify_forward(device, "sm90", *given, alibi_slopes=slopes, score_mod=mod, causal=causal)
    assert device.launched == [sm90_forward_config.ENTRY]


def test_slopes_of_many_digits(hopper: MakeDevice) -> None:
    """No digit of an ALiBi slope is lost: over the many keys of a large tile, a relative error of 2^-11 would show."""
    q, k, v = arrays(FLOAT16, 1, (260, 260), (2, 2))
    with small_tiles(sm90_forward=(128, 2, 2, 1, True, False, 232, False)):
        slopes = np.float32([3.3, -0.7])
        out, lse = run_forward(hopper(), "sm90", q, k, v, alibi_slopes=slopes, scale=0.3)
    exact, exact_lse = reference.attention(q, k, v, alibi_slopes=slopes, scale=0.3, return_lse=True)
    np.testing.assert_allclose(lse, exact_lse, atol=3e-4)
    np.testing.assert_allclose(out.astype(float), exact, atol=4e-3)


@pytest.mark.parametrize("lens", [(170, 70), (40, 230), (1, 100), (90, 1)], ids=str)
def test_alibi_on_both_sides(hopper: MakeDevice, lens: tuple[int, int]) -> None:
    """ALiBi without a causal mask is right on both sides of the diagonal, wherever the diagonal is."""
    device = hopper()
    for name, slopes in SLOPES.items():
        given = arrays(BFLOAT16, 2, lens, (4, 2))
        with small_tiles(sm90_forward=SHAPES[len(name) % 3]):
            slopes_of = {"alibi_slopes": np.array(slopes, np.float32)}
            verify_forward(device, "sm90", *given, **slopes_of)
            verify_forward(device, "sm90", *given, **slopes_of, align="top-left")
    assert device.launched.count(sm90_forward_config.ENTRY) == 2 * len(SLOPES)


@pytest.mark.parametrize(
    ("shape", "mask"), exhaustive.thin(itertools.product(SHAPES, MASKS), 12), ids=str
)
def test_dropout(hopper: MakeDevice, shape: tuple[int, ...], mask: dict[str, Any]) -> None:
    slopes = np.array(SLOPES["usual"], np.float32)
    device = hopper()
    with small_tiles(sm90_forward=shape):
        for more in ({}, {"alibi_slopes": slopes, "sink_logits": slopes}):
            given = arrays(BFLOAT16, 2, (150, 170), (4, 2))
            verify_forward(device, "sm90", *given, dropout_p=0.3, seed=11, **more, **mask)
    assert device.launched.count(sm90_forward_config.ENTRY) == 2
