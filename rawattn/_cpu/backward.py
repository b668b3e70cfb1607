"""The CPU backend's backward: two passes over tiles of scores, in float32, with threads over tiles.

The first pass sums dk and dv of a key tile over the rows that see it, the second dq of a row tile
over the keys that it sees; both compute the probabilities anew, from `lse`. So beyond the arrays of
the call, memory is a few tiles for each thread, whatever the lengths. Each tile of a result has one
writer that adds in one order: the same bits on every run. Where all keys of a sequence are one
tile, dq needs no sum over tiles, and the first pass writes it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rawattn._call.layout import HostLengths
from rawattn._call.problem import Problem
from rawattn._cpu.tiles import (
    KEYS,
    Array,
    Floats,
    Pieces,
    by_head,
    divide,
    heads_of_tile,
    hidden_pairs,
    keys_seen,
    multiply,
    multiply_transposed,
    pack_keys,
    pack_rows,
    rows_of_tile,
    rows_seeing,
    run,
    unpacked,
)


class _Heads(NamedTuple):
    """Some key heads of one sequence, and the query heads that share them; all are views."""

    dout: Array  # (seqlen_q, nheads_q, headdim_v), as out
    q: Array  # (seqlen_q, nheads_q, headdim), as dq
    k: Array  # (seqlen_k, nheads_kv, headdim), as dk
    v: Array  # (seqlen_k, nheads_kv, headdim_v), as dv
    out: Array
    lse: Array  # (nheads_q, seqlen_q), as dlse
    dlse: Array | None
    dq: Array
    dk: Array
    dv: Array
    offset: int  # row i has the diagonal i + offset


class _Task(NamedTuple):
    """A tile of results: dk and dv of keys, or dq of rows."""

    heads: _Heads
    first: int
    last: int
    of_keys: bool
    work: int  # scores to compute


def backward(
    problem: Problem,
    lengths: HostLengths,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Write the logical rows of dq, dk and dv; padding is neither read nor written.

    All are NumPy arrays; `dlse` None is a gradient of 0. A row whose lse is -inf gives and gets 0.
    """

    def compute(task: _Task) -> None:
        (_sum_over_rows if task.of_keys else _sum_over_keys)(problem, task)

    arrays = (dout, q, k, v, out, lse, dlse, dq, dk, dv)
    tasks = [task for heads in _heads(problem, lengths, *arrays) for task in _tasks(problem, heads)]
    run(compute, sorted(tasks, key=lambda task: task.work, reverse=True))


def _heads(
    problem: Problem,
    lengths: HostLengths,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
) -> Iterator[_Heads]:
    group_size = problem.nheads_q // problem.nheads_kv
    spans = (lengths.start_q, lengths.len_q, lengths.start_k, lengths.len_k)
    for b, (start_q, len_q, start_k, len_k) in enumerate(
        zip(*(span.tolist() for span in spans), strict=True)
    ):
        entry = () if problem.group else (b,)
        rows, keys = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
        step = heads_of_tile(problem, len_q, len_k)
        for head in range(0, problem.nheads_kv, step):
            kv_heads = slice(head, head + step)
            q_heads = slice(head * group_size, (head + step) * group_size)
            by_row, by_key = (*entry, rows, q_heads), (*entry, keys, kv_heads)
            by_lse = (*entry, q_heads, rows)
            yield _Heads(
                dout=dout[by_row],
                q=q[by_row],
                k=k[by_key],
                v=v[by_key],
                out=out[by_row],
                lse=lse[by_lse],
                dlse=None if dlse is None else dlse[by_lse],
                dq=dq[by_row],
                dk=dk[by_key],
                dv=dv[by_key],
                offset=0 if problem.top_left else len_k - len_q,
            )


def _tasks(problem: Problem, heads: _Heads) -> Iterator[_Task]:
    seqlen_q, nheads_q = heads.q.shape[:2]
    seqlen_k = len(heads.k)
    for first in range(0, seqlen_k, KEYS):
        last = min(first + KEYS, seqlen_k)
        start, stop = rows_seeing(problem, heads.offset, (first, last), seqlen_q)
        yield _Task(heads, first, last, True, (stop - start) * (last - first) * nheads_q)
    if 0 < seqlen_k <= KEYS:
        return
    step = rows_of_tile(problem, seqlen_q)
    for first in range(0, seqlen_q, step):
        last = min(first + step, seqlen_q)
        seen = keys_seen(problem, first + heads.offset, last - first, seqlen_k)
        keys = sum(high - low for low, high in seen)
        yield _Task(heads, first, last, False, (last - first) * keys * nheads_q)


