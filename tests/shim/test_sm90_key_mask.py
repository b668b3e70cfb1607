"""Masks with one row for all queries in Hopper's forward, which reads the bools without packing them first."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from tests import exhaustive
from tests.shim.device import MakeDevice
from tests.shim.test_sm90_bias import BFLOAT16, arrays
from tests.shim.whole import small_tiles, verify_forward

# (tile_k, consumers, stages, cluster, ping_pong, late_scaling, consumer_registers, tensor_stores)
LATE = (16, 2, 2, 1, True, True, 232, False)
LONE = (64, 1, 2, 1, False, True, 256, False)
EARLY = (48, 3, 2, 1, False, False, 160, False)
WIDE = (112, 2, 2, 1, True, False, 232, True)
SHAPES = (LATE, LONE, EARLY, WIDE)
KEYS = 230


def kept(form: str, keys: int = KEYS) -> np.ndarray:
    """A mask of two sequences that keeps keys in one of several patterns."""
    keep = np.zeros((2, 1, 1, keys), bool)
    match form:
        case "end":
            keep[0, ..., :100], keep[1, ..., :33] = True, True
        case "begin":
            keep[0, ..., -60:], keep[1, ..., 17:] = True, True
        case "holes":
            keep[...] = np.random.default_rng(3).random(keep.shape) < 0.5
            keep[0, ..., 64:128] = False
        case "one":
            keep[0, ..., 70], keep[1, ..., -1] = True, True
        case "none and all":
            keep[1] = True
    return keep


RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top-left"},
    "window": {"window": (40, 5), "sink": 3},
    "left": {"window": (30, None)},
    "sinks": {"sink_logits": np.array([1, -np.inf, 0.5, -3], np.float32)},
    "negative-scale": {"scale": -0.3},
}
FORMS = ("end", "begin", "holes", "one", "none and all")


@pytest.mark.parametrize(
    ("form", "rule"), exhaustive.thin(itertools.product(FORMS, RULES), 9), ids=str
)
def test_bools_as_they_come(hopper: MakeDevice, form: str, rule: str) -> None:
    """Each call is one launch, and NaN in hidden keys and values does not reach the output."""
    device = hopper()
    keep = kept(form)
    for n, shape in enumerate(SHAPES):
        q, k, v = arrays(BFLOAT16, 2, (150, KEYS), (4, 2))
        for array in (k, v):
            array[~keep[:, 0, 0]] = np.nan
        # The masks of sequences begin at any alignment.
        wide = np.zeros((2, 1, 1, KEYS + n + 1), bool)
        mask = wide[..., n : n + KEYS]
        mask[...] = keep
        with small_tiles(sm90_forward=shape):
            verify_forward(device, "sm90", q, k, v, mask=mask, **RULES[rule])
    assert device.launched == [sm90_forward_config.ENTRY] * len(SHAPES)


@pytest.mark.parametrize(("keys", "shape"), [(300, LATE), (513, EARLY), (1023, WIDE)], ids=str)
def test_more_keys_than_are_read_at_once(
    hopper: MakeDevice, keys: int, shape: tuple[Any, ...]
) -> None:
    device = hopper()
    keep = kept("holes", keys)
    keep[0, ..., :40], keep[1, ..., 290:] = False, False
    with small_tiles(sm90_forward=shape):
        verify_forward(device, "sm90", *arrays(BFLOAT16, 2, (70, keys), (4, 2)), mask=keep)
    assert device.launched == [sm90_forward_config.ENTRY]


def test_one_mask_for_all_sequences(hopper: MakeDevice) -> None:
    device = hopper()
    with small_tiles(sm90_forward=LONE):
        verify_forward(
            device, "sm90", *arrays(BFLOAT16, 2, (150, KEYS), (4, 2)), mask=kept("holes")[:1]
        )
    assert device.launched == [sm90_forward_config.ENTRY]


def test_heads_that_no_tile_divides(hopper: MakeDevice) -> None:
    """A mask is right with GQA groups whose size does not divide a tile, which interleave heads."""
    device = hopper()
    q, k, v = arrays(BFLOAT16, 2, (9, KEYS), (6, 2))
    with small_tiles(sm90_forward=LONE):
        verify_forward(device, "sm90", q, k, v, mask=kept("begin"), causal=True)
    assert device.launched == [sm90_forward_config.ENTRY]
