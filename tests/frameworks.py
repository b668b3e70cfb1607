"""Conversion of test arrays to each framework and back to NumPy, with strides and bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from tests.memory import Strided


class Framework(Protocol):
    name: str
    writable: bool  # whether its arrays can be given as `out=`

    def array(self, strided: Strided) -> Any: ...
    def buffer_of(self, array: Any, strided: Strided) -> np.ndarray:
        """Return the whole buffer, as `strided.buffer`, in which `array` is a view."""

    def integers(self, values: np.ndarray) -> Any: ...
    def host(self, array: Any) -> np.ndarray: ...


class NumPy:
    name = "numpy"
    writable = True

    def array(self, strided: Strided) -> np.ndarray:
        return strided.view()

    def buffer_of(self, array: Any, strided: Strided) -> np.ndarray:
        return strided.buffer

    def integers(self, values: np.ndarray) -> np.ndarray:
        return values

    def host(self, array: Any) -> np.ndarray:
        assert isinstance(array, np.ndarray)
        return array


class CuPy:
    name = "cupy"
    writable = True

    def array(self, strided: Strided) -> Any:
        import cupy

        raw = cupy.asarray(strided.buffer.view(np.uint8))
        itemsize = strided.buffer.dtype.itemsize
        return cupy.ndarray(
            strided.shape,
            strided.buffer.dtype,
            memptr=raw.data + strided.offset * itemsize,
            strides=tuple(itemsize * stride for stride in strided.strides),
        )

    def buffer_of(self, array: Any, strided: Strided) -> np.ndarray:
        import cupy

        start = array.data - strided.offset * strided.buffer.dtype.itemsize
        raw = cupy.ndarray((strided.buffer.nbytes,), np.uint8, memptr=start)
        return raw.get().view(strided.buffer.dtype)

    def integers(self, values: np.ndarray) -> Any:
        import cupy

        return cupy.asarray(values)

    def host(self, array: Any) -> np.ndarray:
        import cupy

        assert isinstance(array, cupy.ndarray)
        # Download as unsigned integers: CuPy's own support for bfloat16 is not under test.
        words = cupy.ascontiguousarray(array.view(f"u{array.itemsize}"))
        return words.get().view(array.dtype)


class TightCuPy(CuPy):
    """CuPy arrays in allocations without slack at either end, for tools that detect accesses outside an allocation."""

    name = "tight-cupy"

    def array(self, strided: Strided) -> Any:
        first, end = _extent(strided)
        return super().array(
            replace(strided, buffer=strided.buffer[first:end], offset=strided.offset - first)
        )

    def bias(self, strided: Strided) -> Any:
        """Return a bias whose allocation is padded with NaN to a multiple of 16 bytes.

        memcheck takes a 16-byte copy that reads only its first bytes (`src-size` of cp.async) for a read of all 16.
        """
        first, end = _extent(strided)
        own = strided.buffer[first:end]
        more = -own.nbytes % 16 // own.itemsize
        padded = np.concatenate([own, np.full(more, np.nan, own.dtype)])
        return super().array(replace(strided, buffer=padded, offset=strided.offset - first))

    def buffer_of(self, array: Any, strided: Strided) -> np.ndarray:
        first, end = _extent(strided)
        buffer = strided.buffer.copy()
        tight = replace(strided, buffer=buffer[first:end], offset=strided.offset - first)
        buffer[first:end] = super().buffer_of(array, tight)
        return buffer


def _extent(strided: Strided) -> tuple[int, int]:
    """Return the offset of the first element of the array in the buffer, and the offset past its last element."""
    if 0 in strided.shape:
        return strided.offset, strided.offset
    ends = [(n - 1) * stride for n, stride in zip(strided.shape, strided.strides, strict=True)]
    first = strided.offset + sum(min(end, 0) for end in ends)
    return first, strided.offset + sum(max(end, 0) for end in ends) + 1


class Torch:
    """PyTorch tensors, which have no negative strides."""

    name = "torch"
    writable = True

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def array(self, strided: Strided) -> Any:
        import torch

        dtype = getattr(torch, strided.buffer.dtype.name)
        buffer = torch.from_numpy(strided.buffer.view(np.uint8).copy()).to(self.device).view(dtype)
        return torch.as_strided(buffer, strided.shape, strided.strides, strided.offset)

    def buffer_of(self, array: Any, strided: Strided) -> np.ndarray:
        import torch

        return self.host(torch.as_strided(array, strided.buffer.shape, (1,), 0))

    def integers(self, values: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(values.copy()).to(self.device)

    def host(self, array: Any) -> np.ndarray:
        import torch

        assert isinstance(array, torch.Tensor)
        assert array.device.type == torch.device(self.device).type
        array = array.detach().cpu().contiguous()
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.numpy()


class Jax:
    """JAX arrays, which are dense and immutable: strides are lost, and `out=` is not possible."""

    name = "jax"
    writable = False

    def __init__(self, platform: str = "cpu") -> None:
        self.platform = platform

    def array(self, strided: Strided) -> Any:
        import jax

        return jax.device_put(strided.view().copy(), jax.devices(self.platform)[0])

    def buffer_of(self, array: Any, strided: Strided) -> np.ndarray:
        raise NotImplementedError("a JAX array is no view")

    def integers(self, values: np.ndarray) -> Any:
        import jax

        # JAX has only int32 unless its 64-bit mode is on.
        return jax.device_put(values.astype(np.int32), jax.devices(self.platform)[0])

    def host(self, array: Any) -> np.ndarray:
        import jax

        assert isinstance(array, jax.Array)
        assert {device.platform for device in array.devices()} == {self.platform}
        return np.asarray(array)
