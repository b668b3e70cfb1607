"""Tile lists that a BlockMask keeps between calls: repeated whole calls on the simulator give the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import reference
from tests import exhaustive
from tests.shim.device import Device
from tests.shim.launch import Machine
from tests.shim.on_device import OnDevice, installed, mask_on_device
from tests.shim.shim import Builder
from tests.shim.test_mask_calls import KEYS, ROWS, arrays, backward_tiles, blocky
from tests.shim.whole import small_tiles

RULES: tuple[dict[str, Any], ...] = ({}, {"causal": True})
MASKS = [blocky(2, 2, ROWS, KEYS, seed=seed) for seed in (3, 4)]


@pytest.mark.parametrize("options", exhaustive.thin(RULES, 2), ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_two_masks_in_turn(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, arch: str, options: dict[str, Any]
) -> None:
    device = Device(Machine(builder), arch)
    installed(device, monkeypatch)
    q, k, v = arrays(np.float16)
    exact = [reference.attention(q, k, v, mask=keep, **options) for keep in MASKS]
    masks = [mask_on_device(device, keep) for keep in MASKS]
    given = [OnDevice(device, x) for x in (q, k, v)]
    with small_tiles():
        for n in (0, 1, 0, 1):
            out = rawattn.attention(*given, mask=masks[n], **options)
            np.testing.assert_allclose(out.in_memory.array(), exact[n], atol=0.01)
        assert device.launched.count("rawattn_mask_tiles") == 2
        # The memory of the mask's lists is freed with it: a kernel that touches it faults.
        del masks[0]
        out = rawattn.attention(*given, mask=mask_on_device(device, MASKS[0]), **options)
        np.testing.assert_allclose(out.in_memory.array(), exact[0], atol=0.01)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(builder: Builder, monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    device = Device(Machine(builder))
    installed(device, monkeypatch)
    q, k, v = arrays(np.float16)
    masks = [mask_on_device(device, keep) for keep in MASKS]
    for n in (0, 1, 0, 1):
        out, lse = reference.attention(q, k, v, mask=MASKS[n], return_lse=True)
        dout = np.ones_like(out)
        exact = reference.attention_backward(dout, q, k, v, out, lse, mask=MASKS[n])
        given = [x.astype(np.float16) for x in (dout, q, k, v, out)] + [lse.astype(np.float32)]
        with backward_tiles(1):
            got = rawattn.attention_backward(
                *(OnDevice(device, x) for x in given), mask=masks[n], deterministic=deterministic
            )
        for ours, wanted in zip(got[:3], exact[:3], strict=True):
            assert np.linalg.norm(ours.in_memory.array() - wanted) <= 0.01 * np.linalg.norm(wanted)
    assert device.launched.count("rawattn_mask_tiles") == 2 * (1 + deterministic)
