"""Estimates how long Hopper's forward takes for a call with tiles of a given shape, from how those tiles fill the SMs.

Each SM takes one tile after the other, the longest first. A few large tiles may leave most SMs idle in the last round. Smaller
tiles, which take more time for each row, fill it better. Times are in the unit of `tile_times`.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rawattn._call.problem import Problem
from rawattn._kernels.sm90 import line_estimate, query_tiles
from rawattn._kernels.sm90.forward_config import least_shared_keys, rows_of, shares_keys
from rawattn._kernels.sm90.line_estimate import Line
from rawattn._kernels.sm90.packed_lengths import possible_lengths
from rawattn._kernels.sm90.tile_heads import interleaves
from rawattn._kernels.sm90.tile_times import BEGIN_KEYS, PACES, TIMES, load, of_headdim

# Those for a block that has the few registers of blocks that share an SM, but has the SM to itself. Fewer blocks than may share
# it lie between.
_ALONE_ON_SM_PACES: dict[int, dict[tuple[int, int], float]] = {
    64: {(1, 48): 1.42, (1, 64): 1.2, (2, 48): 1.33},
    96: {(2, 32): 1.45},
    128: {(1, 64): 1.19, (1, 80): 1.19},
    256: {},
}
# Those under a left window, in place of `PACES`.
_WINDOW_PACES: dict[int, dict[tuple[int, int], float]] = {
    64: {
        **{(1, 48): 0.93, (1, 128): 1.07, (2, 48): 0.97},
        **{(2, 128): 1.07, (3, 128): 0.98, (4, 64): 0.93},
    },
    96: {(1, 128): 1.05, (2, 32): 0.82, (4, 48): 0.74},
    128: {(1, 64): 0.98, (1, 128): 0.98, (2, 128): 0.95, (3, 64): 0.95, (3, 80): 0.96},
    256: {(2, 48): 1.03, (2, 64): 0.96},
}
# Masking keys beyond the diagonal takes a tile as long as this fraction of another key tile.
_MASKED_TILES = 0.25
# Consumers without rows save this fraction of the time that the tile would save if it did not have them.
_IDLE_CONSUMER_SAVING = 0.63
# Consumers that share the keys of one that has rows: the time of a key over that in a tile with rows for all of them, by their
# number, and what merging takes, in keys.
_SHARED_PACES, _SHARED_MERGE_KEYS = {2: 0.505, 3: 0.37, 4: 0.315}, 40
# Such tiles lie among longer ones. So the last block may end later than if all ended at once, by this part of the longest tile.
_SHARED_WAIT = 0.3
# A block of a packed batch looks up the place of its first tile. If it has the SM to itself, nothing hides this much of that.
# `_WINDOW_PACES` were measured with it.
_LOOKUP_KEYS = 60
# The exponent by which products of whole tiles overlap reads from DRAM, from so many keys on. The times of tiles with fewer
# keys were measured with their reads.
_WHOLE_OVERLAP, _LEAST_OVERLAPPED_KEYS = 3.0, 1024
# What a call takes beside its tiles.
CALL_KEYS = 400
# Merging the items of unlike tiles makes a call longer by the time of this many keys.
_MERGE_KEYS = 1024
# With more tiles than this the schedule is not simulated, as the last round hardly matters.
_MOST_SIMULATED = 2048


def duration(
    problem: Problem,
    multiprocessors: int,
    fields: Mapping[str, Any],
    heads: int,
    blocks: int = 1,
    least: int = 0,
    enough: float = math.inf,
) -> float:
    """The estimated time of a call, in the module's unit.

    The geometric mean over the lengths that sequences of a packed batch may have (`packed_lengths`). Other sequences are
    taken to be as long as they may be, in pages too, as it is not known how many keys lie there.

    fields: of a row of the tile tables.
    heads: query heads whose rows share a tile.
    blocks: the most that an SM runs at once.
    least: the fewest key tiles of a piece where tiles are split by keys, 0 where none are. Of alike tiles those behind whole
    rounds are split, of unlike ones those that are longer than an equal share of all work.
    enough: a time beyond which only that it is beyond matters.
    """
    works = [
        _Work.of(whole, parts, multiprocessors, fields, heads, blocks)
        for whole, parts in possible_lengths(problem)
    ]

    def mean(times: Sequence[float]) -> float:
        return math.prod(times) ** (1 / len(times))

    if not least and (shortest := CALL_KEYS + mean([work.shortest for work in works])) > enough:
        return shortest
    return CALL_KEYS + mean([_duration(work, multiprocessors, fields, least) for work in works])


class _Work(NamedTuple):
    """The query tiles of a call whose lengths are known.

    parts: problems of equally long sequences that together are the call. tiles: pairs of a time and a count, longest first.
    workers: blocks that run at once. number, time: of all tiles. wait: before the first tile. heads: those whose rows share a
    tile.
    """

    problem: Problem
    parts: Sequence[Problem]
    tiles: Sequence[tuple[float, int]]
    workers: int
    number: int
    time: float
    wait: int
    heads: int
    shares: bool

    @classmethod
    def of(
        cls,
        problem: Problem,
        parts: Sequence[Problem],
        multiprocessors: int,
        fields: Mapping[str, Any],
        heads: int,
        blocks: int,
    ) -> _Work:
        rows = 64 * fields["consumers"]
        every = sum(query_tiles.count(part, rows, heads) for part in parts)
        most, blocks = blocks, max(1, min(blocks, -(-every // multiprocessors)))
        workers = multiprocessors * blocks

        def longest_first(at_once: int) -> list[tuple[float, int]]:
            counts: Counter[float] = Counter()
            for part in parts:
                for time, alike in _tiles(part, fields, heads, at_once, most):
                    counts[time] += alike
            return sorted(counts.items(), reverse=True)

        tiles = longest_first(blocks)
        number = sum(count for _, count in tiles)
        # Fewer blocks share an SM in the last round.
        last = number % workers
        if 0 < (at_last := -(-last // multiprocessors)) < blocks:
            shortest = _first(longest_first(at_last)[::-1], last)
            tiles = [*_first(tiles, number - last), *shortest[::-1]]
        packed = problem.packed and problem.pages is None and problem.window_left is None
        return cls(
            problem,
            parts,
            tiles=tiles,
            workers=workers,
            number=number,
            time=sum(time * count for time, count in tiles),
            wait=_LOOKUP_KEYS if packed and blocks == 1 else 0,
            heads=heads,
            shares=any(
                _shares_last(part, fields, heads) and part.max_seqlen_q > rows // heads
                for part in parts
            ),
        )

    @property
    def shortest(self) -> float:
        """A time that whole tiles cannot fall below."""
        return self.wait + max(self.tiles[0][0], self.time / self.workers) if self.tiles else 0.0


def _duration(work: _Work, multiprocessors: int, fields: Mapping[str, Any], least: int) -> float:
    problem, tiles, workers, every = work.problem, work.tiles, work.workers, work.number
    if every > _MOST_SIMULATED:
        return work.wait + work.time / workers + tiles[0][0] / 2
    if query_tiles.splits_by_length(problem):
        fair = work.time / workers
        if least and fair < tiles[0][0]:
            pace = of_headdim(TIMES, problem)[fields["consumers"]]
            begin = of_headdim(BEGIN_KEYS, problem)[fields["consumers"]]
            return fair + begin + _MERGE_KEYS * pace
        return work.wait + _end(tiles, workers)
    sharing = 0.0
    all_split = False
    if least:
        shape = fields["consumers"], fields["tile_k"], work.heads
        if share := line_estimate.last_share(problem, *shape, workers, least):
            lasts = problem.batch * problem.nheads_q // work.heads
            longs = (every - lasts) % workers
            all_split = longs + lasts == every
            tiles = _first(tiles, every - longs - lasts)
            length = longs + lasts * share / line_estimate.SHARES
            line = Line(problem, fields, longs + lasts, workers, least, all_split)
            sharing = line_estimate.of_weighed(line, length)
        elif rest := every % workers:
            all_split = rest == every
            tiles = _first(tiles, every - rest)
            line = Line(problem, fields, rest, workers, least, all_split)
            sharing = line_estimate.of_pieces(line)
    if all_split or not every:
        return work.wait + sharing
    products = _end(tiles, workers) + sharing
    if work.shares and not least:
        products = max(products, work.time / workers + _SHARED_WAIT * tiles[0][0])
    reading = sum(line_estimate.reading(part, every, every) for part in work.parts)
    reading /= multiprocessors
    if query_tiles.fewest_and_most_keys(problem)[1] >= _LEAST_OVERLAPPED_KEYS:
        return work.wait + line_estimate.overlapped(products, reading, _WHOLE_OVERLAP)
    return work.wait + (max(products, reading) if every <= workers else products)


def _first(tiles: Sequence[tuple[float, int]], left: int) -> list[tuple[float, int]]:
    """The first of these tiles. left: how many."""
    kept = []
    for time, count in tiles:
        kept.append((time, min(count, left)))
        left -= kept[-1][1]
    return kept


def _end(tiles: Sequence[tuple[float, int]], workers: int) -> float:
    """When the last of these tiles ends, each taken by the worker that is free first. tiles: pairs of a time and a count."""
    ends = [0.0] * workers
    for time, count in tiles:
        left = count
        while left:
            # All that are free before any of them has ended one of these tiles take one each; all workers do so repeatedly.
            taking = min(left, bisect.bisect_right(ends, ends[0] + time))
            rounds = left // workers if taking == workers else 1
            later = [end + rounds * time for end in ends[:taking]]
            ends = ends[taking:] + later
            ends.sort()
            left -= rounds * taking
    return ends[-1]


def _tiles(
    problem: Problem,
    fields: Mapping[str, Any],
    heads: int,
    blocks: int,
    most: int,
) -> list[tuple[float, int]]:
    """Pairs of a tile's time and how many tiles take it. blocks: that share an SM. most: that may, by their registers."""
    consumers, tile_k = fields["consumers"], fields["tile_k"]
    paces = PACES if problem.window_left is None else _WINDOW_PACES
    pace = of_headdim(paces, problem).get((consumers, tile_k), 1.0)
    if blocks < most:
        alone = of_headdim(_ALONE_ON_SM_PACES, problem).get((consumers, tile_k), 1.0)
        pace += (alone - pace) * (most - blocks) / (most - 1)
    times, begin = of_headdim(TIMES, problem), of_headdim(BEGIN_KEYS, problem)
    loading = blocks * load(problem)

    def line_of(busy: int) -> tuple[float, float]:
        """The time of a key, and that to begin, of a tile with so many busy consumers."""
        together = min(busy * blocks, max(times))
        return max(pace * times[together], loading), pace * begin[together]

    of_busy = [line_of(busy) for busy in range(1, consumers + 1)]
    per_key, beginning = of_busy[-1]
    key_tiles = query_tiles.key_tiles_met(problem, tile_k)
    rows = 64 * consumers // heads
    tiles = -(-problem.max_seqlen_q // rows)
    copies = query_tiles.count(problem, 64 * consumers, heads) / max(tiles, 1)
    masked = 0.0 if problem.window_right is None else _MASKED_TILES * tile_k
    # Where all queries see all keys, all tiles but the last are alike.
    alike = problem.window_left is None and problem.window_right is None and tiles > 1
    shares_last = _shares_last(problem, fields, heads)
    found = []
    for n, alike_ones in (
        [(0, tiles - 1), (tiles - 1, 1)] if alike else [(n, 1) for n in range(tiles)]
    ):
        first, behind = n * rows, min((n + 1) * rows, problem.max_seqlen_q)
        # The keys decide the time of a tile of several heads, however few rows it has, so all its consumers count as busy.
        busy = consumers if heads > 1 else -(-(behind - first) // 64)
        keys = tile_k * key_tiles(first, behind) + masked
        least = per_key * keys + beginning
        if shares_last and n == tiles - 1:
            least = per_key * (keys * _SHARED_PACES[consumers]) + beginning + _SHARED_MERGE_KEYS
        elif busy < consumers:
            alone = of_busy[busy - 1]
            least -= _IDLE_CONSUMER_SAVING * (least - (alone[0] * keys + alone[1]))
        found.append((least, alike_ones * max(1, round(copies))))
    return found


def _shares_last(problem: Problem, fields: Mapping[str, Any], heads: int) -> bool:
    """Whether consumers share the keys of the last query tile, as it has rows for one of them alone (`Config.shares_keys`)."""
    if problem.mask is not None or problem.bias is not None or problem.float8:
        return False
    rows = rows_of(fields["consumers"])
    last = (problem.max_seqlen_q - 1) % (rows // heads) + 1
    if last * heads > 64:
        return False
    least = least_shared_keys(problem.pages is not None)
    if query_tiles.fewest_and_most_keys(problem)[1] < least:
        return False
    apart = 1 if interleaves(problem, rows) else heads
    shape = fields["consumers"], fields.get("stages", 1), fields.get("cluster", 1)
    return shares_keys(*shape, apart)
