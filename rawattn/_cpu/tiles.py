"""Tiles of scores and the matrix products on them, for the CPU's forward and backward.

A tile is some query rows by some keys, for one or several kv heads at once. The rows of all query heads of a
GQA group count as rows of the tile. Its arrays are float32 of shape (nheads_kv, rows or keys, ...), padded so
that rows and keys divide into pieces of equal size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn._call.problem import Problem

Array = NDArray[Any]
Floats = NDArray[np.float32]

# A tile has at most this many rows and keys. For short sequences several heads share a tile, since the
# interpreter's time per tile dominates.
ROWS = 256
KEYS = 512
# The most multiplications of a product that OpenBLAS computes on the calling thread: of two matrices, and of a
# matrix and a vector. It splits larger ones among its own threads, which compete with ours.
PRODUCT = 1 << 18
PRODUCT_WITH_VECTOR = 9216
# The initial running max. It is not -inf, since -inf - (-inf) is NaN. A row that has seen no key has weights of
# exp(-inf - LOWEST) = 0, and lse = LOWEST + log(0) = -inf.
LOWEST = float(np.finfo(np.float32).min)


def rows_of_tile(problem: Problem, seqlen_q: int) -> int:
    """The query rows of a tile, for each query head."""
    return max(1, min(seqlen_q, ROWS // (problem.nheads_q // problem.nheads_kv)))


def heads_of_tile(problem: Problem, seqlen_q: int, seqlen_k: int) -> int:
    """The number of kv heads that share a tile."""
    rows = rows_of_tile(problem, seqlen_q) * (problem.nheads_q // problem.nheads_kv)
    keys = max(1, min(seqlen_k, KEYS))
    return max(1, min(problem.nheads_kv, ROWS * KEYS // (rows * keys)))


def with_own_sinks(problem: Problem, first_key: int) -> Problem:
    """The problem of a sequence whose first key has this position in a longer one, of which `sink` counts the first keys."""
    if not (first_key and problem.sink):
        return problem
    return replace(problem, sink=max(0, problem.sink - first_key))


def keys_seen(
    problem: Problem, diagonal: int, rows: int, seqlen_k: int
) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) key of each key tile that some of the rows see.

    `diagonal` is the key on the diagonal of the first row.
    """
    left, right, sink = problem.window_left, problem.window_right, problem.sink
    end = seqlen_k if right is None else min(seqlen_k, diagonal + rows + right)
    start = 0 if left is None else max(0, diagonal - left)
    spans = [(0, end)] if start <= sink else [(0, min(sink, end)), (start, end)]
    for low, high in spans:
        for first in range(low, high, KEYS):
            yield first, min(first + KEYS, high)


def rows_seeing(
    problem: Problem, offset: int, keys: tuple[int, int], seqlen_q: int
) -> tuple[int, int]:
    """First and last (exclusive) of the rows that see some of the keys. The diagonal of row i is key
    i + offset."""
    left, right = problem.window_left, problem.window_right
    first, last = keys
    start = 0 if right is None else max(0, first - offset - right)
    if left is None or first < problem.sink:
        return min(start, seqlen_q), seqlen_q
    return start, max(start, min(seqlen_q, last - offset + left))


def masked_pairs(
    problem: Problem, diagonal: int, rows: int, keys: tuple[int, int], shape: tuple[int, int]
) -> NDArray[np.bool_] | None:
    """True where a tile padded to `shape` is padding, or has a row that does not see the key; None if nowhere.

    The tile holds `rows` rows of each query head of a group, one head after another.
    """
    left, right, sink = problem.window_left, problem.window_right, problem.sink
    first, last = keys
    heads = problem.nheads_q // problem.nheads_kv
    beyond = right is not None and last - 1 > diagonal + right
    before = left is not None and first < diagonal + rows - 1 - left and last > sink
    if not beyond and not before and shape == (heads * rows, last - first):
        return None
    i = diagonal + np.arange(rows)[:, None]
    j = first + np.arange(shape[1])
    masked: NDArray[np.bool_] = np.broadcast_to(j >= last, (rows, j.size))
    if right is not None:
        masked = masked | (j > i + right)
    if left is not None:
        masked = masked | ((j < i - left) & (j >= sink))
    filled = np.ones(shape, np.bool_)
    filled[: heads * rows].reshape(heads, rows, j.size)[...] = masked
    return filled


