"""Bundles: short sequences of equal lengths are computed together, each as one tile.

So the interpreter's time is spent once a bundle. Long sequences are computed tile by tile, by the forward
and by the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn._call.layout import HostLengths
from rawattn._call.problem import Problem
from rawattn._cpu import tiles
from rawattn._cpu.scores import TilePosition
from rawattn._cpu.tiles import Array, Floats, multiply, multiply_matrices

# The most numbers in q, k, v or a result of a bundle, so that they stay in the CPU's cache.
_NUMBERS = 1 << 17


class Rows(NamedTuple):
    """Where the rows (or keys) of sequences of equal length lie in an array of the call."""

    index: Any
    split: tuple[int, int] | None  # (sequences, length) if the index gives one flat run of rows

    def read(self, array: Array) -> Array:
        """(sequences, length, ...). The heads of `array` come after its rows."""
        found: Array = array[self.index]
        return found if self.split is None else found.reshape(*self.split, *found.shape[1:])

    def write(self, array: Array, values: Array) -> None:
        if self.split is None:
            array[self.index] = values
        else:  # the index is a slice then, and splitting an axis keeps it a view
            self.read(array)[...] = values


class Bundle(NamedTuple):
    """Short sequences of equal lengths and positions, with all their heads."""

    rows: Rows
    keys: Rows
    members: slice | list[int]  # their indices in the batch
    sequences: int
    len_q: int
    len_k: int
    first_query: int = 0
    first_key: int = 0

    def work(self, problem: Problem) -> int:
        """The work of the forward in multiplications: copying a number counts as 8, the softmax of a score (exp etc.) as 16."""
        headdims = problem.headdim + problem.headdim_v
        scores = problem.nheads_q * self.len_q * self.len_k
        numbers = (problem.nheads_q * self.len_q + problem.nheads_kv * self.len_k) * headdims
        return self.sequences * (scores * (headdims + 16) + 8 * numbers)


class Span(NamedTuple):
    """A sequence that is too long for a bundle, computed alone."""

    sequence: int  # its index in the batch
    entry: tuple[Any, ...]  # its index on the batch axis; () in group mode
    start_q: int
    len_q: int
    start_k: int
    len_k: int
    first_query: int = 0
    first_key: int = 0


def divide_batch(
    problem: Problem, lengths: HostLengths | None
) -> tuple[Sequence[Bundle], Sequence[Span]]:
    """The sequences of a call, each in a bundle or alone.

    `lengths` may be None if every sequence has all rows and keys of its batch entry.
    """
    if not problem.ragged:
        step = _step_of_dense(problem, (tiles.ROWS, tiles.KEYS))
        return _divide_dense(problem.batch, problem.rows_q, problem.rows_k, step)
    assert lengths is not None
    alike: dict[tuple[int, int, int, int], list[int]] = {}
    columns = lengths.len_q, lengths.len_k, lengths.position_q, lengths.position_k
    for b, form in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        alike.setdefault(form, []).append(b)
    bundles, spans = [], []
    for (*shape, first_query, first_key), members in alike.items():
        step = sequences_of_bundle(problem, *shape)
        if not step:
            spans += [_span(problem, lengths, b) for b in members]
            continue
        for first in range(0, len(members), step):
            some = members[first : first + step]
            if problem.packed:
                bundle = _of_rows(lengths, some, *shape)
            else:
                bundle = _of_batch(_entries(some), *shape)
            if first_query or first_key:
                bundle = bundle._replace(first_query=first_query, first_key=first_key)
            bundles.append(bundle)
    return bundles, spans


@functools.lru_cache(maxsize=256)
def _step_of_dense(problem: Problem, tile: tuple[int, int]) -> int:
    """`sequences_of_bundle` of a dense batch, cached. tile: (ROWS, KEYS), on which the result depends too."""
    return sequences_of_bundle(problem, problem.rows_q, problem.rows_k)


@functools.lru_cache(maxsize=256)
def _divide_dense(
    batch: int, rows: int, keys: int, step: int
) -> tuple[Sequence[Bundle], Sequence[Span]]:
    if not step:
        return (), tuple(Span(b, (b,), 0, rows, 0, keys) for b in range(batch))
    firsts = range(0, batch, step)
    return tuple(_of_batch(slice(b, min(b + step, batch)), rows, keys) for b in firsts), ()


def sequences_of_bundle(problem: Problem, len_q: int, len_k: int) -> int:
    """How many sequences of these lengths a bundle holds; 0 where one is too long."""
    nheads_q, nheads_kv = problem.nheads_q, problem.nheads_kv
    headdim = max(problem.headdim, problem.headdim_v)
    rows = nheads_q // nheads_kv * len_q
    with_vector = 1 in (rows, len_k, problem.headdim, problem.headdim_v)
    most = tiles.PRODUCT_WITH_VECTOR if with_vector else tiles.PRODUCT
    if rows * len_k * headdim > most:
        return 0
    numbers = max(nheads_q * len_q, nheads_kv * len_k, 1) * headdim
    scores = max(nheads_q * len_q * len_k, 1)
    return min(_NUMBERS // numbers, tiles.ROWS * tiles.KEYS // scores)


def _of_batch(entries: slice | list[int], len_q: int, len_k: int) -> Bundle:
    rows, keys = (entries, slice(len_q)), (entries, slice(len_k))
    count = entries.stop - entries.start if isinstance(entries, slice) else len(entries)
    return Bundle(Rows(rows, None), Rows(keys, None), entries, count, len_q, len_k)


def _entries(members: list[int]) -> slice | list[int]:
    """An index of the batch axis: a slice if possible, which makes no copy."""
    first, last = members[0], members[-1]
    return slice(first, last + 1) if last - first + 1 == len(members) else members


def _of_rows(lengths: HostLengths, members: list[int], len_q: int, len_k: int) -> Bundle:
    rows = _in_row(lengths.start_q, members, len_q)
    keys = _in_row(lengths.start_k, members, len_k)
    return Bundle(rows, keys, members, len(members), len_q, len_k)


def _in_row(starts: NDArray[np.int64], members: list[int], length: int) -> Rows:
    first, count = int(starts[members[0]]), len(members)
    if count == 1:
        return Rows((None, slice(first, first + length)), None)
    starts = starts[members]
    if (np.diff(starts) == length).all():
        return Rows(slice(first, first + count * length), (count, length))
    return Rows(starts[:, None] + np.arange(length), None)


def _span(problem: Problem, lengths: HostLengths, b: int) -> Span:
    rows = lengths.start_q, lengths.len_q, lengths.start_k, lengths.len_k
    spans = *rows, lengths.position_q, lengths.position_k
    return Span(b, () if problem.packed else (b,), *(int(x[b]) for x in spans))


def mask_of_bundle(problem: Problem, bundle: Bundle) -> NDArray[np.bool_] | None:
    """True where a row of a tile of `heads_first` does not see the key; None if all rows see all keys."""
    len_q, len_k = bundle.len_q, bundle.len_k
    diagonal = problem.offset(len_q, len_k, bundle.first_query, bundle.first_key)
    shape = (problem.nheads_q // problem.nheads_kv * len_q, len_k)
    problem = tiles.with_own_sinks(problem, bundle.first_key)
    return tiles.masked_pairs(problem, diagonal, len_q, (0, len_k), shape)


def where_bundle(problem: Problem, bundle: Bundle) -> TilePosition:
    """The position of a bundle's tile of scores."""
    rows, keys = (0, bundle.len_q), (0, bundle.len_k)
    lengths = bundle.len_q, bundle.len_k, bundle.first_query, bundle.first_key
    return TilePosition(bundle.members, (0, problem.nheads_kv), rows, keys, *lengths)


