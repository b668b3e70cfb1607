"""How long a call takes Hopper's forward with tiles of some shape, by how they fill the machine.

Each multiprocessor takes one tile after the other, the longest first. So a few large tiles may leave most of the machine idle
in the last round, where smaller ones, which are slower for the rows they have, would not.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from rawattn._call.problem import Problem

# Of a tile of so many consumers, over one of two: they share the tensor cores and the exponentials, and a lone one has
# neither to itself while it does the other. Up to and above a head dim of 96 (docs/notes/hopper-forward.md).
_NARROW_HEADDIM = 96
_NARROW = {1: 0.68, 2: 1.0, 3: 1.25, 4: 1.62}
_WIDE = {1: 0.75, 2: 1.0, 3: 1.31, 4: 1.7}
# What beginning and ending a tile takes, in the time of so many keys.
_BEGIN_KEYS = 256
# What a consumer without rows adds to a tile.
_WAITING = 0.05
# What each further block of a multiprocessor adds to a tile's time for its keys, and for beginning and ending: blocks do one
# thing under another's.
_CROWDED, _CROWDED_BEGIN = 0.56, 0.15
# What merging the items of the last tiles adds to a call, likewise in keys.
_MERGE_KEYS = 1024
# Of more tiles the last round says little.
_MOST_SIMULATED = 2048


def duration(
    problem: Problem,
    multiprocessors: int,
    fields: Mapping[str, Any],
    heads: int,
    blocks: int = 1,
    shared: bool = False,
) -> float:
    """In the time that a tile of two consumers takes for a key.

    fields: of a row of the tile tables; heads: whose rows share a tile; blocks: that a multiprocessor runs at once;
    shared: the tiles behind whole rounds are shared out by keys. Sequences are taken to be as long as they may be.
    """
    multiprocessors *= blocks
    tiles = _tiles(problem, fields, heads, blocks)
    times = [time for time, count in tiles for _ in range(count)]  # from the longest on
    total = sum(times)
    if len(times) > _MOST_SIMULATED:
        return total / multiprocessors + times[0] / 2
    merging = 0.0
    if shared and (rest := len(times) % multiprocessors):
        line = times[-rest:]
        times[-rest:] = [line[0] * rest / multiprocessors] * multiprocessors
        merging = _MERGE_KEYS * _times(problem)[fields["consumers"]]
    ends = [0.0] * multiprocessors
    for time in times:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends) + merging


def extremes(problem: Problem) -> tuple[int, int]:
    """Keys that the query tile with the fewest and the one with the most see, of few rows."""
    last = max(problem.max_seqlen_q - 1, 0)
    found = [_visible(problem, row, row + 1) for row in (0, last)]
    return min(found), max(found)


def count(problem: Problem, rows: int, heads: int) -> int:
    """Tiles of so many rows, of `heads` heads."""
    each = -(-problem.max_seqlen_q // (rows // heads))
    if problem.group:
        each = min(problem.batch * each, problem.rows_q // (rows // heads) + problem.batch)
    return each * (1 if problem.group else problem.batch) * (problem.nheads_q // heads)


def _tiles(
    problem: Problem, fields: Mapping[str, Any], heads: int, blocks: int
) -> list[tuple[float, int]]:
    """The time of a tile, and how many there are of it, from the longest on."""
    consumers, tile_k = fields["consumers"], fields["tile_k"]
    times = _times(problem)
    rows = 64 * consumers // heads
    tiles = -(-problem.max_seqlen_q // rows)
    copies = count(problem, 64 * consumers, heads) / max(tiles, 1)
    found = []
    for n in range(tiles):
        first, behind = n * rows, min((n + 1) * rows, problem.max_seqlen_q)
        # Consumers without rows only wait. Tiles of several heads are bound by their keys, however few rows they have.
        busy = consumers if heads > 1 else -(-(behind - first) // 64)
        waiting = 1 + _WAITING * (consumers - busy)
        keys = -(-_visible(problem, first, behind) // tile_k) * tile_k
        crowded, begin = 1 + _CROWDED * (blocks - 1), 1 + _CROWDED_BEGIN * (blocks - 1)
        time = waiting * times[busy] * (crowded * keys + begin * _BEGIN_KEYS)
        found.append((time, max(1, round(copies))))
    return sorted(found, reverse=True)


def _times(problem: Problem) -> dict[int, float]:
    return _WIDE if max(problem.headdim, problem.headdim_v) > _NARROW_HEADDIM else _NARROW


def _visible(problem: Problem, first: int, behind: int) -> int:
    """Keys that some row of [first, behind) sees."""
    keys = problem.max_seqlen_k
    offset = 0 if problem.top_left else keys - problem.max_seqlen_q
    begin, end = 0, keys
    if problem.window_right is not None:
        end = min(keys, max(0, behind + offset + problem.window_right))
    if problem.window_left is not None:
        begin = min(end, max(0, first + offset - problem.window_left))
    return end - begin + min(problem.sink, begin)
