"""The line of query tiles that Hopper's forward splits by keys, and its pieces (attn/schedule/stream_k.cuh)."""

from __future__ import annotations

from typing import NamedTuple

from rawattn._call.problem import Problem
from rawattn._kernels.sm90 import forward, line_estimate, query_tiles
from rawattn._kernels.sm90.forward_config import Config

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

    @property
    def values(self) -> tuple[int, ...]:
        """The fields of the kernel's parameter struct `StreamK`, in its order."""
        line = self.tiles, self.piece, self.units
        pieces = self.rows, self.pieces, self.gain, self.least
        return (*line, *pieces, self.begin, self.last_share)


def split(
    problem: Problem, config: Config, clusters: int, as_many_queries: bool = True
) -> StreamK | None:
    """How `clusters` clusters of blocks split the query tiles that remain behind whole rounds. None where that does not pay.

    as_many_queries: whether all sequences have as many queries as the array has rows.
    """
    if not config.stream_k:
        return None
    waves = config.cluster * config.consumers * 4
    # A lane leaves 32 bytes for each 16 columns of its two rows, and 16 bytes for their references (running max) and sums.
    wave_bytes = 32 * 16 * (2 * -(-config.headdim_v // 16) + 1)
    rows, piece, units = 0, 0, 0
    least = forward.least_piece_tiles(problem, config.tile_k)
    begin = _begin_of_tiles(least, config.tile_k)
    least_gain = forward.least_gain(problem, config.schedule_rows, config.heads_per_tile, clusters)
    heads = problem.batch * problem.nheads_q // config.heads_per_tile
    share, shared = 0, None
    if config.cluster == 1 and as_many_queries:
        shape = config.consumers, config.tile_k, config.heads_per_tile
        share = line_estimate.last_share(problem, *shape, clusters, least)
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
        if lengths[0] - piece < max(1, least_gain):
            return None
        tiles, pieces = heads * rows, -(-heads * sum(lengths[:rows]) // piece)
    else:
        every = -(-problem.rows_q // config.schedule_rows) * heads
        tiles = every % clusters
        keys = query_tiles.most_key_tiles(problem, config.tile_k)
        fields = {"consumers": config.consumers, "tile_k": config.tile_k}
        alone = tiles == every
        pieces = line_estimate.best_pieces(problem, fields, tiles, clusters, least, alone)
        gain = (pieces - tiles) * keys  # in key tiles, of all pieces
        if tiles == 0 or pieces <= tiles or gain < least_gain * pieces:
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
        gain=least_gain,
        begin=0 if rows else begin,
        last_share=share,
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
