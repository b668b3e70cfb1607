"""Hopper's kernels begin with lengths and pages that an earlier kernel may still write."""

from __future__ import annotations

import numpy as np
import pytest

from tests.paged import Paged, paged
from tests.shim.device import MakeDevice
from tests.shim.paged import WIDE, verify_kernel, verify_sm90

CALLS = {
    "one": paged((70,), 16, rows=2),
    "one without keys": paged((0,), 16),
    "several": paged((70, 3, 0, 129, 16), 16, rows=2),
    "packed": paged((70, 9, 0, 129), 16, rows=(4, 2, 0, 1), packed=True),
    "64-bit integers": paged((40, 33), 16, integers=np.int64),
}


CHUNKS = {
    "one": paged((70,), 16, rows=40),
    "several": paged((70, 40, 0, 129, 66), 16, rows=40),
    "packed": paged((70, 40, 0, 129), 16, rows=(44, 9, 0, 61), packed=True),
}
each_write = pytest.mark.parametrize(
    ("name", "before"),
    [("lengths", 0), ("lengths", 1), ("lengths", 50), ("lengths", 1000), ("block_table", 0), ("block_table", 1)],
)  # fmt: skip


@each_write
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_decoding(hopper: MakeDevice, call: Paged, name: str, before: int) -> None:
    device = hopper()
    device.late[name] = before
    verify_kernel(device, call, family="decode", on_device=True, causal=True)
    assert "rawattn_sm90_decode" in device.launched_early


@each_write
@pytest.mark.parametrize("call", CHUNKS.values(), ids=CHUNKS)
def test_the_forward(hopper: MakeDevice, call: Paged, name: str, before: int) -> None:
    device = hopper()
    device.late[name] = before
    verify_sm90(device, call, WIDE, on_device=True, causal=True)
    assert "rawattn_sm90_forward" in device.launched_early
