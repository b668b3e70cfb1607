"""Which query heads have rows in one tile of Hopper's forward."""

from __future__ import annotations

from rawattn._call.problem import Problem
from rawattn._kernels.sm90.filling import averaged

# Tiles of interleaved heads must be so many fewer: they end in rows that are nobody's.
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
    """Whether tiles have the rows of all heads that share keys query by query: where so they are fewer, by a fifth.

    Not where a warp's rows must be those of one head: where what is done to scores, or to the output, differs from head to
    head. Queries for pages of 8 bits are converted by the largest of all rows (docs/notes/hopper-forward.md).
    """
    group, rows = problem.group_heads, problem.max_seqlen_q
    if problem.group:  # a long sequence fills its tiles either way
        rows = averaged(problem).max_seqlen_q
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
    """Likewise, where a warp's 16 rows are those of one head."""
    group = problem.group_heads
    if problem.mask is not None and problem.mask.shape[1] > problem.nheads_kv:
        group = 1  # each head meets tiles of its own

    return max(
        heads
        for heads in range(1, tile_rows // 16 + 1)
        if group % heads == 0 and tile_rows % (16 * heads) == 0
    )
