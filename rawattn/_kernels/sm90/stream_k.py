"""The line of query tiles that Hopper's forward splits by keys, and its pieces (attn/schedule/stream_k.cuh)."""

from __future__ import annotations

import math
from typing import NamedTuple

from rawattn._call.problem import Problem
from rawattn._kernels.sm90 import line_estimate, query_tiles
from rawattn._kernels.sm90.forward_config import MOST_ORDERED, Config
from rawattn._kernels.sm90.packed_lengths import as_long_as_likely
from rawattn._kernels.sm90.tma import MAX_ROWS

# When keys are split (docs/notes/hopper-forward.md):
# Keys of a query tile from which on the last tiles are split without an estimate, where all tiles are alike.
ALWAYS_KEYS = 8192
# Keys of a query tile from which on the last tiles are split where that is expected to take less time.
LEAST_KEYS = 1024
# Keys of the longest query tile from which on causal tiles of unlike length are split.
LEAST_KEYS_UNLIKE = 2048
# Splitting must end the tiles earlier by the time of this many key tiles.
LEAST_GAIN_TILES = 8
# The fewest key tiles of a piece.
LEAST_PIECE_TILES = 4

# Beginnings of query tiles count in a line unless pieces begin where a tile does every so many tiles, or more often.
_FEW_TILES = 4


class StreamK(NamedTuple):
    """How the keys of the last query tiles are split. kernels_cu/attn/schedule/stream_k.cuh defines line, piece and unit.

    Tiles of ragged batches are counted on the GPU. There all numbers are upper bounds, and `piece` and `units` are unused.
    """

    tiles: int  # query tiles in the line
    piece: int  # units of a piece
    units: int  # units of a query tile's keys
    items: int  # a bound: items are numbered below it
    partial_bytes: int  # of the partial results of all items
    counters: int  # of the items of a query tile that have arrived: one for each tile and warp
    # These two are 0 where query tiles are alike. Where they are not:
    rows: int = 0  # query tiles of each head in the line, the longest ones
    pieces: int = 0  # all pieces of the line
    least: int = 1  # the fewest key tiles of a piece
    gain: int = 0  # key tiles by which splitting must end the tiles earlier
    begin: int = 0  # what the beginning of a query tile counts, as `StreamK` of the kernel
    last_share: int = 0  # what the last query tile of a head counts (`line_estimate.last_share`)
    # How many consumers must have rows of each sequence for that, where the GPU alone knows.
    busy_consumers: int = 0

    @property
    def values(self) -> tuple[int, ...]:
        """The fields of the kernel's parameter struct `StreamK`, in its order."""
        line = self.tiles, self.piece, self.units
        pieces = self.rows, self.pieces, self.gain, self.least
        return (*line, *pieces, self.begin, self.last_share, self.busy_consumers)


def may_split_keys(problem: Problem, seqlen: int) -> bool:
    """Whether the keys of query tiles may be split among blocks.

    Tiles with about as many keys as each other may be from `seqlen` keys on, unlike ones of dense causal batches from
    `LEAST_KEYS_UNLIKE` on.
    """
    if problem.num_splits is not None:
        return False
    # An int counts the units of a line. Only pages have room for more keys.
    if problem.rows_k > MAX_ROWS:
        return False
    longest = query_tiles.fewest_and_most_keys(problem)[1]
    if query_tiles.splits_by_length(problem):
        # The host does not know the lengths of a mask's lists.
        return problem.mask is None and longest >= LEAST_KEYS_UNLIKE
    return longest >= seqlen and query_tiles.alike(problem)


def least_piece_tiles(problem: Problem, tile_k: int) -> int:
    """The fewest key tiles of a piece. With shorter pieces, merging those of a query tile takes longer than computing them."""
    _, longest = query_tiles.fewest_and_most_keys(problem)
    shortest = math.sqrt(line_estimate.ITEM_MERGE_COST_KEYS * longest)
    return max(LEAST_PIECE_TILES, math.ceil(shortest / tile_k))


def least_gain(problem: Problem, rows: int, heads: int, workers: int) -> int:
    """By how many key tiles' time splitting must end the split tiles earlier.

    rows: query rows of each head that the schedule hands out together; heads: those whose rows share a tile.
    """
    idle = query_tiles.count(problem, rows * heads, heads) < workers
    halved = idle and not query_tiles.splits_by_length(problem)
    return LEAST_GAIN_TILES // 2 if halved else LEAST_GAIN_TILES


