"""Tensor maps: the descriptors by which the TMA of Hopper and later knows the shape and strides of an array."""

from __future__ import annotations

from rawattn._eviction import evict_if_full
from rawattn._kernels.steps import Geometry
from rawattn._runtime import driver

MAP_BYTES = 128  # of a CUtensorMap
_KEEP = 64  # maps that are kept for one geometry


class TensorMaps:
    """The tensor maps of one geometry, encoded once for each address. An encoded map is an opaque kernel argument."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._encoded: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        encoded = self._encoded.get(address)
        if encoded is None:
            evict_if_full(self._encoded, _KEEP)
            shape = self._geometry
            encoded = self._encoded[address] = driver.encode_tensor_map(
                shape.dtype, address + shape.origin, shape.dims, shape.strides, shape.box
            )
        return encoded