# NumPy's error state belongs to a thread. Warnings would be about the caller's NaN or infinity, or
# about a gradient that float16 cannot hold.
@np.errstate(all="ignore")
def _sum_over_rows(problem: Problem, task: _Task) -> None:
    """dk and dv of a key tile; and dq of all rows, if there is no other tile of keys."""
    heads, keys = task.heads, (task.first, task.last)
    seqlen_q, nheads, nkeys = len(heads.q), heads.k.shape[1], task.last - task.first
    every_key = nkeys == len(heads.k)
    filled = divide(problem, 1, nkeys).shape[1]
    k, v = (pack_keys(x[task.first : task.last], filled) for x in (heads.k, heads.v))
    dk = np.zeros((nheads, filled, problem.headdim), np.float32)
    dv = np.zeros((nheads, filled, problem.headdim_v), np.float32)

    start, stop = rows_seeing(problem, heads.offset, keys, seqlen_q)
    step = rows_of_tile(problem, seqlen_q)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        pieces = divide(problem, last - first, nkeys)
        rows = _Rows(problem, heads, first, last, pieces)
        hidden = hidden_pairs(problem, first + heads.offset, last - first, keys, pieces.shape)
        p, ds = _probabilities(rows, k, v, hidden, pieces)
        hidden_rows = None if hidden is None else hidden.T
        dv += multiply(pieces.transposed(p), rows.dout, hidden_rows)
        dk += multiply(pieces.transposed(ds), rows.q, hidden_rows)
        if every_key:
            _write_dq(problem, heads, first, last, multiply(pieces.of(ds), k, hidden))
    heads.dk[task.first : task.last] = dk[:, :nkeys].transpose(1, 0, 2)
    heads.dv[task.first : task.last] = dv[:, :nkeys].transpose(1, 0, 2)
    if every_key:
        heads.dq[:start] = 0
        heads.dq[stop:] = 0


@np.errstate(all="ignore")
def _sum_over_keys(problem: Problem, task: _Task) -> None:
    """dq of a row tile."""
    heads, rows = task.heads, task.last - task.first
    diagonal = task.first + heads.offset
    queries = _Rows(problem, heads, task.first, task.last, divide(problem, rows, 1))
    dq = np.zeros_like(queries.q)
    for keys in keys_seen(problem, diagonal, rows, len(heads.k)):
        pieces = divide(problem, rows, keys[1] - keys[0])
        k, v = (pack_keys(x[slice(*keys)], pieces.shape[1]) for x in (heads.k, heads.v))
        hidden = hidden_pairs(problem, diagonal, rows, keys, pieces.shape)
        _, ds = _probabilities(queries, k, v, hidden, pieces)
        dq += multiply(pieces.of(ds), k, hidden)
    _write_dq(problem, heads, task.first, task.last, dq)


class _Rows:
    """A tile of rows: what their probabilities and the gradients of their scores are made of."""

    def __init__(
        self, problem: Problem, heads: _Heads, first: int, last: int, pieces: Pieces
    ) -> None:
        nheads_q, nheads_kv = heads.q.shape[1], heads.k.shape[1]
        packed, _ = pieces.shape
        self.q, self.dout, out = (
            pack_rows(x[first:last], nheads_kv, packed) for x in (heads.q, heads.dout, heads.out)
        )
        self.q *= np.float32(problem.scale)
        # exp(s - inf) = 0: rows without a key, and those that fill up the tile.
        self.normaliser = np.full((nheads_kv, packed, 1), np.inf, np.float32)
        lse = heads.lse[:, first:last].reshape(nheads_kv, -1, last - first, 1)
        unpacked(self.normaliser, nheads_q, last - first)[...] = np.where(
            lse == -np.inf, np.float32(np.inf), lse
        )
        # ds = p * (dp - delta)
        self.delta = (self.dout * out).sum(axis=2, keepdims=True)
        if heads.dlse is not None:
            dlse = heads.dlse[:, first:last].reshape(nheads_kv, -1, last - first, 1)
            unpacked(self.delta, nheads_q, last - first)[...] -= dlse
        nothing = self.normaliser[..., 0] == np.inf
        self.dout[nothing] = 0
        self.delta[nothing] = 0


def _probabilities(
    rows: _Rows, k: Floats, v: Floats, hidden: Array | None, pieces: Pieces
) -> tuple[Floats, Floats]:
    """p, and ds: the gradient of scale * q . k, both 0 where hidden."""
    p = multiply_transposed(rows.q, k, pieces)
    p -= rows.normaliser
    np.exp(p, out=p)
    ds = multiply_transposed(rows.dout, v, pieces)
    ds -= rows.delta
    ds *= p
    if hidden is not None:
        np.copyto(p, 0, where=hidden)
        np.copyto(ds, 0, where=hidden)
    return p, ds


def _write_dq(problem: Problem, heads: _Heads, first: int, last: int, dq: Floats) -> None:
    dq *= np.float32(problem.scale)
    written = by_head(heads.dq[first:last], heads.k.shape[1])
    written[...] = unpacked(dq, heads.q.shape[1], last - first)
