"""Which kv heads the backward walks together.

Blocks that run at the same time should read the same queries, so kv heads come in sections of as many as the L2 cache
has room for (kernels_cu/attn/schedule/keys.cuh). A section begins with its longest blocks, under a causal mask those of
the first key tiles. Where sections have fewer blocks than the GPU runs at once, the longest blocks of the last one begin
when all others are nearly done: then more heads come together.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rawattn._call.problem import Problem
    from rawattn._kernels.portable.backward_config import Config
    from rawattn._kernels.target import Target

# The time of a block before its first turn and behind its last one, in turns.
_AROUND = 3
# Rounds of blocks beyond which the end of a schedule no longer matters.
_ROUNDS = 16
# The most query rows of a section, which kernels count in 32 bits.
_MOST_QUERIES = 2**31 - 1
# The fraction of the time that larger sections must save, because they read queries from DRAM more often.
_WORTH_IT = 0.03


def section_queries(
    problem: Problem, target: Target, config: Config, fitting: int, parts: int
) -> int:
    """The most query rows of a section, over its kv heads.

    fitting: the query rows that fit the L2 cache. parts: blocks that share a key tile.
    """
    if problem.window_right is None or problem.mask is not None or problem.batch == 0:
        return fitting
    rows_q, rows_k = problem.rows_q, problem.rows_k
    if problem.packed:  # lengths are not known, so every sequence counts with the mean
        rows_q, rows_k = (max(1, rows // problem.batch) for rows in (rows_q, rows_k))
    heads = problem.nheads_kv
    sections = min(heads * rows_q // fitting, heads - 1) + 1
    least = -(-heads // sections)
    together = _heads_together(
        *(least, heads, problem.batch),
        turns_of_blocks(problem, config, rows_q, rows_k, parts),
        target.multiprocessors * config.blocks_per_sm,
    )
    if together == least:
        return fitting
    return min(heads * rows_q // -(-heads // together) + 1, _MOST_QUERIES)


def turns_of_blocks(
    problem: Problem, config: Config, rows_q: int, rows_k: int, parts: int
) -> tuple[tuple[int, ...], ...]:
    """For each key tile, how many query tiles each of its blocks meets, over all heads of the group."""
    offset = 0 if problem.top_left else rows_k - rows_q
    group = problem.group_heads
    found = []
    for first_key in range(0, rows_k, config.tile_k):
        last_key = min(first_key + config.tile_k, rows_k) - 1
        first, last = 0, rows_q - 1
        if problem.window_right is not None:
            first = max(first, first_key - offset - problem.window_right)
        if problem.window_left is not None and first_key >= problem.sink:
            last = min(last, last_key - offset + problem.window_left)
        tiles = last // config.tile_q - first // config.tile_q + 1 if first <= last else 0
        turns = tiles * group
        found.append(
            tuple(turns * (part + 1) // parts - turns * part // parts for part in range(parts))
        )
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _heads_together(
    least: int, heads: int, batch: int, turns: tuple[tuple[int, ...], ...], slots: int
) -> int:
    """Kv heads of a section: the fewest, from `least` on, with which all blocks end within `_WORTH_IT` of the earliest end.

    turns: as `turns_of_blocks` says. slots: blocks that run at once.
    """
    blocks = sum(map(len, turns)) * heads
    if least == heads or not 0 < blocks <= _ROUNDS * slots:
        return least
    # The last sequences decide when the last block ends.
    batch = min(batch, -(-_ROUNDS * slots // blocks))
    # A number of sections is as even as can be, so only these sizes differ.
    sizes = sorted({-(-heads // count) for count in range(1, -(-heads // least) + 1)})
    ends = {size: end(size, heads, (turns,) * batch, slots, _AROUND) for size in sizes}
    good = min(ends.values()) / (1 - _WORTH_IT)
    return next(size for size in sizes if ends[size] <= good)


def end(
    together: int,
    heads: int,
    sequences: Iterable[tuple[tuple[int, ...], ...]],
    slots: int,
    around: float,
) -> float:
    """When the last block ends, in turns, if each block starts in the slot that becomes free first.

    together: kv heads of a section. sequences: of each in turn, what `turns_of_blocks` says. slots: blocks that run at once.
    around: the time of a block before its first turn and behind its last one, in turns.
    """
    free: list[float] = [0] * slots
    for turns in sequences:
        for first in range(0, heads, together):
            for counts in turns:
                for _ in range(min(together, heads - first)):
                    for count in counts:
                        heapq.heapreplace(free, free[0] + around + count)
    return max(free)
