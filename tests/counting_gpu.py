"""A GPU whose launches are counted, not run. The whole host code of a call runs, on arrays that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn._masks.block_mask import BlockMask
from rawattn._runtime import graphs, prepared
from tests.shim.device import Device
from tests.shim.on_device import Native, OnDevice, installed, mask_on_device

ROWS, KEYS = 150, 210
KEEP = np.random.default_rng(0).random((2, 2, ROWS, KEYS)) < 0.5


class Gpu:
    """A GPU whose kernels do nothing when launched. capturing: whether all its streams are being captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
        machine: Any = SimpleNamespace(wave=32, run=lambda *given, **more: None)
        self.device = Device(machine, arch)
        self.own: Native = installed(self.device, monkeypatch)
        self.capturing = False
        monkeypatch.setattr(prepared.streams, "is_capturing", lambda stream: self.capturing)
        monkeypatch.setattr(graphs, "_held", [])
        monkeypatch.setattr(graphs, "zeros", lambda nbytes, device: 1 << 20)

    def put(self, array: np.ndarray) -> OnDevice:
        return OnDevice(self.device, array, readonly=False)

    def mask(self, keep: np.ndarray = KEEP) -> BlockMask:
        return mask_on_device(self.device, keep)

    def arrays(self, rows: int = ROWS, dtype: Any = np.float16) -> list[OnDevice]:
        shapes = (2, rows, 4, 64), (2, KEYS, 2, 64), (2, KEYS, 2, 64)
        return [self.put(np.zeros(shape, dtype)) for shape in shapes]

    def lists(self, call: Callable[[], Any]) -> int:
        """How many launches of a call make lists. The call must launch other kernels too."""
        before = len(self.device.launched)
        call()
        launched = self.device.launched[before:]
        assert len(launched) > launched.count("rawattn_mask_tiles")
        return launched.count("rawattn_mask_tiles")
