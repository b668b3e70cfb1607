"""Blocks of scores: the blocks of a call, the scores of a block, and which keys its rows see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn import _philox
from rawattn._scores import numpy_eval
from rawattn.reference._call import Array, Call, Modifier, Segment

# A block of scores has at most this many elements, so that a long sequence fits in memory.
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of one query head of one sequence, and all keys of that sequence."""

    batch: int
    head: int
    kv_head: int
    offset: int  # the diagonal is j = i + offset
    i: Array  # (rows, 1) rows of the sequence
    j: Array  # (1, keys)
    segment: Segment
    rows: slice  # the same rows in q, out and lse
    keys: slice  # the same keys in k and v


def blocks(call: Call) -> Iterator[Block]:
    nheads_q, nheads_kv = call.q.shape[1], call.k.shape[1]
    for batch, segment in enumerate(call.sequences):
        start_q, len_q, start_k, len_k, first_query, first_key = segment
        offset = 0 if call.top_left else len_k - len_q
        if call.positions:
            offset = first_query - first_key
        step = max(1, _BLOCK // max(1, len_k))
        for head in range(nheads_q):
            for first in range(0, len_q, step):
                last = min(first + step, len_q)
                yield Block(
                    batch=batch,
                    head=head,
                    kv_head=head // (nheads_q // nheads_kv),
                    offset=offset,
                    i=np.arange(first, last)[:, None],
                    j=np.arange(len_k)[None, :],
                    segment=segment,
                    rows=slice(start_q + first, start_q + last),
                    keys=slice(start_k, start_k + len_k),
                )


class Scores(NamedTuple):
    capped: Array  # scaled and soft-capped, before score_mod
    final: Array  # -inf where the row does not see the key
    visible: NDArray[np.bool_]


def scores(call: Call, block: Block) -> Scores:
    """The scores of a block and which keys each row sees: the core of the specification."""
    i, j = block.i, block.j
    diagonal = i + block.offset
    sink = call.sink - block.segment.first_key
    visible = (j <= diagonal + call.right) & ((j >= diagonal - call.left) | (j < sink))
    if call.mask is not None:
        visible = visible & call.mask[index_in(call.mask, call, block)]

    s = call.scale * (call.q[block.rows, block.head] @ call.k[block.keys, block.kv_head].T)
    if call.softcap is not None:
        s = call.softcap * np.tanh(s / call.softcap)
    capped = s
    if call.score_mod is not None:
        s = numpy_eval.evaluate(*score_arguments(call.score_mod, block, s))
    if call.bias is not None:
        bias = call.bias[index_in(call.bias, call, block)]
        s = s + bias
        visible = visible & (bias != -np.inf)  # also if the score is NaN
    if call.alibi_slopes is not None:
        distance = np.abs(diagonal - j).astype(s.dtype)
        s = s - call.alibi_slopes[block.batch, block.head] * distance

    visible = visible & (s != -np.inf)
    return Scores(capped, np.where(visible, s, s.dtype.type(-np.inf)), visible)


def score_arguments(modifier: Modifier, block: Block, s: Array) -> tuple[Any, ...]:
    """The arguments of the functions of `numpy_eval`."""
    of = block.segment
    heads = block.head, block.kv_head
    i, j = of.first_query + block.i, of.first_key + block.j
    position = (block.batch, *heads, i, j, of.len_q, of.len_k)
    return modifier.text, s, *position, modifier.captured, modifier.scalars


def dropout_factor(call: Call, block: Block) -> Any:
    """The factors of the probabilities: 0 if dropped, else 1 / (1 - dropout_p)."""
    if call.dropout_p == 0:
        return 1
    rows, keys = range(block.i[0, 0], block.i[-1, 0] + 1), range(block.j.shape[1])
    kept = _philox.kept(call.seed, call.dropout_p, block.batch, block.head, rows, keys)
    return kept.astype(call.q.dtype) / (1 - call.dropout_p)


def sink_logit(call: Call, block: Block) -> Any:
    if call.sink_logits is None:
        return call.q.dtype.type(-np.inf)
    return call.sink_logits[block.head]


def index_in(array: Array, call: Call, block: Block) -> tuple[Any, ...]:
    """The index of this block in a bias or mask of four axes. An axis of 1 is broadcast."""
    batches, heads, rows, keys = array.shape
    first, last = int(block.i[0, 0]), int(block.i[-1, 0]) + 1
    return (
        block.batch if batches > 1 else 0,
        block.head * heads // call.q.shape[1],
        slice(first, last) if rows > 1 else slice(0, 1),
        slice(0, block.j.shape[1]) if keys > 1 else slice(0, 1),
    )
