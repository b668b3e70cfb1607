"""Dropout: which probabilities are kept. docs/notes/dropout.md says why it is defined this way."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four 32-bit words for every counter of four 32-bit words, keyed by 64 bits.

    The counter's four arrays broadcast together. Words are held in uint64 arrays, since NumPy has
    no other product of 32 by 32 bits to 64.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        product0, product1 = np.uint64(_MULTIPLIERS[0]) * c0, np.uint64(_MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(key[0]),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(key[1]),
            product0 & _LOW,
        )
        key = [(word + step) & 0xFFFFFFFF for word, step in zip(key, _WEYL, strict=True)]
    return c0, c1, c2, c3


def threshold(dropout_p: float) -> int:
    """A score is dropped when its 16 random bits are below this."""
    return min(int(dropout_p * 65536 + 0.5), 65535)


def random16(seed: int, batch: int, head: int, rows: Any, keys: Any) -> NDArray[np.uint64]:
    """The 16 random bits of every pair of `rows` (n,) and `keys` (m,), as an array (n, m)."""
    rows, keys = np.asarray(rows, np.int64), np.asarray(keys, np.int64)
    row_groups, row_group = np.unique(8 * (rows // 16) + rows % 8, return_inverse=True)
    key_groups, key_group = np.unique(4 * (keys // 16) + keys % 8 // 2, return_inverse=True)
    words = np.stack(philox4x32((key_groups, row_groups[:, None], head, batch), seed))
    word = 2 * (keys // 8 % 2) + (rows // 8 % 2)[:, None]
    half = (16 * (keys % 2)).astype(np.uint64)
    bits: NDArray[np.uint64] = words[word, row_group[:, None], key_group] >> half
    return bits & np.uint64(0xFFFF)


def kept(
    seed: int, dropout_p: float, batch: int, head: int, rows: Any, keys: Any
) -> NDArray[np.bool_]:
    """True where dropout keeps the probability of (row, key). Every backend keeps this very set.

    `rows` (n,) and `keys` (m,) are positions inside the sequence, the result is (n, m); `batch` is
    the index of the sequence, `head` the query head, `seed` an integer whose low 64 bits count.
    """
    bits = random16(seed, batch, head, rows, keys)
    return bits >= np.uint64(threshold(dropout_p))
