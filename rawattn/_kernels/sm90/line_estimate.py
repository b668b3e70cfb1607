"""Estimates how long query tiles take that form a line and are split by keys (attn/schedule/stream_k.cuh).

Times are in the unit of `tile_times`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rawattn._call.problem import Problem
from rawattn._kernels.sm90 import query_tiles
from rawattn._kernels.sm90.forward_config import first_has_first_rows, rows_of
from rawattn._kernels.sm90.tile_heads import interleaves
from rawattn._kernels.sm90.tile_times import BEGIN_KEYS, PACES, TIMES, load, of_headdim

# Where tiles are split by keys, in keys:
# what a piece takes beside its own keys and its beginning;
_PIECE_COST_KEYS = 260
# what each item of a query tile takes to be merged, one after the other;
ITEM_MERGE_COST_KEYS = 50
# what 64 rows of each item of the call take, since all partial results go through the L2 cache.
_PARTIAL_TRAFFIC_KEYS = 0.6
# What it counts in a line that a piece goes on in the next query tile, in keys.
ITEM_KEYS = 350
_PIECES_OVERLAP = 4.5  # exponent of `overlapped`
# Key tiles by which pieces may be longer where every query tile then has equally many of them.
_HARDLY_LONGER = 2
SHARES = 64  # in which a line counts a key tile
# What a query tile of three consumers counts in a line, in 64ths, by the largest head dim and the number of consumers that have
# rows. Where none is given, and of tiles of two consumers, weighing loses. At head dim 128 all consumers share the keys of one
# that has rows (`Config.shares_keys`). In pages their keys come later.
_LAST_SHARES: dict[int, dict[int, int]] = {64: {1: 46, 2: 54}, 96: {}, 128: {1: 28, 2: 50}, 256: {}}
_LAST_SHARES_PAGED = {**_LAST_SHARES, 128: {1: 30, 2: 50}}
# Lines are weighed only where that saves this fraction of all tiles, where at least so many tiles for each worker let pieces be
# few, and from so many keys on.
_LEAST_SAVING = 0.03
_LEAST_WEIGHED = 0.25
_LEAST_WEIGHED_KEYS = 4096
# The time for a key that is read from DRAM on behalf of all SMs, by the largest head dim, in 16-bit elements.
_DRAM_TIMES = {64: 0.87, 96: 1.17, 128: 1.67, 256: 1.76}
# Bytes of keys and values that stay in the L2 cache until other blocks read them: half of it, since SMs of both halves of the
# GPU read them.
_CACHED_BYTES = 24 << 20
# Of the keys that others have read before, further apart than that, the fraction that is read from DRAM again.
_READ_AGAIN = 0.4
_LINE_BYTES = 128  # of a line of the L2 cache


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


class Line(NamedTuple):
    """Query tiles that form a line.

    fields: of the tile table's row. workers: blocks that run at once. least: the fewest key tiles of a piece. all_of_them: the
    call has no other tiles. Otherwise those are taken to have brought the same keys to the L2 cache.
    """

    problem: Problem
    fields: Mapping[str, Any]
    tiles: int
    workers: int
    least: int
    all_of_them: bool

    @property
    def key_tiles(self) -> int:
        """Key tiles of a query tile, at most."""
        return query_tiles.most_key_tiles(self.problem, self.fields["tile_k"])


def best_pieces(line: Line) -> int:
    """The number of pieces that a line is cut into.

    Where heads share cache lines, pieces that begin together may end sooner than as many as there are workers. Ragged batches
    are cut on the GPU, which does not weigh that.
    """
    pieces = pieces_of(line.tiles, line.key_tiles, line.workers, line.least)
    together = pieces // max(line.tiles, 1) * line.tiles
    if line.problem.ragged or not _heads_share_lines(line.problem) or together <= line.tiles:
        return pieces
    return min(pieces, together, key=functools.partial(_of_number, line))


def of_pieces(line: Line) -> float:
    """The time of a line that is cut into pieces for all workers."""
    pieces = best_pieces(line)
    return _of_number(line, pieces) if pieces > line.tiles else math.inf


def _of_number(line: Line, pieces: int) -> float:
    """`of_pieces` of so many pieces."""
    products = _products(line, -(-line.tiles * line.key_tiles // pieces))
    from_dram = 0.0
    if line.all_of_them:
        from_dram = reading(line.problem, line.tiles, pieces) / line.workers
    return overlapped(products, from_dram, _PIECES_OVERLAP) + _beside_keys(line, pieces)


def of_weighed(line: Line, length: float) -> float:
    """The time of a line that weighs last tiles. length: of the line, where another tile counts 1.

    Last tiles come behind the others of all heads, so their keys are read from DRAM again, beside the products.
    """
    problem, workers = line.problem, line.workers
    if length * line.key_tiles < line.least * workers:
        return math.inf
    products = _products(line, math.ceil(length * line.key_tiles / workers))
    if line.all_of_them:
        from_dram = reading(problem, line.tiles, workers) / workers
        busy = overlapped(products, from_dram, _PIECES_OVERLAP)
    else:
        busy = max(products, reading(problem, 1, 1) / workers)
    return busy + _beside_keys(line, workers)


def overlapped(products: float, reading: float, exponent: float) -> float:
    """The time of products that overlap reads from DRAM.

    If the exponent were infinite, the longer of the two would hide the other wholly.
    """
    return float((products**exponent + reading**exponent) ** (1 / exponent))


def _products(line: Line, key_tiles: int) -> float:
    """The time of a piece of so many key tiles, if nothing else took longer."""
    consumers, tile_k = line.fields["consumers"], line.fields["tile_k"]
    pace = of_headdim(PACES, line.problem).get((consumers, tile_k), 1.0)
    pace = max(pace * of_headdim(TIMES, line.problem)[consumers], load(line.problem))
    return float(pace * key_tiles * tile_k)


def _beside_keys(line: Line, pieces: int) -> float:
    """What a line takes beside its keys: to begin pieces and query tiles, and to merge."""
    consumers, tiles = line.fields["consumers"], line.tiles
    begin: int = of_headdim(BEGIN_KEYS, line.problem)[consumers]
    # A piece that begins in one query tile and ends in the next is two items.
    uneven = pieces % tiles > 0
    items = pieces + uneven * (tiles - 1)
    traffic: float = _PARTIAL_TRAFFIC_KEYS * consumers * items
    merging = ITEM_MERGE_COST_KEYS * (pieces / tiles + 1) + traffic
    return begin * (1 + uneven) + _PIECE_COST_KEYS + merging


def reading(problem: Problem, tiles: int, pieces: int) -> float:
    """The time to read keys and values from DRAM, if one SM did it all. pieces: of all query tiles.

    Tiles with the same keys read them from DRAM once, together. If their pieces begin at different keys, so far apart that the
    keys between do not fit the L2 cache, others read many of them again. Heads that share cache lines then do so, too, where
    the keys of all heads do not fit.
    """
    keys, streams = query_tiles.fewest_and_most_keys(problem)[1], problem.batch * problem.nheads_kv
    together = tiles / streams
    key_bytes = (problem.headdim + problem.headdim_v) * (1 if problem.float8 else 2)
    # Pieces of a query tile begin `uneven` from a whole number of pieces, at `beginnings` different keys.
    rest = pieces % tiles
    uneven, beginnings = min(rest, tiles - rest) / tiles, tiles // math.gcd(pieces, tiles)
    apart = min(1.0, uneven * (together - 1)) * keys
    times = 1.0
    if apart * streams * key_bytes > _CACHED_BYTES:
        times += _READ_AGAIN * (min(together, beginnings) - 1)
    if rest and _heads_share_lines(problem) and keys * streams * key_bytes > 2 * _CACHED_BYTES:
        times *= 2
    pace: float = of_headdim(_DRAM_TIMES, problem)
    return keys * streams * times * pace / (2 if problem.float8 else 1)


def _heads_share_lines(problem: Problem) -> bool:
    """Whether keys or values of neighbouring heads lie in the same cache lines."""
    itemsize = 1 if problem.float8 else 2
    dims = problem.headdim, problem.headdim_v
    return problem.nheads_kv > 1 and any(dim * itemsize % _LINE_BYTES for dim in dims)


def last_share(
    problem: Problem, consumers: int, tile_k: int, heads: int, workers: int, least: int
) -> int:
    """What the last query tile of each head counts in a line of split tiles, in 64ths of another tile (`SHARES`).

    0 where it counts as much as others and comes among them: all of its consumers have rows, or weighing is not known to pay.

    heads: those whose rows share a tile. workers: blocks that run at once. least: the fewest key tiles of a piece.
    """
    if consumers != 3 or problem.mask is not None or problem.float8:
        return 0
    if problem.packed and not _may_be_alike(problem, consumers, heads):
        return 0
    if not problem.plain_scores or problem.window_left is not None:
        return 0
    apart = 1 if interleaves(problem, rows_of(consumers)) else heads
    if not first_has_first_rows(consumers, apart):
        return 0  # each consumer has all rows of some heads
    tiles, busy = divmod(busy_consumers(problem, consumers, heads), consumers)
    shares = _LAST_SHARES if problem.pages is None else _LAST_SHARES_PAGED
    share = of_headdim(shares, problem).get(busy, 0) if tiles else 0
    pays = share and _weighing_pays(problem, tile_k, heads, tiles, share, workers, least)
    return share if pays else 0


def busy_consumers(problem: Problem, consumers: int, heads: int) -> int:
    """How many consumers have rows of the longest sequence, in all query tiles of a head together."""
    tiles, rest = divmod(problem.max_seqlen_q, 64 * consumers // heads)
    return tiles * consumers - (-rest * heads // 64)


def _may_be_alike(problem: Problem, consumers: int, heads: int) -> bool:
    """Whether all sequences of a packed batch may have rows for as many consumers as the longest.

    The number of all rows tells. Arrays with more rows than sequences may have, as buffers are, tell nothing.
    """
    tiles, busy = divmod(busy_consumers(problem, consumers, heads) - 1, consumers)
    fewest = tiles * (64 * consumers // heads) + busy * 64 // heads + 1
    return problem.batch * fewest <= problem.rows_q <= problem.batch * problem.max_seqlen_q


def _weighing_pays(
    problem: Problem, tile_k: int, heads: int, tiles: int, share: int, workers: int, least: int
) -> bool:
    """Whether a line is expected to end earlier if last tiles count `share`. tiles: of each head, but for the last one."""
    lasts = problem.batch * problem.nheads_q // heads
    longest = query_tiles.fewest_and_most_keys(problem)[1]
    if longest < _LEAST_WEIGHED_KEYS or lasts * (tiles + 1) < _LEAST_WEIGHED * workers:
        return False
    if SHARES - share < _LEAST_SAVING * SHARES * (tiles + 1) or not query_tiles.alike(problem):
        return False
    fields = {"consumers": 3, "tile_k": tile_k}
    whole = of_headdim(TIMES, problem)[3] * longest + of_headdim(BEGIN_KEYS, problem)[3]
    rounds, longs = divmod(lasts * tiles, workers)
    length = longs + lasts * share / SHARES
    weighed = rounds * whole
    line = Line(problem, fields, longs + lasts, workers, least, all_of_them=rounds == 0)
    weighed += of_weighed(line, length)
    rounds, behind = divmod(lasts * (tiles + 1), workers)
    pieces = 0.0
    if behind:
        line = Line(problem, fields, behind, workers, least, all_of_them=rounds == 0)
        pieces = min(whole, of_pieces(line))
    return weighed < rounds * whole + pieces
