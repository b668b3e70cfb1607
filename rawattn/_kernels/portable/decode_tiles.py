"""The query tiles of decoding's kernels: their rows, and how many there are."""

from __future__ import annotations

from rawattn._call.problem import Problem
from rawattn._kernels.source import round_up

# Rows of a query tile; wide tiles have twice as many.
TILE_ROWS = 16
# The largest headdim_v for wide tiles: of more columns the output of 32 rows does not fit registers.
WIDE_TILE_HEADDIM = 128


def wide(problem: Problem) -> bool:
    """Whether tiles have 32 rows."""
    rows = problem.max_seqlen_q * problem.group_heads
    return rows > TILE_ROWS and problem.headdim_v <= WIDE_TILE_HEADDIM


def sharing_keys(problem: Problem) -> int:
    """The number of query tiles that share keys. Each reads them all."""
    _, heads, queries = shape(problem)
    return -(-problem.max_seqlen_q // queries) * -(-problem.group_heads // heads)


def of_heads(problem: Problem, heads: int) -> int:
    """The number of query tiles that one query of all heads takes, in tiles of `heads` heads."""
    return problem.nheads_kv * -(-problem.group_heads // heads)


def shape(problem: Problem) -> tuple[int, int, int]:
    """Rows, heads and queries of a tile. Where a GQA group has more heads than a tile has rows, tiles share them evenly."""
    group = problem.group_heads
    rows = 2 * TILE_ROWS if wide(problem) else TILE_ROWS
    heads = -(-group // -(-group // rows))
    return rows, heads, 1 if problem.max_seqlen_q <= 1 else rows // heads


def in_blocks_of_eight(problem: Problem) -> tuple[int, int, int] | None:
    """`shape` of tiles whose products have eight rows, not 16, where they are faster; else None.

    That is where a tile of 8 or 24 rows has all rows that share float8 keys: those take twice the products for each byte that
    is read. Of 16 bits it saves no time. In such a block the elements of a lane do not lie as a bias is loaded.
    """
    if not problem.float8 or problem.dtype == "float32" or problem.bias is not None:
        return None
    rows, heads, queries = shape(problem)
    if problem.max_seqlen_q > queries:
        return None
    rows = round_up(heads * max(problem.max_seqlen_q, 1), 8)
    if rows not in (8, 24):
        return None
    return rows, heads, 1 if problem.max_seqlen_q <= 1 else rows // heads