def split(
    problem: Problem, config: Config, clusters: int, as_many_queries: bool = True
) -> StreamK | None:
    """How `clusters` clusters of blocks split the query tiles that remain behind whole rounds. None where that does not pay.

    as_many_queries: whether all sequences are known to have as many queries as the array has rows.
    """
    if not config.stream_k:
        return None
    problem = as_long_as_likely(problem)
    waves = config.cluster * config.consumers * 4
    # A lane leaves 32 bytes for each 16 columns of its two rows, and 16 bytes for their references (running max) and sums.
    wave_bytes = 32 * 16 * (2 * -(-config.headdim_v // 16) + 1)
    rows, piece, units = 0, 0, 0
    least = least_piece_tiles(problem, config.tile_k)
    begin = _begin_of_tiles(least, config.tile_k)
    gain_wanted = least_gain(problem, config.schedule_rows, config.heads_per_tile, clusters)
    heads = problem.batch * problem.nheads_q // config.heads_per_tile
    share, busy, shared = 0, 0, None
    # The GPU can tell that queries are as many of sequences that each block orders for itself.
    if config.cluster == 1 and (as_many_queries or problem.batch <= MOST_ORDERED):
        shape = config.consumers, config.tile_k, config.heads_per_tile
        share = line_estimate.last_share(problem, *shape, clusters, least)
    if share and not as_many_queries:
        busy = line_estimate.busy_consumers(problem, config.consumers, config.heads_per_tile)
    if share and not problem.ragged:
        shared = _weighed(problem, config, clusters, share, least, begin)
        share = 0 if shared is None else share
    if problem.ragged:
        if clusters == 1:
            return None
        tiles, pieces = clusters - 1 + (heads if share else 0), clusters
    elif shared is not None:
        tiles, piece, units = shared
        pieces = clusters
    elif query_tiles.splits_by_length(problem):
        lengths = query_tiles.key_tiles(problem, config.schedule_rows, config.tile_k)
        piece = max(least, -(-heads * sum(lengths) // clusters))
        rows = sum(each > piece for each in lengths)
        if lengths[0] - piece < max(1, gain_wanted):
            return None
        tiles, pieces = heads * rows, -(-heads * sum(lengths[:rows]) // piece)
    else:
        every = -(-problem.rows_q // config.schedule_rows) * heads
        tiles = every % clusters
        keys = query_tiles.most_key_tiles(problem, config.tile_k)
        fields = {"consumers": config.consumers, "tile_k": config.tile_k}
        line = line_estimate.Line(problem, fields, tiles, clusters, least, tiles == every)
        pieces = line_estimate.best_pieces(line)
        gain = (pieces - tiles) * keys  # in key tiles, of all pieces
        if tiles == 0 or pieces <= tiles or gain < gain_wanted * pieces:
            return None
        part = -(-keys // pieces)
        units = pieces * part
        begin = 0 if _repeats(tiles, pieces) else units * begin // (keys * line_estimate.SHARES)
        piece = tiles * part + -(-tiles * begin // pieces)
    items = pieces + tiles - 1
    return StreamK(
        *(tiles, piece, units, items, items * waves * wave_bytes),
        counters=tiles * waves,
        rows=rows,
        pieces=pieces if rows else 0,
        least=least,
        gain=gain_wanted,
        begin=0 if rows else begin,
        last_share=share,
        busy_consumers=busy,
    )


def _weighed(
    problem: Problem, config: Config, workers: int, share: int, least: int, begin: int
) -> tuple[int, int, int] | None:
    """Tiles, piece and units of the line of a dense batch that weighs last tiles. None if its pieces would be too short, or an
    int could not count its units."""
    heads = problem.batch * problem.nheads_q // config.heads_per_tile
    each = -(-problem.rows_q // config.schedule_rows)
    longs = heads * (each - 1) % workers
    keys = query_tiles.most_key_tiles(problem, config.tile_k)
    units = line_estimate.SHARES * keys
    length = longs * units + heads * share * keys + (longs + heads) * begin
    piece = -(-length // workers)
    if length >= 2**31 or piece < least * line_estimate.SHARES:
        return None
    return longs + heads, piece, units


def _begin_of_tiles(least: int, tile_k: int) -> int:
    """What the beginning of a query tile counts in a line, in 64ths of a key tile: less than a piece of `least` key tiles."""
    return min(
        line_estimate.SHARES * line_estimate.ITEM_KEYS // tile_k,
        line_estimate.SHARES * least * 3 // 4,
    )


def _repeats(tiles: int, pieces: int) -> bool:
    """Whether pieces begin where a tile does every few tiles, or more often (`StreamLine::repeats`)."""
    return any(n * pieces % tiles == 0 for n in range(1, _FEW_TILES + 1))