class Pieces(NamedTuple):
    """How a tile is divided into pieces for the BLAS: the numbers of pieces, and the size of each."""

    rows: int
    rows_each: int
    keys: int
    keys_each: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and keys of the tile, with its padding."""
        return self.rows * self.rows_each, self.keys * self.keys_each

    def of(self, tile: Floats) -> Floats:
        """A view of (nheads, rows, keys) as (nheads, row pieces, key pieces, rows, keys)."""
        return tile.reshape(len(tile), *self).swapaxes(2, 3)

    def transposed(self, tile: Floats) -> Floats:
        """The same view, transposed: (nheads, key pieces, row pieces, keys, rows)."""
        return tile.reshape(len(tile), *self).transpose(0, 3, 1, 4, 2)


def divide(problem: Problem, rows: int, keys: int) -> Pieces:
    """The pieces of a tile of `rows` query rows, for each query head of a group, and `keys` keys."""
    headdim = max(problem.headdim, problem.headdim_v)
    # So small that a single row times a piece of the keys stays below PRODUCT_WITH_VECTOR.
    most_keys = 64 if headdim <= 128 else 32
    most_rows = min(64, PRODUCT // (most_keys * headdim))
    rows *= problem.nheads_q // problem.nheads_kv
    return Pieces(*_even(rows, most_rows), *_even(keys, most_keys))


def _even(n: int, most: int) -> tuple[int, int]:
    """Number and size of equal pieces that hold n."""
    pieces = -(-n // most)
    return pieces, -(-n // pieces)


def multiply_transposed(queries: Floats, keys: Floats, pieces: Pieces) -> Floats:
    """queries (nheads, rows, d) times keys (nheads, keys, d), transposed: (nheads, rows, keys)."""
    nheads, _, headdim = queries.shape
    tile = np.empty((nheads, *pieces.shape), np.float32)
    np.matmul(
        queries.reshape(nheads, pieces.rows, 1, pieces.rows_each, headdim),
        keys.reshape(nheads, 1, pieces.keys, pieces.keys_each, headdim).swapaxes(3, 4),
        out=pieces.of(tile),
    )
    return tile


def multiply_matrices(left: Floats, right: Floats) -> Floats:
    """left @ right. An outer product is computed by broadcasting, since matmul does not use the BLAS for it."""
    product: Floats = left * right if left.shape[-1] == 1 else np.matmul(left, right)
    return product


def multiply(weights: Floats, values: Floats, masked: NDArray[np.bool_] | None) -> Floats:
    """Weights in pieces (nheads, n pieces, m pieces, n, m) times values (nheads, all m, d).

    masked: ([nheads or 1,] all n, all m). A NaN or infinity in values does not reach rows for which it is masked: their
    weight is 0, but 0 * NaN would be NaN.
    """
    nheads, pieces, inner_pieces, size, inner = weights.shape
    headdim = values.shape[2]
    if masked is not None and not np.isfinite(values).all():
        return _multiply_nonfinite(weights, values, masked)
    by_piece = values.reshape(nheads, 1, inner_pieces, inner, headdim)
    product = multiply_matrices(weights, by_piece)
    summed = product if inner_pieces == 1 else product.sum(axis=2)
    result: Floats = summed.reshape(nheads, pieces * size, headdim)
    return result


def _multiply_nonfinite(weights: Floats, values: Floats, masked: NDArray[np.bool_]) -> Floats:
    """`multiply` for values that are not all finite: keys with a NaN or infinity are added one by one, to the rows that see
    them.
    """
    strays = np.flatnonzero(~np.isfinite(values).all(axis=(0, 2)))
    finite = values.copy()
    finite[:, strays] = 0
    result = multiply(weights, finite, None)
    for stray in strays:
        seen = ~masked[..., stray, None]
        piece, index = divmod(stray, weights.shape[4])
        weight = weights[:, :, piece, :, index].reshape(len(weights), -1, 1)
        np.add(result, weight * values[:, None, stray], out=result, where=seen)
    return result


def by_head(array: Array, nheads_kv: int) -> Array:
    """A view (rows, nheads_q, d) -> (nheads_kv, heads of a group, rows, d)."""
    rows, nheads_q, headdim = array.shape
    return array.reshape(rows, nheads_kv, nheads_q // nheads_kv, headdim).transpose(1, 2, 0, 3)


def fill_rows(array: Array, nheads_kv: int, n: int) -> Floats:
    """(rows, nheads_q, d) as the rows of a tile, (nheads_kv, n, d), padded with 0."""
    rows, nheads_q, headdim = array.shape
    tile = np.empty((nheads_kv, n, headdim), np.float32)
    used = nheads_q // nheads_kv * rows
    rows_by_head(tile, nheads_q, rows)[...] = by_head(array, nheads_kv)
    tile[:, used:] = 0
    return tile


def rows_by_head(tile: Floats, nheads_q: int, rows: int) -> Floats:
    """A view of a tile (nheads_kv, n, ...) without its padding: (nheads_kv, heads of a group, rows, ...), as `by_head`."""
    nheads_kv = len(tile)
    used = nheads_q // nheads_kv * rows
    return tile[:, :used].reshape(nheads_kv, nheads_q // nheads_kv, rows, *tile.shape[2:])


def fill_keys(array: Array, n: int) -> Floats:
    """(keys, nheads_kv, d) as the keys of a tile, (nheads_kv, n, d), padded with 0. A view of the
    caller's memory if possible."""
    given, nheads, headdim = array.shape
    heads_first = array.transpose(1, 0, 2)
    if (
        array.dtype == np.float32
        and n == given
        and array.flags.aligned
        and array.strides[2] == array.itemsize
        and array.strides[0] >= headdim * array.itemsize
    ):
        return heads_first
    tile = np.empty((nheads, n, headdim), np.float32)
    tile[:, :given] = heads_first
    tile[:, given:] = 0
    return tile
