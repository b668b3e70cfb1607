"""The CPU backend: NumPy, on tiles of scores, with threads over tiles.

A short sequence is one tile, and those of equal lengths are computed together. A long one has several
tiles, with an online softmax over them. Arithmetic is float32 whatever the dtype. Beyond the arrays of
the call, memory is a few tiles for each thread. Each row is computed by one thread, which adds up its
keys in a fixed order, so every run gives the same bits. NaN in a key or value reaches only rows that see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rawattn._call.layout import HostLengths
from rawattn._call.problem import NO_ARRAYS, Problem
from rawattn._cpu.bundles import (
    Bundle,
    Span,
    divide_batch,
    heads_first,
    heads_last,
    mask_of_bundle,
    multiply_whole,
    where_bundle,
)
from rawattn._cpu.scores import Scores, TilePosition, scores_of
from rawattn._cpu.threads import Task, run
from rawattn._cpu.tiles import (
    LOWEST,
    Array,
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
    with_own_sinks,
)


class _Tile(NamedTuple):
    """Views of some rows of some heads of one sequence, and of all keys and values of these heads."""

    q: Array  # (rows, nheads_q, headdim)
    k: Array  # (seqlen_k, nheads_kv, headdim)
    v: Array  # (seqlen_k, nheads_kv, headdim_v)
    out: Array  # (rows, nheads_q, headdim_v)
    lse: Array | None  # (nheads_q, rows)
    diagonal: int  # the key on the diagonal of the first row
    where: TilePosition  # covers all keys


def forward(
    problem: Problem,
    lengths: HostLengths | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    extras: Mapping[str, Any] = NO_ARRAYS,
) -> None:
    """Write the logical rows of `out` and, if it is not None, of `lse`. All are NumPy arrays.

    `lengths` may be None if `problem.ragged` is False. extras: arrays of options by name, and the number
    "seed_value".
    """
    scores = scores_of(problem, extras)
    bundles, spans = divide_batch(problem, lengths)
    tasks = [
        Task(
            bundle.work(problem),
            partial(_attend_bundle, problem, scores, bundle, q, k, v, out, lse),
        )
        for bundle in bundles
        if bundle.len_q
    ]
    for span in spans:
        tasks += _tasks(problem, scores, span, q, k, v, out, lse)
    run(tasks)


# NumPy's error state is per thread, so each task sets it. Warnings would be about the caller's NaN or
# infinity, or about a result that float16 cannot hold.
@np.errstate(all="ignore")
def _attend_bundle(
    problem: Problem,
    scores: Scores | None,
    bundle: Bundle,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
) -> None:
    nheads_q, nheads_kv = problem.nheads_q, problem.nheads_kv
    queries = heads_first(bundle.rows.read(q), nheads_kv) * problem.scale
    keys = heads_first(bundle.keys.read(k), nheads_kv)
    values = heads_first(bundle.keys.read(v), nheads_kv)
    p = np.matmul(queries, keys.swapaxes(2, 3))
    masked = mask_of_bundle(problem, bundle)
    sinks = None
    if scores is not None:
        where = where_bundle(problem, bundle)
        masked, _ = scores.apply(p, where, masked, keep=False)
        sinks = scores.sinks(where, p.shape[2])
    elif masked is not None:
        np.copyto(p, -np.inf, where=masked)
    row_max = np.maximum.reduce(p, axis=3, keepdims=True, initial=LOWEST)
    if sinks is not None:
        row_max = np.maximum(row_max, sinks)
    p -= row_max
    np.exp(p, out=p)
    total = np.add.reduce(p, axis=3, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - row_max)
    if scores is not None:
        scores.drop(p, where, scores.kept(where))
    product = multiply_whole(p, values, masked)
    product /= np.maximum(total, 1)
    if scores is not None and scores.kept_factor != 1:
        product *= scores.kept_factor
    bundle.rows.write(out, heads_last(product, nheads_q))
    if lse is not None:
        row_max += np.log(total)
        bundle.rows.write(lse.swapaxes(-1, -2), heads_last(row_max, nheads_q)[..., 0])


def _tasks(
    problem: Problem,
    scores: Scores | None,
    span: Span,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
) -> Iterator[Task]:
    sequence, entry, start_q, len_q, start_k, len_k, first_query, first_key = span
    problem = with_own_sinks(problem, first_key)
    group_size = problem.nheads_q // problem.nheads_kv
    headdims = problem.headdim + problem.headdim_v
    offset = problem.offset(len_q, len_k, first_query, first_key)
    step = rows_of_tile(problem, len_q)
    nheads = heads_of_tile(problem, len_q, len_k)
    for first in range(0, len_q, step):
        rows = min(step, len_q - first)
        seen = keys_seen(problem, first + offset, rows, len_k)
        keys = sum(high - low for low, high in seen)
        for head in range(0, problem.nheads_kv, nheads):
            kv_heads = slice(head, head + nheads)
            q_heads = slice(head * group_size, (head + nheads) * group_size)
            tile_rows = slice(start_q + first, start_q + first + rows)
            by_row = (*entry, tile_rows, q_heads)
            by_key = (*entry, slice(start_k, start_k + len_k), kv_heads)
            tile = _Tile(
                q=q[by_row],
                k=k[by_key],
                v=v[by_key],
                out=out[by_row],
                lse=None if lse is None else lse[(*entry, q_heads, tile_rows)],
                diagonal=first + offset,
                where=TilePosition(
                    slice(sequence, sequence + 1),
                    (head, min(head + nheads, problem.nheads_kv)),
                    (first, first + rows),
                    (0, len_k),
                    len_q,
                    len_k,
                    first_query,
                    first_key,
                ),
            )
            work = rows * keys * tile.q.shape[1] * headdims
            yield Task(work, partial(_attend, problem, scores, tile))


@np.errstate(all="ignore")
def _attend(problem: Problem, scores: Scores | None, tile: _Tile) -> None:
    rows, nheads_q, _ = tile.q.shape
    seqlen_k, nheads_kv, headdim_v = tile.v.shape
    padded_rows, _ = divide(problem, rows, 1).shape
    q = fill_rows(tile.q, nheads_kv, padded_rows)
    q *= problem.scale
    running_max = np.full((nheads_kv, padded_rows, 1), LOWEST, np.float32)
    total = np.zeros((nheads_kv, padded_rows, 1), np.float32)
    out = np.zeros((nheads_kv, padded_rows, headdim_v), np.float32)
    if scores is not None and (sinks := scores.sinks(tile.where, padded_rows)) is not None:
        # The sink acts as a first key that has no value.
        running_max = np.maximum(running_max, sinks)
        total = np.exp(sinks - running_max)

    for keys in keys_seen(problem, tile.diagonal, rows, seqlen_k):
        pieces = divide(problem, rows, keys[1] - keys[0])
        k, v = (fill_keys(x[slice(*keys)], pieces.shape[1]) for x in (tile.k, tile.v))
        p = multiply_transposed(q, k, pieces)
        masked = masked_pairs(problem, tile.diagonal, rows, keys, pieces.shape)
        if scores is not None:
            where = tile.where._replace(keys=keys)
            masked, _ = scores.apply(p, where, masked, keep=False)
        elif masked is not None:
            np.copyto(p, -np.inf, where=masked)

        new_max = np.maximum(running_max, p.max(axis=2, keepdims=True))
        p -= new_max
        np.exp(p, out=p)
        shrink = np.exp(running_max - new_max)
        running_max = new_max
        total = total * shrink + p.sum(axis=2, keepdims=True)
        out *= shrink
        if scores is not None:
            scores.drop(p, where, scores.kept(where))
        out += multiply(pieces.of(p), v, masked)

    out /= np.maximum(total, 1)
    if scores is not None and scores.kept_factor != 1:
        out *= scores.kept_factor
    by_head(tile.out, nheads_kv)[...] = rows_by_head(out, nheads_q, rows)
    if tile.lse is not None:
        lse = rows_by_head(running_max + np.log(total), nheads_q, rows)
        tile.lse[...] = lse.reshape(tile.lse.shape)
