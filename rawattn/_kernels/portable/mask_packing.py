"""Host twin of kernels_cu/attn/mask_packing.cuh and the kernels with it: masks as bits and a map of granules.

Bits are half-words of 16 keys, (batch, nheads, rows, words), the lowest bit the first key. A row is padded to a multiple of
128 keys, so that 16 bytes of it may be read at once. A mask with one key for all has one row of 128 like it: what lies behind
a mask's extents is as its last row and its last 128 keys are.

The map says of each granule whether no key of it is seen, some, or all: (batch, nheads, rows / 64, words / 4), rounded up.
"""

from __future__ import annotations

import functools
import math

from rawattn._compile.compiler import Source
from rawattn._kernels import params
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, checked, patches

THREADS = 256
SHARED_BYTES = THREADS
WORD_KEYS = 16
ROW_WORDS = 8  # that a row has a multiple of
GRANULE_ROWS = 64
GRANULE_WORDS = 4
_BLOCK_WORDS = 16

Shape = tuple[int, int, int, int]


def words(keys: int) -> int:
    """Half-words of a row."""
    return -(-keys // (WORD_KEYS * ROW_WORDS)) * ROW_WORDS


def bits_shape(shape: Shape) -> Shape:
    """Of half-words, for a mask of this shape: (batch, nheads, rows, keys)."""
    return (*shape[:3], words(shape[3]))


def map_shape(shape: Shape) -> Shape:
    """Of bytes, for a mask of this shape."""
    batch, nheads, rows, count = bits_shape(shape)
    return batch, nheads, -(-rows // GRANULE_ROWS), count // GRANULE_WORDS


def bits_bytes(shape: Shape) -> int:
    return 2 * math.prod(bits_shape(shape))


def map_bytes(shape: Shape) -> int:
    return math.prod(map_shape(shape))


def granule_keys(shape: Shape) -> int:
    """Granules of a row that have keys."""
    return -(-shape[3] // (WORD_KEYS * GRANULE_WORDS))


def fields(shape: Shape) -> dict[str, int]:
    """Of a `MaskPacking`. One key for all is packed as 128."""
    _, nheads, rows, keys = shape
    keys = keys if keys > 1 else WORD_KEYS * ROW_WORDS
    return {
        "packing.rows": rows,
        "packing.keys": keys,
        "packing.words": words(keys),
        "packing.nheads": nheads,
    }


def blocks(shape: Shape) -> int:
    batch, nheads, rows, count = bits_shape(shape)
    bands = -(-rows // GRANULE_ROWS) * -(-count // _BLOCK_WORDS)
    return checked("mask", batch * nheads * bands, GRANULE_ROWS)


@functools.cache
def source(dense: bool) -> Source:
    """dense: whether the mask's 16 next keys may be read at once."""
    return _source(
        "rawattn_pack_mask",
        "portable/pack_mask.cu",
        "portable pack_mask" + (" dense" if dense else ""),
        params.PACK_MASK,
        constants={"kDense": dense},
    )


@functools.cache
def ranges_source() -> Source:
    return _source(
        "rawattn_mask_of_ranges",
        "portable/mask_of_ranges.cu",
        "portable mask_of_ranges",
        params.RANGES_MASK,
    )


def step(shape: Shape, strides: tuple[int, ...], place: int) -> Step:
    """Packs the array "mask" to "mask_bits" and "mask_map".

    strides: in bytes, of the last axes; place: of its address within 16 bytes.
    """
    given = (0,) * (4 - len(strides)) + strides
    own = tuple(x if extent > 1 else 0 for x, extent in zip(given, shape, strict=True))
    dense = own[3] == 1 and not place % 16 and not any(x % 16 for x in own[:3])
    names = ("batch", "head", "row", "key")
    return Step(
        source=source(dense),
        blocks=blocks(shape),
        threads=THREADS,
        params=params.fill(
            params.PACK_MASK, {**fields(shape), **dict(zip(names, own, strict=True))}
        ),
        patches=_patches(params.PACK_MASK, **{"from": "mask"}),
        shared_bytes=SHARED_BYTES,
    )


def ranges_step(shape: Shape, count: int, itemsize: int) -> Step:
    """Packs what "ranges", (batch, rows, count, 2) integers, say."""
    values = {**fields(shape), "ranges.is_64bit": int(itemsize == 8), "count": count}
    return Step(
        source=ranges_source(),
        blocks=blocks(shape),
        threads=THREADS,
        params=params.fill(params.RANGES_MASK, values),
        patches=_patches(params.RANGES_MASK, ranges__data="ranges"),
        shared_bytes=SHARED_BYTES,
    )


def _patches(struct: params.Struct, **more: str) -> tuple[tuple[int, str], ...]:
    return patches(struct, packing__bits="mask_bits", packing__map="mask_map", **more)
