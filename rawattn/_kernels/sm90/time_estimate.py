"""Estimates how long Hopper's forward takes for a call with tiles of a given shape, from how those tiles fill the SMs.

Each SM takes one tile after the other, the longest first. A few large tiles may leave most SMs idle in the last round. Smaller
tiles, which take more time for each row, fill it better.

All times are in one unit: the time that a tile of two consumers (128 rows) takes for one key.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rawattn._call.problem import Problem
from rawattn._kernels.sm90.packed_lengths import possible_lengths

# These tables are indexed by the largest head dim that a line serves, then by the consumers of all blocks that an SM runs at
# once. Consumers share the tensor cores and the special function units; one consumer alone leaves one idle while it uses the
# other. Measured: docs/notes/hopper-forward.md.
# The time for one key of a tile.
_TIMES = {
    64: {1: 0.69, 2: 1.0, 3: 1.22, 4: 1.81},
    96: {1: 0.7, 2: 1.0, 3: 1.45, 4: 2.0},
    128: {1: 0.77, 2: 1.0, 3: 1.31, 4: 1.9},
    256: {1: 0.71, 2: 1.0, 3: 1.31, 4: 1.9},
}
# The time to begin and end a tile.
_BEGIN_KEYS = {
    64: {1: 135, 2: 194, 3: 265, 4: 290},
    96: {1: 120, 2: 231, 3: 324, 4: 475},
    128: {1: 121, 2: 240, 3: 265, 4: 300},
    256: {1: 150, 2: 240, 3: 265, 4: 300},
}
# Corrections by head dim, then by (consumers, tile_k): the measured time over the estimated one. Shapes not listed have 1.
_PACES: dict[int, dict[tuple[int, int], float]] = {64: {(1, 48): 1.1, (2, 48): 0.95}, 256: {}}
# The same for a block that has the few registers of blocks that share an SM, but has the SM to itself.
_ALONE_ON_SM_PACES: dict[int, dict[tuple[int, int], float]] = {
    64: {(1, 48): 1.45, (1, 64): 1.25, (2, 48): 1.45},
    96: {(2, 32): 1.65},
    256: {},
}
# Those under a left window, in place of `_PACES`.
_WINDOW_PACES: dict[int, dict[tuple[int, int], float]] = {
    64: {(1, 48): 0.94},
    96: {(2, 32): 0.8},
    256: {},
}
# Masking keys beyond the diagonal takes a tile as long as this many more keys.
_MASKED_KEYS = 16
# Consumers without rows save this fraction of the time that the tile would save if it did not have them.
_IDLE_CONSUMER_SAVING = 0.56
# A block of a packed batch looks up the place of its first tile. If it has the SM to itself, nothing hides this much of that.
# `_WINDOW_PACES` were measured with it.
_LOOKUP_KEYS = 60
# Merging the items of unlike tiles makes a call longer by the time of this many keys.
_MERGE_KEYS = 1024
# Where tiles are split by keys, in keys:
# what a piece takes beside its own keys and its beginning;
_PIECE_COST_KEYS = 150
# what each item of a query tile takes to be merged, one after the other;
ITEM_MERGE_COST_KEYS = 50
# what 64 rows of each item of the call take, since all partial results go through the L2 cache.
_PARTIAL_TRAFFIC_KEYS = 1.5
# The exponent p of (products^p + reading^p)^(1/p), the time of products that overlap reads from DRAM. An infinite p would mean
# that the longer of the two hides the other wholly.
_OVERLAP_EXPONENT = 3
# Key tiles by which pieces may be longer where every query tile then has equally many of them.
_HARDLY_LONGER = 2
LAST_SHARES = 64
# What a query tile of three consumers counts in a line, in 64ths, by the number of consumers that have rows. With two of them,
# and between these head dims, weighing loses.
_LAST_SHARES = {1: 42, 2: 50}
_WEIGHED_HEADDIMS = ((1, 64), (97, 128))
# Lines are weighed only where that saves this fraction of all tiles, where at least so many tiles for each worker let pieces be
# few, and from so many keys on.
_LEAST_SAVING = 0.03
_LEAST_WEIGHED = 0.25
_LEAST_WEIGHED_KEYS = 8192
# The time for a key that is read from DRAM on behalf of all SMs, by the largest head dim, in 16-bit elements.
_DRAM_TIMES = {64: 0.85, 96: 1.2, 128: 1.45, 256: 1.65}
# Bytes of keys and values that stay in the L2 cache until other blocks read them.
_CACHED_BYTES = 40 << 20
# Query tiles are alike if the shortest has at least this fraction of the longest one's keys.
ALIKE = 0.75
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

    if not least and (shortest := mean([work.shortest for work in works])) > enough:
        return shortest
    return mean([_duration(work, multiprocessors, fields, least) for work in works])


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
        every = sum(count(part, rows, heads) for part in parts)
        most, blocks = blocks, max(1, min(blocks, -(-every // multiprocessors)))
        alone_on_sm = blocks == 1 < most
        packed = problem.packed and problem.pages is None and problem.window_left is None
        counts: Counter[float] = Counter()
        for part in parts:
            for time, alike in _tiles(part, fields, heads, blocks, alone_on_sm):
                counts[time] += alike
        return cls(
            problem,
            parts,
            tiles=sorted(counts.items(), reverse=True),
            workers=multiprocessors * blocks,
            number=counts.total(),
            time=sum(time * alike for time, alike in counts.items()),
            wait=_LOOKUP_KEYS if packed and blocks == 1 else 0,
            heads=heads,
        )

    @property
    def shortest(self) -> float:
        """A time that whole tiles cannot fall below."""
        return self.wait + max(self.tiles[0][0], self.time / self.workers) if self.tiles else 0.0


def _duration(work: _Work, multiprocessors: int, fields: Mapping[str, Any], least: int) -> float:
    problem, tiles, workers, every = work.problem, work.tiles, work.workers, work.number
    if every > _MOST_SIMULATED:
        return work.wait + work.time / workers + tiles[0][0] / 2
    sharing = 0.0
    idle = 0 < every <= workers and not splits_by_length(problem)
    if idle and not least:
        reading = sum(_reading(part, every, every) for part in work.parts) / multiprocessors
        return work.wait + max(tiles[0][0], reading)
    if least and splits_by_length(problem):
        fair = work.time / workers
        if fair < tiles[0][0]:
            pace = _of_headdim(_TIMES, problem)[fields["consumers"]]
            begin = _of_headdim(_BEGIN_KEYS, problem)[fields["consumers"]]
            return fair + begin + _MERGE_KEYS * pace
    elif least:
        shape = fields["consumers"], fields["tile_k"], work.heads
        if share := last_share(problem, *shape, workers, least):
            lasts = problem.batch * problem.nheads_q // work.heads
            longs = (every - lasts) % workers
            tiles = _without_last(tiles, longs + lasts)
            length = longs + lasts * share / LAST_SHARES
            number, all_of_them = longs + lasts, longs + lasts == every
            sharing = _of_weighed(problem, fields, number, workers, least, all_of_them, length)
        elif rest := every % workers:
            tiles = _without_last(tiles, rest)
            sharing = _of_pieces(problem, fields, rest, workers, least, idle)
    return work.wait + _end(tiles, workers) + sharing


def _without_last(tiles: Sequence[tuple[float, int]], behind: int) -> list[tuple[float, int]]:
    """All but the last of these tiles. behind: how many to leave out."""
    left = sum(count for _, count in tiles) - behind
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


def pieces_of(tiles: int, keys: int, workers: int, least: int) -> int:
    """The number of pieces that `tiles` query tiles of `keys` key tiles each are cut into.

    A result of no more than `tiles` says that cutting does not pay. The kernel computes the same for ragged batches
    (kernels_cu/attn/schedule/stream_k.cuh).
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
    """The time of query tiles that form a line, which is cut into pieces for all workers.

    all_of_them: the call has no other tiles. Otherwise those are taken to have brought the same keys to the L2 cache.
    """
    tile_k: int = fields["tile_k"]
    keys = -(-fewest_and_most_keys(problem)[1] // tile_k)
    pieces = pieces_of(tiles, keys, workers, least)
    if pieces <= tiles:
        return math.inf
    products = _pace(problem, fields) * -(-tiles * keys // pieces) * tile_k
    reading = _reading(problem, tiles, pieces) / workers if all_of_them else 0.0
    return _overlapped(products, reading) + _beside_keys(problem, fields, tiles, pieces)


def _of_weighed(
    problem: Problem,
    fields: Mapping[str, Any],
    tiles: int,
    workers: int,
    least: int,
    all_of_them: bool,
    length: float,
) -> float:
    """The same of a line that weighs last tiles. length: of the line, where another tile counts 1.

    Last tiles come behind the others of all heads, so their keys are read from DRAM again, beside the products.
    """
    tile_k: int = fields["tile_k"]
    keys = -(-fewest_and_most_keys(problem)[1] // tile_k)
    if length * keys < least * workers:
        return math.inf
    products = _pace(problem, fields) * math.ceil(length * keys / workers) * tile_k
    if all_of_them:
        busy = _overlapped(products, _reading(problem, tiles, workers) / workers)
    else:
        busy = max(products, _reading(problem, 1, 1) / workers)
    return busy + _beside_keys(problem, fields, tiles, workers)


def _overlapped(products: float, reading: float) -> float:
    """The time of products that overlap reads from DRAM."""
    both = products**_OVERLAP_EXPONENT + reading**_OVERLAP_EXPONENT
    return float(both ** (1 / _OVERLAP_EXPONENT))


def _pace(problem: Problem, fields: Mapping[str, Any]) -> float:
    """The time for one key of a query tile in a line."""
    shape = fields["consumers"], fields["tile_k"]
    pace = _of_headdim(_PACES, problem).get(shape, 1.0)
    return pace * _of_headdim(_TIMES, problem)[fields["consumers"]]


def _beside_keys(problem: Problem, fields: Mapping[str, Any], tiles: int, pieces: int) -> float:
    """What a line takes beside its keys: to begin pieces and query tiles, and to merge."""
    consumers: int = fields["consumers"]
    begin = _of_headdim(_BEGIN_KEYS, problem)[consumers]
    # A piece that begins in one query tile and ends in the next is two items.
    uneven = pieces % tiles > 0
    items = pieces + uneven * (tiles - 1)
    merging = (
        ITEM_MERGE_COST_KEYS * (pieces / tiles + 1) + _PARTIAL_TRAFFIC_KEYS * consumers * items
    )
    return begin * (1 + uneven) + _PIECE_COST_KEYS + merging


def _reading(problem: Problem, tiles: int, pieces: int) -> float:
    """The time to read keys and values from DRAM, if one SM did it all. pieces: of all query tiles.

    Tiles with the same keys read them from DRAM once, together. If their pieces begin at different keys, so far apart that the
    keys between do not fit the L2 cache, each reads them for itself.
    """
    keys, streams = fewest_and_most_keys(problem)[1], problem.batch * problem.nheads_kv
    together = tiles / streams
    key_bytes = (problem.headdim + problem.headdim_v) * (1 if problem.float8 else 2)
    # Pieces of a query tile begin `uneven` from a whole number of pieces, at `beginnings` different keys.
    rest = pieces % tiles
    uneven, beginnings = min(rest, tiles - rest) / tiles, tiles // math.gcd(pieces, tiles)
    apart = min(1.0, uneven * (together - 1)) * keys
    times = 1.0 if apart * streams * key_bytes <= _CACHED_BYTES else min(together, beginnings)
    pace: float = _of_headdim(_DRAM_TIMES, problem)
    return keys * streams * times * pace / (2 if problem.float8 else 1)


def last_share(
    problem: Problem, consumers: int, tile_k: int, heads: int, workers: int, least: int
) -> int:
    """What the last query tile of each head counts in a line of split tiles, in 64ths of another tile (`LAST_SHARES`).

    0 where it counts as much as others and comes among them: all of its consumers have rows, or weighing is not known to pay.

    heads: those whose rows share a tile. workers: blocks that run at once. least: the fewest key tiles of a piece.
    """
    if consumers != 3 or problem.packed or problem.mask is not None or problem.float8:
        return 0
    if not problem.plain_scores or problem.window_left is not None:
        return 0
    wide = max(problem.headdim, problem.headdim_v)
    if not any(low <= wide <= high for low, high in _WEIGHED_HEADDIMS):
        return 0
    tiles, rest = divmod(problem.max_seqlen_q, 64 * consumers // heads)
    share = _LAST_SHARES.get(-(-rest * heads // 64), 0) if tiles else 0
    pays = share and _weighing_pays(problem, tile_k, heads, tiles, share, workers, least)
    return share if pays else 0


def _weighing_pays(
    problem: Problem, tile_k: int, heads: int, tiles: int, share: int, workers: int, least: int
) -> bool:
    """Whether a line is expected to end earlier if last tiles count `share`. tiles: of each head, but for the last one."""
    lasts = problem.batch * problem.nheads_q // heads
    longest = fewest_and_most_keys(problem)[1]
    if longest < _LEAST_WEIGHED_KEYS or lasts * (tiles + 1) < _LEAST_WEIGHED * workers:
        return False
    if LAST_SHARES - share < _LEAST_SAVING * LAST_SHARES * (tiles + 1) or not alike(problem):
        return False
    fields = {"consumers": 3, "tile_k": tile_k}
    whole = _of_headdim(_TIMES, problem)[3] * longest + _of_headdim(_BEGIN_KEYS, problem)[3]
    rounds, longs = divmod(lasts * tiles, workers)
    length = longs + lasts * share / LAST_SHARES
    weighed = rounds * whole
    weighed += _of_weighed(problem, fields, longs + lasts, workers, least, rounds == 0, length)
    rounds, behind = divmod(lasts * (tiles + 1), workers)
    pieces = 0.0
    if behind:
        pieces = min(whole, _of_pieces(problem, fields, behind, workers, least, rounds == 0))
    return weighed < rounds * whole + pieces


def alike(problem: Problem) -> bool:
    """Whether query tiles have about as many keys as each other. If not, equal parts of tiles would not be equally long."""
    shortest, longest = fewest_and_most_keys(problem)
    return shortest >= ALIKE * longest


def splits_by_length(problem: Problem) -> bool:
    """Whether query tiles that are split are as long in the line as they have keys: unlike ones of dense causal batches."""
    left, right = problem.window_left, problem.window_right
    return not problem.ragged and left is None and right is not None and not alike(problem)


def key_tiles(problem: Problem, rows: int, tile_k: int) -> list[int]:
    """The number of key tiles of each query tile of `rows` rows, at least 1, from the last query tile to the first."""
    last = problem.max_seqlen_q
    visible = (_visible(problem, n, min(n + rows, last)) for n in range(0, last, rows))
    return [max(1, -(-keys // tile_k)) for keys in visible][::-1]


def fewest_and_most_keys(problem: Problem) -> tuple[int, int]:
    """The fewest and the most keys of a query tile, as if tiles had one row: those that the first and the last row see."""
    last = max(problem.max_seqlen_q - 1, 0)
    found = [_visible(problem, row, row + 1) for row in (0, last)]
    return min(found), max(found)


def count(problem: Problem, rows: int, heads: int) -> int:
    """The number of query tiles of a call, for tiles of `rows` rows that `heads` query heads share."""
    each = -(-problem.max_seqlen_q // (rows // heads))
    if problem.packed:
        each = min(problem.batch * each, problem.rows_q // (rows // heads) + problem.batch)
    return each * (1 if problem.packed else problem.batch) * (problem.nheads_q // heads)


def _tiles(
    problem: Problem,
    fields: Mapping[str, Any],
    heads: int,
    blocks: int,
    alone_on_sm: bool,
) -> list[tuple[float, int]]:
    """Pairs of a tile's time and how many tiles take it. alone_on_sm: see `_ALONE_ON_SM_PACES`."""
    consumers, tile_k = fields["consumers"], fields["tile_k"]
    paces = _PACES if problem.window_left is None else _WINDOW_PACES
    paces = _ALONE_ON_SM_PACES if alone_on_sm else paces
    pace = _of_headdim(paces, problem).get((consumers, tile_k), 1.0)
    times, begin = _of_headdim(_TIMES, problem), _of_headdim(_BEGIN_KEYS, problem)

    def time_of(consumers: int, keys: int) -> float:
        together = min(consumers * blocks, max(times))
        return times[together] * keys + begin[together]

    rows = 64 * consumers // heads
    tiles = -(-problem.max_seqlen_q // rows)
    copies = count(problem, 64 * consumers, heads) / max(tiles, 1)
    masked = 0 if problem.window_right is None else _MASKED_KEYS
    # Where all queries see all keys, all tiles but the last are alike.
    alike = problem.window_left is None and problem.window_right is None and tiles > 1
    found = []
    for n, alike_ones in (
        [(0, tiles - 1), (tiles - 1, 1)] if alike else [(n, 1) for n in range(tiles)]
    ):
        first, behind = n * rows, min((n + 1) * rows, problem.max_seqlen_q)
        # The keys decide the time of a tile of several heads, however few rows it has, so all its consumers count as busy.
        busy = consumers if heads > 1 else -(-(behind - first) // 64)
        keys = tile_k * _key_tiles(problem, first, behind, tile_k) + masked
        time, alone = time_of(consumers, keys), time_of(busy, keys)
        saved = _IDLE_CONSUMER_SAVING * (time - alone)
        found.append((pace * (time - saved), alike_ones * max(1, round(copies))))
    return found


_T = TypeVar("_T")


def _of_headdim(table: Mapping[int, _T], problem: Problem) -> _T:
    headdim = max(problem.headdim, problem.headdim_v)
    for most, found in table.items():
        if headdim <= most:
            return found
    raise ValueError(f"no line for head dim {headdim}")


def _visible(problem: Problem, first: int, behind: int) -> int:
    """The number of keys that at least one of the query rows [first, behind) sees."""
    begin, end = _seen(problem, first, behind)
    return end - begin + min(problem.sink, begin)


def _key_tiles(problem: Problem, first: int, behind: int, tile_k: int) -> int:
    """The number of key tiles with such keys."""
    begin, end = _seen(problem, first, behind)
    begin //= tile_k
    return -(-end // tile_k) - begin + min(-(-problem.sink // tile_k), begin)


def _seen(problem: Problem, first: int, behind: int) -> tuple[int, int]:
    """The keys in a window of the query rows [first, behind): the first, and the one behind the last."""
    keys = problem.max_seqlen_k
    offset = 0 if problem.top_left else keys - problem.max_seqlen_q
    begin, end = 0, keys
    if problem.window_right is not None:
        end = min(keys, max(0, behind + offset + problem.window_right))
    if problem.window_left is not None:
        begin = min(end, max(0, first + offset - problem.window_left))
    return begin, end
