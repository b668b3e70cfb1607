"""The memory layout of a mask: bits, and a map of granules.

Bits are uint16 words of 16 keys each, (batch, nheads, rows, words); the lowest bit is the first key. A row is padded to a
multiple of 128 keys, so that 16 bytes of it can be read at once. A mask that is the same for all keys holds 128 equal bits in
each row: indices beyond the extents of a mask are read in its last row, and in its last 128 keys.

The map, (batch, nheads, rows / 64, words / 4) rounded up, says for each granule of 64 rows x 64 keys whether no key of it is
seen, some are, or all.
"""

from __future__ import annotations

import math

WORD_KEYS = 16
ROW_WORDS = 8  # the number of words of a row is a multiple of this
GRANULE_ROWS = 64
GRANULE_WORDS = 4

Shape = tuple[int, int, int, int]


def words_of_row(keys: int) -> int:
    """uint16 words of a row."""
    return -(-keys // (WORD_KEYS * ROW_WORDS)) * ROW_WORDS


def bits_shape(shape: Shape) -> Shape:
    """The shape of the bits, in uint16 words, of a mask of this shape: (batch, nheads, rows, keys)."""
    return (*shape[:3], words_of_row(shape[3]))


def map_shape(shape: Shape) -> Shape:
    """The shape of the map, in bytes, of a mask of this shape."""
    batch, nheads, rows, count = bits_shape(shape)
    return batch, nheads, -(-rows // GRANULE_ROWS), count // GRANULE_WORDS


def bits_bytes(shape: Shape) -> int:
    return 2 * math.prod(bits_shape(shape))


def map_bytes(shape: Shape) -> int:
    return math.prod(map_shape(shape))


def bands(shape: Shape) -> int:
    """The number of rows of granules."""
    return -(-shape[2] // GRANULE_ROWS)


def keys_shape(shape: Shape) -> tuple[int, int, int]:
    """The shape, in uint16 words, of the bits that say which keys any row of a head sees."""
    return shape[0], shape[1], words_of_row(shape[3])


def keys_bytes(shape: Shape) -> int:
    return 2 * math.prod(keys_shape(shape))


def granule_keys(shape: Shape) -> int:
    """The number of granules along the keys, without those that are padding alone."""
    return -(-shape[3] // (WORD_KEYS * GRANULE_WORDS))
