"""Arrays in the simulator's memory that stand for CuPy arrays: a call with them runs the whole host code of a GPU call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn import block_mask
from rawattn._call import integers
from rawattn._interop import arrays, native
from rawattn._interop.native import View, _GeneratedReaders
from rawattn._interop.readers import Attributes
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime import on_gpu, planned
from rawattn._verbs import fast_path, plan_arguments
from rawattn._verbs import paged as paged_verb
from tests.shim.device import Allocator, Device
from tests.shim.shim import POISON
from tests.shim.whole import InMemory


class OnDevice:
    """An array that kernels can access and the host cannot."""

    def __init__(self, device: Device, array: np.ndarray, *, readonly: bool = True) -> None:
        self.in_memory = InMemory("array", array, readonly=readonly)
        device.keep(self.in_memory.memory)
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides
        self.ndim, self.size = array.ndim, array.size
        self.flags = SimpleNamespace(c_contiguous=array.flags.c_contiguous)
        self.data = SimpleNamespace(ptr=self.in_memory.address, device_id=0)

    def __dlpack__(self) -> object:
        raise AssertionError("the host reads what is on the device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def write(self, array: np.ndarray) -> None:
        self.in_memory.memory.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1))


class Native(_GeneratedReaders, Allocator):
    """The functions of a framework that launch code uses, for arrays of `OnDevice`."""

    kinds = (OnDevice,)

    def __init__(self, device: Device) -> None:
        attributes = Attributes(
            typed="isinstance({x}, kind)",
            plain="True",
            address="{x}.data.ptr",
            form="{x}.strides, {x}.dtype, 0",
            tracked="False",
            names={"kind": OnDevice},
        )
        _GeneratedReaders.__init__(self, attributes)
        Allocator.__init__(self, device)
        self._on = device
        self.current = 0  # the handle of the current stream

    def allocator_like(
        self, shape: tuple[int, ...], dtype: Any, beside: Any
    ) -> Callable[[], OnDevice]:
        return lambda: self.empty(shape, dtype, beside)

    def view(self, x: OnDevice) -> View:
        return View(x.data.ptr, x.shape, x.strides, x.dtype, 0)

    def address(self, x: OnDevice) -> int:
        address: int = x.data.ptr
        return address

    def current_device(self) -> int:
        return 0

    def empty(self, shape: tuple[int, ...], dtype: Any, beside: Any) -> OnDevice:
        blank = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, POISON, np.uint8)
        return OnDevice(self._on, blank.view(dtype).reshape(shape), readonly=False)

    def contiguous(self, x: OnDevice) -> OnDevice:
        return OnDevice(self._on, np.ascontiguousarray(x.in_memory.array()))

    def stream(self, device: int) -> int:
        return self.current

    def stream_keeper(self, device: int) -> None:
        return None


def installed(device: Device, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Registers `OnDevice` as the array type of a framework of its own, with no call prepared yet."""
    device.install(monkeypatch)
    own = Native(device)
    monkeypatch.setitem(arrays._frameworks, OnDevice, "machine")
    monkeypatch.setitem(native._made, "machine", own)  # type: ignore[arg-type]
    monkeypatch.setattr(on_gpu, "_prepared", {})
    for verb in fast_path.closures_by_call:
        monkeypatch.setitem(fast_path.closures_by_call, verb, {})
    monkeypatch.setattr(planned.streams, "wait", lambda stream, device: None)
    monkeypatch.setattr(planned.streams, "is_capturing", lambda stream: False)
    monkeypatch.setattr(planned.streams, "order", lambda *streams: None)
    readers = ((paged_verb, "import_integers"), (plan_arguments, "import_integers"))
    for module, name in ((integers, "_imported"), *readers):
        monkeypatch.setattr(module, name, partial(_as_it_is, getattr(module, name)))
    return own


class Put:
    """Puts arrays on a device. The host takes them for arrays of a GPU framework."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self._device = device
        installed(device, monkeypatch)

    def __call__(self, array: np.ndarray, *, readonly: bool = True) -> OnDevice:
        return OnDevice(self._device, array, readonly=readonly)


def mask_on_device(device: Device, keep: np.ndarray) -> BlockMask:
    """A BlockMask of a bool array, with a copy of its words on the device."""
    mask = block_mask(keep)
    mask._copies["", 0] = tuple(OnDevice(device, words) for words in mask.arrays)
    return mask


def _as_it_is(read: Callable[..., Any], name: str, x: Any) -> Any:
    return x if isinstance(x, OnDevice) else read(name, x)
