"""Writes and reads the bits and the map of a mask in NumPy, as the kernels of `_kernels.portable.mask_writing` do on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn._masks.layout import (
    GRANULE_ROWS,
    ROW_WORDS,
    WORD_KEYS,
    Shape,
    granule_keys,
)

Bits = NDArray[np.uint16]
Map = NDArray[np.uint8]

DEAD, PARTIAL, FULL = 0, 1, 2
_GRANULE_KEYS = 64
_ROW_KEYS = WORD_KEYS * ROW_WORDS


def write_rows(keep: NDArray[np.bool_], bits: Bits, found: Map) -> None:
    """Writes the bits and the map of `keep` (rows, keys), some rows of a mask. The first is at a multiple of 64."""
    rows, keys = keep.shape
    if keys == 1:
        keep, keys = np.broadcast_to(keep, (rows, _ROW_KEYS)), _ROW_KEYS
    as_bits = np.packbits(keep, axis=-1, bitorder="little")
    as_bytes = bits.view(np.uint8)
    as_bytes[:, : as_bits.shape[1]] = as_bits
    starts_of_rows = np.arange(0, rows, GRANULE_ROWS)
    starts_of_keys = np.arange(0, keys, _GRANULE_KEYS)
    if not rows or not keys:
        return
    counts = np.add.reduceat(keep, starts_of_rows, axis=0, dtype=np.int64)
    counts = np.add.reduceat(counts, starts_of_keys, axis=1)
    heights = np.minimum(GRANULE_ROWS, rows - starts_of_rows)
    widths = np.minimum(_GRANULE_KEYS, keys - starts_of_keys)
    full = counts == heights[:, None] * widths
    found[:, : counts.shape[1]] = np.where(counts == 0, DEAD, np.where(full, FULL, PARTIAL))


def to_bools(bits: Bits, shape: Shape) -> NDArray[np.bool_]:
    """The bools of `shape` that the bits stand for."""
    flat = np.unpackbits(
        np.ascontiguousarray(bits).view(np.uint8), axis=-1, bitorder="little", count=shape[3]
    )
    keep: NDArray[np.bool_] = flat.view(np.bool_).reshape(shape)
    return keep


def granules(found: Map, shape: Shape) -> Map:
    """The map without the entries that pad its rows."""
    trimmed: Map = found[..., : granule_keys(shape)]
    return trimmed


def host(array: Any) -> NDArray[Any]:
    """A NumPy or CuPy array on the host."""
    return np.asarray(array.get() if hasattr(array, "get") else array)
