"""Tensor maps: how the copy engine of Hopper and later is told the shape and strides of an array."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

_BYTES = 128
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
        self._encoded: dict[int, Any] = {}

    def at(self, address: int) -> Any:
        encoded = self._encoded.get(address)
        if encoded is None:
            if len(self._encoded) >= _KEEP:
                self._encoded.clear()
            encoded = self._encoded[address] = _encode(self._geometry, address)
        return encoded


def _encode(geometry: Geometry, address: int) -> Any:
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    dtype = {
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[geometry.dtype]
    rank = len(geometry.dims)
    status, encoded = driver.cuTensorMapEncodeTiled(
        dtype,
        rank,
        address + geometry.origin,
        [driver.cuuint64_t(x) for x in geometry.dims],
        [driver.cuuint64_t(x) for x in geometry.strides],
        [driver.cuuint32_t(x) for x in geometry.box],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed: {status.name} for {geometry} at {address:#x}"
        )
    image = ctypes.string_at(int(encoded.getPtr()), _BYTES)
    return np.frombuffer(image, np.dtype((np.void, _BYTES)))
