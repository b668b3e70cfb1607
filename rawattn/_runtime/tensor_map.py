"""Tensor maps: how the copy engine of Hopper and later is told the shape and strides of an array."""

from __future__ import annotations

from dataclasses import dataclass

from rawattn._runtime import driver

_KEEP = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """All of a map but its address. Innermost axis first; strides in bytes, without the innermost axis's."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    origin: int  # bytes from the array's address to the map's


class TensorMaps:
    """Maps of one geometry, encoded once for each address. An encoding is an opaque 128-byte kernel argument."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._encoded: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        encoded = self._encoded.get(address)
        if encoded is None:
            if len(self._encoded) >= _KEEP:
                self._encoded.clear()
            shape = self._geometry
            encoded = self._encoded[address] = driver.encode_tensor_map(
                shape.dtype, address + shape.origin, shape.dims, shape.strides, shape.box
            )
        return encoded
