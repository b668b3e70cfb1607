"""Dropout: which probabilities are kept. docs/notes/dropout.md explains this definition."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

# Rows, and keys, of a block. Each of the 32 counters of a block gives 128 random bits: 16 for each of eight (row, key) pairs.
_BLOCK = 16


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four 32-bit words for every counter of four 32-bit words, keyed by 64 bits.

    The counter's four arrays broadcast together. Words are held in uint64 arrays, since NumPy has
    no other product of 32 by 32 bits to 64.
    """
    words = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    c0, c1, c2, c3 = (word.copy() for word in words)
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        # In place, since most of the time goes to memory accesses.
        c0 *= np.uint64(_MULTIPLIERS[0])
        c2 *= np.uint64(_MULTIPLIERS[1])
        c1 ^= c2 >> _HALF
        c1 ^= np.uint64(key[0])
        c3 ^= c0 >> _HALF
        c3 ^= np.uint64(key[1])
        c0 &= _LOW
        c2 &= _LOW
        c0, c1, c2, c3 = c1, c2, c3, c0
        key = [(word + step) & 0xFFFFFFFF for word, step in zip(key, _WEYL, strict=True)]
    return c0, c1, c2, c3


def threshold(dropout_p: float) -> int:
    """A score is dropped when its 16 random bits are below this."""
    return min(int(dropout_p * 65536 + 0.5), 65535)


def random16(seed: int, batch: Any, head: Any, rows: Any, keys: Any) -> NDArray[np.uint16]:
    """The 16 random bits of every pair of `rows` (n,) and `keys` (m,), as an array (..., n, m).

    batch, head: integers, or arrays that broadcast to `...`.
    """
    row_blocks, of_rows = _blocks(rows)
    key_blocks, of_keys = _blocks(keys)
    batch, head = (np.asarray(x)[..., None, None, None, None] for x in (batch, head))
    # Axes: ..., block of rows, row % 8, block of keys, pair of keys.
    row_words = (8 * row_blocks[:, None] + np.arange(8))[:, :, None, None]
    key_words = 4 * key_blocks[:, None] + np.arange(4)
    words = philox4x32((key_words, row_words, head, batch), seed)
    lead = np.broadcast_shapes(batch.shape, head.shape)[:-4]
    shape = (*lead, len(row_blocks), 2, 8, len(key_blocks), 2, 4, 2)
    bits = np.empty(shape, np.uint16)
    for n, word in enumerate(words):
        for odd in range(2):
            # Row 8 * (n % 2) + row % 8 and key 8 * (n // 2) + 2 * pair + odd of the block.
            bits[..., n % 2, :, :, n // 2, :, odd] = word >> np.uint64(16 * odd)
    blocks = bits.reshape(*lead, _BLOCK * len(row_blocks), _BLOCK * len(key_blocks))
    found: NDArray[np.uint16] = blocks[..., of_rows, :][..., of_keys]
    return found


def kept(
    seed: int, dropout_p: float, batch: Any, head: Any, rows: Any, keys: Any
) -> NDArray[np.bool_]:
    """True where dropout keeps the probability of (row, key). Every backend keeps this very set.

    `rows` (n,) and `keys` (m,) are positions inside the sequence, the result is (..., n, m); `batch`
    is the index of the sequence, `head` the query head, or arrays of them that broadcast to `...`;
    `seed` an integer whose low 64 bits count.
    """
    return random16(seed, batch, head, rows, keys) >= threshold(dropout_p)


def _blocks(positions: Any) -> tuple[NDArray[np.int64], Any]:
    """The blocks that hold the positions, and an index of the positions among the elements of these blocks, laid end to end.

    The index of a range is a slice, which copies nothing.
    """
    if isinstance(positions, range) and positions.step == 1:
        first = positions.start // _BLOCK
        start = positions.start - first * _BLOCK
        blocks = np.arange(first, -(-positions.stop // _BLOCK))
        return blocks, slice(start, start + len(positions))
    positions = np.asarray(positions, np.int64)
    blocks, block = np.unique(positions // _BLOCK, return_inverse=True)
    return blocks, block * _BLOCK + positions % _BLOCK