def heads_first(array: Array, nheads_kv: int) -> Floats:
    """(sequences, length, nheads, d) as (sequences, nheads_kv, heads of a group * length, d).

    A view of the caller's memory if possible.
    """
    by_head = array.transpose(0, 2, 1, 3)
    count, nheads, length, headdim = by_head.shape
    if nheads != nheads_kv:
        by_head = by_head.reshape(count, nheads_kv, nheads // nheads_kv * length, headdim)
    return by_head.astype(np.float32, copy=False)


def heads_last(tile: Floats, nheads: int) -> Floats:
    """The inverse of `heads_first`, as a view."""
    count, nheads_kv, rows, headdim = tile.shape
    if nheads != nheads_kv:
        tile = tile.reshape(count, nheads, nheads_kv * rows // nheads, headdim)
    return tile.transpose(0, 2, 1, 3)


def multiply_whole(weights: Floats, values: Floats, masked: NDArray[np.bool_] | None) -> Floats:
    """Weights (sequences, nheads, n, m) times values (sequences, nheads, m, d).

    A NaN or infinity in values does not reach rows for which it is masked, whose weight is 0. `masked` has the
    axes of the weights, or the last two of them.
    """
    product = multiply_matrices(weights, values)
    if masked is None or np.isfinite(product).all():
        return product
    n, m = masked.shape[-2:]
    pieces = weights.reshape(-1, 1, 1, n, m)
    of_heads = values.reshape(-1, m, values.shape[3])
    return multiply(pieces, of_heads, masked.reshape(-1, n, m)).reshape(product.shape)
