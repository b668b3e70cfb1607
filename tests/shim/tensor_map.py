"""The simulator's counterpart of the driver's cuTensorMapEncodeTiled."""

from __future__ import annotations

import numpy as np

from rawattn._kernels.steps import Geometry

# The same fields as `TensorMap` in kernels_cu/ptx/host.cuh.
TENSOR_MAP = np.dtype(
    [
        ("address", np.uint64),
        ("dims", np.uint64, 5),
        ("strides", np.uint64, 4),
        ("box", np.uint32, 5),
        ("itemsize", np.uint32),
        ("origin", np.int64),
        ("unused", np.uint64, 2),
    ],
    align=True,
)
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def encode(geometry: Geometry, address: int) -> np.void:
    """The map of an array at `address`. Refuses what the driver refuses for maps with the 128-byte swizzle."""
    itemsize = _ITEMSIZE[geometry.dtype]
    start = address + geometry.origin
    assert len(geometry.dims) == len(geometry.box) == len(geometry.strides) + 1 == 5, geometry
    assert start > 0 and start % 16 == 0, f"a map starts at {start:#x}"
    assert all(0 < extent <= 2**32 for extent in geometry.dims), geometry
    assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in geometry.strides), geometry
    assert all(0 < extent <= 256 for extent in geometry.box), geometry
    assert geometry.box[0] * itemsize <= 128 and geometry.box[0] * itemsize % 16 == 0, geometry
    encoded = np.zeros((), TENSOR_MAP)
    encoded["address"] = start
    for name in ("dims", "strides", "box"):
        encoded[name] = getattr(geometry, name)
    encoded["itemsize"], encoded["origin"] = itemsize, geometry.origin
    return encoded[()]
