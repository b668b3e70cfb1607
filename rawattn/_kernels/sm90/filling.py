"""How long a call takes Hopper's forward with tiles of some shape, by how they fill the machine.

Each multiprocessor takes one tile after the other, the longest first. So a few large tiles may leave most of the machine idle
in the last round, where smaller ones, which are slower for the rows they have, would not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

from rawattn._call.problem import Problem

# The time for a key of a tile, over two consumers', and the time of so many keys that beginning and ending one takes: where a
# multiprocessor has so many consumers, of all its blocks. They share the tensor cores and the exponentials, and a lone one has
# neither to itself while it does the other. By head dim, up to so many (docs/notes/hopper-forward.md).
_TIMES = {
    64: {1: 0.69, 2: 1.0, 3: 1.22, 4: 1.81},
    96: {1: 0.7, 2: 1.0, 3: 1.45, 4: 2.0},
    128: {1: 0.77, 2: 1.0, 3: 1.31, 4: 1.9},
    256: {1: 0.71, 2: 1.0, 3: 1.31, 4: 1.9},
}
_BEGIN_KEYS = {
    64: {1: 135, 2: 194, 3: 265, 4: 290},
    96: {1: 120, 2: 231, 3: 324, 4: 475},
    128: {1: 121, 2: 240, 3: 265, 4: 300},
    256: {1: 150, 2: 240, 3: 265, 4: 300},
}
# What tiles of so many consumers and keys were measured to take over the rule's time, likewise; others take the rule's.
_PACES: dict[int, dict[tuple[int, int], float]] = {64: {(1, 48): 1.1, (2, 48): 0.95}, 256: {}}
# Likewise where a block that is made to share a multiprocessor, and has few registers, has it to itself.
_LONE_PACES: dict[int, dict[tuple[int, int], float]] = {
    64: {(2, 48): 1.45, (1, 48): 1.45},
    96: {(2, 32): 1.65},
    256: {},
}
# What hiding keys behind the diagonal takes, likewise.
_MASKED_KEYS = 16
# Of a tile's time the part that consumers without rows save as if they were not there.
_SPARED = 0.56
# What merging the items of unlike tiles adds to a call, likewise in keys.
_MERGE_KEYS = 1024
# Of tiles that are shared out, in keys likewise: what comes to the time of a piece; for each item of a tile, one after the
# other; and for 64 rows of each item of the call, since all of them go through the L2 cache.
_SHARE_KEYS = 150
ITEM_KEYS = 50
_PARTIAL_KEYS = 1.5
# How well products and what comes from DRAM meanwhile overlap: infinite where the longer of them is all that counts.
_OVERLAP = 3
_HARDLY_LONGER = 2  # key tiles of pieces, where each tile has as many
# The time for a key that all multiprocessors read from DRAM, over two consumers' likewise, and bytes that stay in the L2
# cache until others want them.
_MEMORY_TIMES = {64: 0.85, 96: 1.2, 128: 1.45, 256: 1.65}
_CACHED_BYTES = 40 << 20
# How long the shortest query tile must be over the longest for them to be alike.
ALIKE = 0.75
# Of more tiles the last round says little.
_MOST_SIMULATED = 2048


def duration(
    problem: Problem,
    multiprocessors: int,
    fields: Mapping[str, Any],
    heads: int,
    blocks: int = 1,
    least: int = 0,
) -> float:
    """In the time that a tile of two consumers takes for a key.

    fields: of a row of the tile tables; heads: whose rows share a tile; blocks: that a multiprocessor runs at once;
    least: key tiles of a piece, where the tiles behind whole rounds are shared out by keys, or of unlike ones all that are
    longer than is fair; 0: none are. Sequences are taken to be as long as they may be.
    """
    rows = 64 * fields["consumers"]
    most, blocks = blocks, max(1, min(blocks, -(-count(problem, rows, heads) // multiprocessors)))
    tiles = _tiles(problem, fields, heads, blocks, lone=blocks == 1 < most)
    workers = multiprocessors * blocks
    times = [time for time, count in tiles for _ in range(count)]  # from the longest on
    if len(times) > _MOST_SIMULATED:
        return sum(times) / workers + times[0] / 2
    sharing = 0.0
    idle = 0 < len(times) <= workers and not by_length(problem)
    if idle and not least:
        return max(times[0], _reading(problem, len(times), Fraction(1)) / multiprocessors)
    if least and by_length(problem):
        fair = sum(times) / workers
        if fair < times[0]:
            pace = _of_headdim(_TIMES, problem)[fields["consumers"]]
            begin = _of_headdim(_BEGIN_KEYS, problem)[fields["consumers"]]
            return fair + begin + _MERGE_KEYS * pace
    elif least and (rest := len(times) % workers):
        times[-rest:] = []
        sharing = _of_pieces(problem, fields, rest, workers, least, idle)
    ends = [0.0] * workers
    for time in times:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends) + sharing


def pieces_of(tiles: int, keys: int, workers: int, least: int) -> int:
    """Into how many pieces so many tiles of so many key tiles are cut; no more than tiles where it does not pay.

    The same sums as the kernel's for ragged batches (kernels_cu/attn/schedule/stream_k.cuh).
    """
    pieces = min(tiles * keys // least, workers)
    even = pieces // max(tiles, 1) * tiles
    if even and -(-tiles * keys // even) <= -(-tiles * keys // pieces) + _HARDLY_LONGER:
        return even
    return pieces


def _of_pieces(
    problem: Problem,
    fields: Mapping[str, Any],
    tiles: int,
    workers: int,
    least: int,
    all_of_them: bool,
) -> float:
    """Of tiles in one line, cut into pieces for all workers. all_of_them: there are no others, whose keys these would read."""
    consumers: int = fields["consumers"]
    tile_k: int = fields["tile_k"]
    keys = -(-extremes(problem)[1] // tile_k)
    pieces = pieces_of(tiles, keys, workers, least)
    if pieces <= tiles:
        return math.inf
    pace = _of_headdim(_PACES, problem).get((consumers, tile_k), 1.0)
    pace *= _of_headdim(_TIMES, problem)[consumers]
    begin = _of_headdim(_BEGIN_KEYS, problem)[consumers]
    # A piece that ends in the next tile is two items.
    uneven = pieces % tiles > 0
    of_tile, items = Fraction(pieces, tiles), pieces + uneven * (tiles - 1)
    products = pace * -(-tiles * keys // pieces) * tile_k
    reading = 0.0
    if all_of_them:
        reading = _reading(problem, tiles, of_tile) / workers
    merging = ITEM_KEYS * (float(of_tile) + 1) + _PARTIAL_KEYS * consumers * items
    busy: float = (products**_OVERLAP + reading**_OVERLAP) ** (1 / _OVERLAP)
    return busy + begin * (1 + uneven) + _SHARE_KEYS + merging


def _reading(problem: Problem, tiles: int, pieces: Fraction) -> float:
    """Of what comes from DRAM, by one multiprocessor. pieces: of a tile.

    Tiles of the same keys read them together, unless pieces begin elsewhere in each, and too far apart for the L2 cache.
    """
    keys, streams = extremes(problem)[1], problem.batch * problem.nheads_kv
    together = tiles / streams
    key_bytes = (problem.headdim + problem.headdim_v) * (1 if problem.float8 else 2)
    apart = min(1.0, float(abs(pieces - round(pieces))) * (together - 1)) * keys
    times = (
        1.0 if apart * streams * key_bytes <= _CACHED_BYTES else min(together, pieces.denominator)
    )
    pace: float = _of_headdim(_MEMORY_TIMES, problem)
    return keys * streams * times * pace / (2 if problem.float8 else 1)


def alike(problem: Problem) -> bool:
    """Whether query tiles have about as many keys as each other: pieces of unlike tiles are unlike themselves."""
    shortest, longest = extremes(problem)
    return shortest >= ALIKE * longest


def by_length(problem: Problem) -> bool:
    """Whether query tiles that are shared out count by their keys, unlike as they are: in dense causal batches."""
    left, right = problem.window_left, problem.window_right
    return not problem.ragged and left is None and right is not None and not alike(problem)


def key_tiles(problem: Problem, rows: int, tile_k: int) -> list[int]:
    """Of each query tile of so many rows, from the last one on; one at least."""
    last = problem.max_seqlen_q
    visible = (_visible(problem, n, min(n + rows, last)) for n in range(0, last, rows))
    return [max(1, -(-keys // tile_k)) for keys in visible][::-1]


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
    problem: Problem, fields: Mapping[str, Any], heads: int, blocks: int, lone: bool
) -> list[tuple[float, int]]:
    """The time of a tile, and how many there are of it, from the longest on."""
    consumers, tile_k = fields["consumers"], fields["tile_k"]
    paces = _LONE_PACES if lone else _PACES
    pace = _of_headdim(paces, problem).get((consumers, tile_k), 1.0)
    times, begin = _of_headdim(_TIMES, problem), _of_headdim(_BEGIN_KEYS, problem)

    def time_of(consumers: int, keys: int) -> float:
        together = min(consumers * blocks, max(times))
        return times[together] * keys + begin[together]

    rows = 64 * consumers // heads
    tiles = -(-problem.max_seqlen_q // rows)
    copies = count(problem, 64 * consumers, heads) / max(tiles, 1)
    masked = 0 if problem.window_right is None else _MASKED_KEYS
    found = []
    for n in range(tiles):
        first, behind = n * rows, min((n + 1) * rows, problem.max_seqlen_q)
        # Tiles of several heads are bound by their keys, however few rows they have.
        busy = consumers if heads > 1 else -(-(behind - first) // 64)
        keys = -(-_visible(problem, first, behind) // tile_k) * tile_k + masked
        time, alone = time_of(consumers, keys), time_of(busy, keys)
        found.append((pace * (time - _SPARED * (time - alone)), max(1, round(copies))))
    return sorted(found, reverse=True)


_T = TypeVar("_T")


def _of_headdim(table: Mapping[int, _T], problem: Problem) -> _T:
    headdim = max(problem.headdim, problem.headdim_v)
    return next(found for most, found in table.items() if headdim <= most)


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


def averaged(problem: Problem) -> Problem:
    """A packed batch whose sequences are equally long."""
    q, k = (-(-rows // max(problem.batch, 1)) for rows in (problem.rows_q, problem.rows_k))
    return replace(
        problem,
        max_seqlen_q=min(q, problem.max_seqlen_q),
        max_seqlen_k=min(k, problem.max_seqlen_k),
    )
