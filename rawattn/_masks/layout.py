"""How a mask lies in memory: bits, and a map of granules.

Bits are half-words of 16 keys, (batch, nheads, rows, words), the lowest bit the first key. A row is padded to a multiple of
128 keys, so that 16 bytes of it may be read at once. A mask with one key for all has one row of 128 like it: what lies behind
a mask's extents is as its last row and its last 128 keys are.

The map says of each granule whether no key of it is seen, some, or all: (batch, nheads, rows / 64, words / 4), rounded up.
"""

from __future__ import annotations

import math

WORD_KEYS = 16
ROW_WORDS = 8  # that a row has a multiple of
GRANULE_ROWS = 64
GRANULE_WORDS = 4

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


def bands(shape: Shape) -> int:
    """Rows of granules."""
    return -(-shape[2] // GRANULE_ROWS)


def keys_shape(shape: Shape) -> tuple[int, int, int]:
    """Of half-words: of each head the keys that any row sees."""
    return shape[0], shape[1], words(shape[3])


def keys_bytes(shape: Shape) -> int:
    return 2 * math.prod(keys_shape(shape))


def granule_keys(shape: Shape) -> int:
    """Granules of a row that have keys."""
    return -(-shape[3] // (WORD_KEYS * GRANULE_WORDS))
