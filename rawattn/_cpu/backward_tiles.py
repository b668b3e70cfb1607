"""The backward of long sequences, one tile of scores at a time, in two passes, or one if all keys fit one tile.

The first pass sums dk and dv of a key tile over the query tiles that see it. The second sums dq of a query tile over the key
tiles that it sees. Both recompute the probabilities from `lse`. If all keys of a sequence are one tile, dq needs no sum over
tiles, and the first pass writes it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from rawattn._call.problem import Problem
from rawattn._cpu.bundles import Span
from rawattn._cpu.score_gradients import Part
from rawattn._cpu.scores import TilePosition
from rawattn._cpu.softmax_gradient import Options, score_gradient, softmax_gradient
from rawattn._cpu.threads import Task
from rawattn._cpu.tiles import (
    KEYS,
    Array,
    Floats,
    Pieces,
    by_head,
    divide,
    fill_keys,
    fill_rows,
    heads_of_tile,
    keys_seen,
    masked_pairs,
    multiply,
    multiply_transposed,
    rows_by_head,
    rows_of_tile,
    rows_seeing,
    with_own_sinks,
)


class Arrays(NamedTuple):
    """The arrays of the call."""

    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    dlse: Array | None
    dq: Array
    dk: Array
    dv: Array


class _Heads(NamedTuple):
    """Views of some kv heads of one sequence, and of the query heads that share them."""

    dout: Array  # (seqlen_q, nheads_q, headdim_v), the shape of out too
    q: Array  # (seqlen_q, nheads_q, headdim), the shape of dq too
    k: Array  # (seqlen_k, nheads_kv, headdim), the shape of dk too
    v: Array  # (seqlen_k, nheads_kv, headdim_v), the shape of dv too
    out: Array
    lse: Array  # (nheads_q, seqlen_q), the shape of dlse too
    dlse: Array | None
    dq: Array
    dk: Array
    dv: Array
    offset: int  # the diagonal of row i is key i + offset
    where: TilePosition  # covers all rows and keys


class _Tile(NamedTuple):
    """A tile of results, [first, last): dk and dv of keys, or dq of rows."""

    heads: _Heads
    first: int
    last: int


def tasks_of(problem: Problem, options: Options, span: Span, arrays: Arrays) -> Iterator[Task]:
    """The tasks that compute the gradients of one sequence."""
    problem = with_own_sinks(problem, span.first_key)
    for heads in _heads(problem, span, arrays):
        yield from _tasks(problem, options, heads)


def _heads(problem: Problem, span: Span, arrays: Arrays) -> Iterator[_Heads]:
    sequence, entry, start_q, len_q, start_k, len_k, first_query, first_key = span
    group_size = problem.nheads_q // problem.nheads_kv
    rows, keys = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
    step = heads_of_tile(problem, len_q, len_k)
    for head in range(0, problem.nheads_kv, step):
        kv_heads = slice(head, head + step)
        q_heads = slice(head * group_size, (head + step) * group_size)
        by_row, by_key = (*entry, rows, q_heads), (*entry, keys, kv_heads)
        by_lse = (*entry, q_heads, rows)
        yield _Heads(
            dout=arrays.dout[by_row],
            q=arrays.q[by_row],
            k=arrays.k[by_key],
            v=arrays.v[by_key],
            out=arrays.out[by_row],
            lse=arrays.lse[by_lse],
            dlse=None if arrays.dlse is None else arrays.dlse[by_lse],
            dq=arrays.dq[by_row],
            dk=arrays.dk[by_key],
            dv=arrays.dv[by_key],
            offset=problem.offset(len_q, len_k, first_query, first_key),
            where=TilePosition(
                slice(sequence, sequence + 1),
                (head, min(head + step, problem.nheads_kv)),
                (0, len_q),
                (0, len_k),
                len_q,
                len_k,
                first_query,
                first_key,
            ),
        )


def _tasks(problem: Problem, options: Options, heads: _Heads) -> Iterator[Task]:
    seqlen_q, nheads_q = heads.q.shape[:2]
    seqlen_k = len(heads.k)
    each = nheads_q * (problem.headdim + problem.headdim_v)  # multiplications a (row, key) pair
    one_pass = 0 < seqlen_k <= KEYS
    if options.totals is not None and options.totals.has_sinks:
        work = seqlen_q * nheads_q * problem.headdim_v
        yield Task(work, partial(_sum_of_sinks, problem, options, heads))
    for first in range(0, seqlen_k, KEYS):
        last = min(first + KEYS, seqlen_k)
        start, stop = rows_seeing(problem, heads.offset, (first, last), seqlen_q)
        work = (stop - start) * (last - first) * each * (5 if one_pass else 4) // 2
        yield Task(work, partial(_sum_over_rows, problem, options, _Tile(heads, first, last)))
    if one_pass:
        return
    step = rows_of_tile(problem, seqlen_q)
    for first in range(0, seqlen_q, step):
        last = min(first + step, seqlen_q)
        seen = keys_seen(problem, first + heads.offset, last - first, seqlen_k)
        work = (last - first) * sum(high - low for low, high in seen) * each * 3 // 2
        yield Task(work, partial(_sum_over_keys, problem, options, _Tile(heads, first, last)))


@np.errstate(all="ignore")
def _sum_over_rows(problem: Problem, options: Options, tile: _Tile) -> Part | None:
    """dk and dv of a key tile; and dq of all rows if it is the only key tile."""
    heads, keys = tile.heads, (tile.first, tile.last)
    seqlen_q, nheads, nkeys = len(heads.q), heads.k.shape[1], tile.last - tile.first
    every_key = nkeys == len(heads.k)
    padded_rows = divide(problem, 1, nkeys).shape[1]
    k, v = (fill_keys(x[tile.first : tile.last], padded_rows) for x in (heads.k, heads.v))
    dk = np.zeros((nheads, padded_rows, problem.headdim), np.float32)
    dv = np.zeros((nheads, padded_rows, problem.headdim_v), np.float32)

    start, stop = rows_seeing(problem, heads.offset, keys, seqlen_q)
    step = rows_of_tile(problem, seqlen_q)
    where = heads.where._replace(rows=(start, stop), keys=keys)
    part = options.part(where)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        pieces = divide(problem, last - first, nkeys)
        rows = _Rows(problem, heads, first, last, pieces)
        masked = masked_pairs(problem, first + heads.offset, last - first, keys, pieces.shape)
        where = where._replace(rows=(first, last))
        p, ds, masked = _probabilities(options, rows, k, v, masked, pieces, where, part)
        masked_rows = None if masked is None else masked.swapaxes(-1, -2)
        dv += multiply(pieces.transposed(p), rows.dout, masked_rows)
        dk += multiply(pieces.transposed(ds), rows.q, masked_rows)
        if every_key:
            _write_dq(problem, heads, first, last, multiply(pieces.of(ds), k, masked))
    heads.dk[tile.first : tile.last] = dk[:, :nkeys].transpose(1, 0, 2)
    heads.dv[tile.first : tile.last] = dv[:, :nkeys].transpose(1, 0, 2)
    if every_key:
        heads.dq[:start] = 0
        heads.dq[stop:] = 0
    return part


@np.errstate(all="ignore")
def _sum_over_keys(problem: Problem, options: Options, tile: _Tile) -> None:
    """dq of a query tile."""
    heads, rows = tile.heads, tile.last - tile.first
    diagonal = tile.first + heads.offset
    queries = _Rows(problem, heads, tile.first, tile.last, divide(problem, rows, 1))
    dq = np.zeros_like(queries.q)
    for keys in keys_seen(problem, diagonal, rows, len(heads.k)):
        pieces = divide(problem, rows, keys[1] - keys[0])
        k, v = (fill_keys(x[slice(*keys)], pieces.shape[1]) for x in (heads.k, heads.v))
        masked = masked_pairs(problem, diagonal, rows, keys, pieces.shape)
        where = heads.where._replace(rows=(tile.first, tile.last), keys=keys)
        _, ds, masked = _probabilities(options, queries, k, v, masked, pieces, where, None)
        dq += multiply(pieces.of(ds), k, masked)
    _write_dq(problem, heads, tile.first, tile.last, dq)


@np.errstate(all="ignore")
def _sum_of_sinks(problem: Problem, options: Options, heads: _Heads) -> Part | None:
    """The contribution of all rows of some heads to the gradient of the sink logits."""
    seqlen_q = len(heads.q)
    part = options.part(heads.where)
    assert part is not None
    step = rows_of_tile(problem, seqlen_q)
    for first in range(0, seqlen_q, step):
        last = min(first + step, seqlen_q)
        rows = _Rows(problem, heads, first, last, divide(problem, last - first, 1))
        part.add_sinks(rows.normaliser, rows.delta, heads.where._replace(rows=(first, last)))
    return part


class _Rows:
    """A query tile: scaled q, dout, lse and delta, from which its probabilities and score gradients are computed."""

    def __init__(
        self, problem: Problem, heads: _Heads, first: int, last: int, pieces: Pieces
    ) -> None:
        nheads_q, nheads_kv = heads.q.shape[1], heads.k.shape[1]
        padded_rows, _ = pieces.shape
        self.q, self.dout, out = (
            fill_rows(x[first:last], nheads_kv, padded_rows)
            for x in (heads.q, heads.dout, heads.out)
        )
        self.q *= problem.scale
        # inf gives exp(s - inf) = 0, for rows that see no key and for rows that only fill up the tile.
        self.normaliser = np.full((nheads_kv, padded_rows, 1), np.inf, np.float32)
        lse = heads.lse[:, first:last].reshape(nheads_kv, -1, last - first, 1)
        rows_by_head(self.normaliser, nheads_q, last - first)[...] = np.where(
            lse == -np.inf, np.float32(np.inf), lse
        )
        # ds = p * (dp - delta)
        self.delta = (self.dout * out).sum(axis=2, keepdims=True)
        if heads.dlse is not None:
            dlse = heads.dlse[:, first:last].reshape(nheads_kv, -1, last - first, 1)
            rows_by_head(self.delta, nheads_q, last - first)[...] -= dlse
        nothing = self.normaliser[..., 0] == np.inf
        self.dout[nothing] = 0
        self.delta[nothing] = 0


def _probabilities(
    options: Options,
    rows: _Rows,
    k: Floats,
    v: Floats,
    masked: Array | None,
    pieces: Pieces,
    where: TilePosition,
    part: Part | None,
) -> tuple[Floats, Floats, Array | None]:
    """(p, ds, masked): probabilities, the gradient of scale * q . k, and where both are 0 as the row does not see the key."""
    p = multiply_transposed(rows.q, k, pieces)
    ds = multiply_transposed(rows.dout, v, pieces)
    if options.scores is None:
        softmax_gradient(p, ds, rows.normaliser, rows.delta, masked)
    else:
        masked = score_gradient(
            options.scores, p, ds, rows.normaliser, rows.delta, masked, where, part
        )
    return p, ds, masked


def _write_dq(problem: Problem, heads: _Heads, first: int, last: int, dq: Floats) -> None:
    dq *= problem.scale
    written = by_head(heads.dq[first:last], heads.k.shape[1])
    written[...] = rows_by_head(dq, heads.q.shape[1], last - first)
