"""The CPU backend: online softmax over tiles of scores, in NumPy, with threads over tiles.

Arithmetic is float32 whatever the dtype. Beyond the arrays of the call, memory is a few tiles for
each thread. Each row has one writer, which adds up its keys in one order: the same bits on every
run. NaN in a key or value reaches the rows that see it and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rawattn._call.layout import HostLengths
from rawattn._call.problem import Problem
from rawattn._cpu.tiles import (
    Array,
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
    run,
    unpacked,
)


class _Task(NamedTuple):
    """Rows of some heads of one sequence, and all the keys of these heads; all are views."""

    q: Array  # (rows, nheads_q, headdim)
    k: Array  # (seqlen_k, nheads_kv, headdim)
    v: Array  # (seqlen_k, nheads_kv, headdim_v)
    out: Array  # (rows, nheads_q, headdim_v)
    lse: Array | None  # (nheads_q, rows)
    diagonal: int  # the key under the diagonal of the first row
    work: int  # scores to compute


def forward(
    problem: Problem, lengths: HostLengths, q: Array, k: Array, v: Array, out: Array, lse: Any
) -> None:
    """Write the logical rows of `out` and, if it is not None, of `lse`. All are NumPy arrays."""

    def compute(task: _Task) -> None:
        _attend(problem, task)

    tasks = _tasks(problem, lengths, q, k, v, out, lse)
    run(compute, sorted(tasks, key=lambda task: task.work, reverse=True))


def _tasks(
    problem: Problem, lengths: HostLengths, q: Array, k: Array, v: Array, out: Array, lse: Any
) -> Iterator[_Task]:
    group_size = problem.nheads_q // problem.nheads_kv
    spans = (lengths.start_q, lengths.len_q, lengths.start_k, lengths.len_k)
    for b, (start_q, len_q, start_k, len_k) in enumerate(
        zip(*(span.tolist() for span in spans), strict=True)
    ):
        entry = () if problem.group else (b,)
        offset = 0 if problem.top_left else len_k - len_q
        step = rows_of_tile(problem, len_q)
        nheads = heads_of_tile(problem, len_q, len_k)
        for first in range(0, len_q, step):
            rows = min(step, len_q - first)
            seen = keys_seen(problem, first + offset, rows, len_k)
            keys = sum(high - low for low, high in seen)
            for head in range(0, problem.nheads_kv, nheads):
                kv_heads = slice(head, head + nheads)
                q_heads = slice(head * group_size, (head + nheads) * group_size)
                places = slice(start_q + first, start_q + first + rows)
                by_row = (*entry, places, q_heads)
                by_key = (*entry, slice(start_k, start_k + len_k), kv_heads)
                yield _Task(
                    q=q[by_row],
                    k=k[by_key],
                    v=v[by_key],
                    out=out[by_row],
                    lse=None if lse is None else lse[(*entry, q_heads, places)],
                    diagonal=first + offset,
                    work=rows * keys * nheads,
                )


# NumPy's error state belongs to a thread. Warnings would be about the caller's NaN or infinity, or
# about a result that float16 cannot hold.
@np.errstate(all="ignore")
def _attend(problem: Problem, task: _Task) -> None:
    rows, nheads_q, _ = task.q.shape
    seqlen_k, nheads_kv, headdim_v = task.v.shape
    packed, _ = divide(problem, rows, 1).shape
    q = pack_rows(task.q, nheads_kv, packed)
    q *= np.float32(problem.scale)
    highest = np.full((nheads_kv, packed, 1), -np.inf, np.float32)
    total = np.zeros((nheads_kv, packed, 1), np.float32)
    out = np.zeros((nheads_kv, packed, headdim_v), np.float32)

    for keys in keys_seen(problem, task.diagonal, rows, seqlen_k):
        pieces = divide(problem, rows, keys[1] - keys[0])
        k, v = (pack_keys(x[slice(*keys)], pieces.shape[1]) for x in (task.k, task.v))
        p = multiply_transposed(q, k, pieces)
        hidden = hidden_pairs(problem, task.diagonal, rows, keys, pieces.shape)
        if hidden is not None:
            np.copyto(p, -np.inf, where=hidden)

        higher = np.maximum(highest, p.max(axis=2, keepdims=True))
        # A row that has seen no key yet is at -inf, from which nothing can be subtracted.
        subtracted = np.where(higher == -np.inf, np.float32(0), higher)
        p -= subtracted
        np.exp(p, out=p)
        shrink = np.exp(highest - subtracted)
        highest = higher
        total = total * shrink + p.sum(axis=2, keepdims=True)
        out *= shrink
        out += multiply(pieces.of(p), v, hidden)

    out /= np.where(total == 0, np.float32(1), total)
    by_head(task.out, nheads_kv)[...] = unpacked(out, nheads_q, rows)
    if task.lse is not None:
        lse = unpacked(highest + np.log(total), nheads_q, rows)
        task.lse[...] = lse.reshape(task.lse.shape)
