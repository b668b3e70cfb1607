"""Which query heads have rows in one tile of Hopper's forward."""

from __future__ import annotations

from rawattn._call.problem import Problem
from rawattn._kernels.sm90.packed_lengths import mean_lengths

# Heads are interleaved if that leaves at most this fraction of the tiles. Interleaved tiles may end in unused rows, so a
# smaller gain does not pay (docs/notes/hopper-forward.md).
_WORTH_INTERLEAVING = 0.8


def heads_per_tile(problem: Problem, tile_rows: int) -> int:
    """Query heads of a kv head whose rows share a tile: as many as fit, or all of them interleaved.

    Fewer query rows a tile waste fewer products at the edges of masks and at the ends of sequences, and fewer tiles read the
    same keys.
    """
    return (
        problem.group_heads if interleaves(problem, tile_rows) else _heads_apart(problem, tile_rows)
    )


def interleaves(problem: Problem, tile_rows: int) -> bool:
    """Whether tiles are interleaved: their rows in the order of queries, then of all heads that share keys.

    They are where that makes fewer tiles by a fifth. They are not where a warp's rows must be of one head, because what is done
    to scores or to the output differs by head. Nor are they with pages of 8 bits, whose queries are converted with the largest
    value of all rows of a tile (docs/notes/hopper-forward.md).
    """
    group, rows = problem.group_heads, problem.max_seqlen_q
    if problem.packed:  # a long sequence fills its tiles either way
        rows = mean_lengths(problem)[0]
    by_head = (
        problem.alibi_slopes,
        problem.bias,
        problem.mask,
        problem.score_mod,
        problem.sink_logits,
    )
    if any(form is not None for form in by_head) or problem.dropout_p > 0 or problem.float8:
        return False
    heads = _heads_apart(problem, tile_rows)
    if heads == group or group > tile_rows:
        return False
    apart = -(-rows // (tile_rows // heads)) * (group // heads)
    return -(-rows // (tile_rows // group)) <= _WORTH_INTERLEAVING * apart


def _heads_apart(problem: Problem, tile_rows: int) -> int:
    """Query heads of a kv head that share a tile where all 16 rows of a warp are of one head: as many as fit."""
    group = problem.group_heads
    if problem.mask is not None and problem.mask.shape[1] > problem.nheads_kv:
        group = 1  # each query head has its own list of key tiles

    return max(
        heads
        for heads in range(1, tile_rows // 16 + 1)
        if group % heads == 0 and tile_rows % (16 * heads) == 0
    )
