"""Score functions that add a term linear in the key's position: like ALiBi's, it is added in the exponent, not per score."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn import ScoreMod
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from tests import exhaustive
from tests.shim.device import MakeDevice
from tests.shim.score_calls import arrays as small_arrays
from tests.shim.test_sm90_bias import BFLOAT16, arrays
from tests.shim.test_sm90_scores import SHAPES, SLOPES
from tests.shim.whole import small_tiles, verify_backward, verify_forward

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

TEXTS = (
    "score + slope[head] * (kv_idx - q_idx)",
    "score - slope[head] * abs(q_idx - kv_idx)",
    "where(head % 2 == 0, slope[head] * (kv_idx - seqlen_k) / 2 + score, score - row[q_idx])",
)
MASKS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": (40, 0), "sink": 3},
    {},
)


def mod(text: str, slopes: Any = SLOPES["usual"], third: float = 1.0) -> ScoreMod:
    """A score function with its captured arrays. third: the value of every third element of `row`."""
    given = {"slope": np.float32(slopes), "row": np.linspace(-1, 1, 170, dtype=np.float32)}
    given["row"][::3] = third
    return ScoreMod(text, **{name: x for name, x in given.items() if f"{name}[" in text})


@pytest.mark.parametrize(
    ("text", "mask"), exhaustive.thin(itertools.product(TEXTS, MASKS), 8), ids=str
)
def test_hopper(hopper: MakeDevice, text: str, mask: dict[str, Any]) -> None:
    device = hopper()
    # As many rows as keys, so that the kernel knows where the diagonal is.
    q, k, v = arrays(BFLOAT16, 2, (150, 150), (4, 2))
    for shape, more in zip(SHAPES, ({}, {"softcap": 2.0}, {"scale": -0.1}), strict=True):
        with small_tiles(sm90_forward=shape):
            verify_forward(device, "sm90", q, k, v, score_mod=mod(text), **more, **mask)
    assert device.launched.count(sm90_forward_config.ENTRY) == len(SHAPES)


@pytest.mark.parametrize("slopes", [SLOPES["steep"], [3e38, 1e37, -0.5, 17.0]], ids=str)
def test_steep_lines(hopper: MakeDevice, slopes: list[float]) -> None:
    """Slopes so steep that terms overflow are right: they overflow beside the diagonal, as the function says, not on it."""
    device = hopper()
    q, k, v = arrays(BFLOAT16, 2, (150, 150), (4, 2))
    for shape in SHAPES[:2]:
        with small_tiles(sm90_forward=shape):
            score_mod = mod(TEXTS[0], slopes)
            verify_forward(device, "sm90", q, k, v, score_mod=score_mod, causal=True)


def test_lines_that_hide_rows(hopper: MakeDevice) -> None:
    device = hopper()
    q, k, v = arrays(BFLOAT16, 2, (150, 170), (4, 2))
    for shape in SHAPES[:2]:
        with small_tiles(sm90_forward=shape):
            score_mod = mod(TEXTS[2], third=np.inf)
            verify_forward(device, "sm90", q, k, v, score_mod=score_mod, window=(40, 0))


@pytest.mark.parametrize(
    ("text", "dtype"),
    exhaustive.thin(itertools.product(TEXTS, (BFLOAT16, np.dtype(np.float32))), 4),
    ids=str,
)
def test_portable(machine: MakeDevice, text: str, dtype: np.dtype[Any]) -> None:
    device = machine()
    q, k, v = small_arrays(dtype, rows=(75, 75))
    biased = {"bias": np.zeros((1, 1, 75, 75), dtype), "alibi_slopes": np.float32([1, 2, 0, -1])}
    for more in ({}, {"causal": True}, {"causal": True, **biased}):
        verify_forward(device, "portable", q, k, v, score_mod=mod(text), **more)


PLANES = (
    *TEXTS[:2],
    "where(head % 2 == 0, slope[head] * (kv_idx - seqlen_k) / 2 + score, score - 0.02 * q_idx)",
)
# One block of keys per wave, and two.
BACKWARD_SHAPES = ((32, 32, 2, 1, 2, 1, 1, False), (32, 64, 2, 1, 2, 1, 1, False))


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    exhaustive.thin(
        itertools.product(PLANES, (BFLOAT16, np.dtype(np.float16)), BACKWARD_SHAPES), 5
    ),
    ids=str,
)
def test_gradients(
    machine: MakeDevice, text: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    """Gradients are right where the Q K^T accumulators start from the linear term, which all queries of a head share."""
    inputs = small_arrays(dtype, rows=(75, 75))
    score_mod = mod(text, np.float32([0.5, 0.1, -0.2, 0]))
    with small_tiles(portable_backward=shape):
        for more in ({}, {"causal": True}, {"window": (40, 0), "dropout_p": 0.2, "seed": 3}):
            verify_backward(machine(), "portable", *inputs, score_mod=score_mod, **more)


@pytest.mark.parametrize("slopes", [SLOPES["steep"], [3e38, 1e37, -0.5, 17.0]], ids=str)
def test_gradients_of_steep_lines(machine: MakeDevice, slopes: list[float]) -> None:
    inputs = small_arrays(BFLOAT16, rows=(75, 75))
    for shape in BACKWARD_SHAPES:
        with small_tiles(portable_backward=shape):
            for scale in (None, 0.0):
                options = {"score_mod": mod(TEXTS[0], slopes), "causal": True, "scale": scale}
                verify_backward(machine(), "portable", *inputs, **options)


@pytest.mark.parametrize("shape", exhaustive.thin([(x,) for x in BACKWARD_SHAPES], 2), ids=str)
def test_gradients_of_what_is_beside_a_line(machine: MakeDevice, shape: tuple[int, ...]) -> None:
    """Gradients are right for ALiBi and for a linear term beside a bias, which uses the same key positions, or a soft cap."""
    inputs = small_arrays(BFLOAT16, rows=(75, 75))
    bias = np.random.default_rng(3).standard_normal((1, 4, 75, 75)).astype(BFLOAT16)
    slopes = np.float32([0.5, 0.1, -0.2, 0])
    with small_tiles(portable_backward=shape):
        options = {"bias": bias, "alibi_slopes": slopes, "causal": True}
        verify_backward(machine(), "portable", *inputs, **options)
        options = {"bias": bias, "score_mod": mod(TEXTS[0], slopes), "causal": True}
        verify_backward(machine(), "portable", *inputs, **options)
        verify_backward(machine(), "portable", *inputs, softcap=2.0, causal=True)
