"""How the keys of a query tile are split among blocks (split-KV): when, and into how many pieces.

`Splits` are of kernels whose blocks take query tiles (kernels_cu/attn/splits.cuh), a `Line` is of decoding's
(kernels_cu/attn/schedule/line.cuh, which defines line, part, unit and abreast).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rawattn._call.options import MAX_SPLITS
from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels import structs
from rawattn._kernels.source import round_up
from rawattn._kernels.steps import Tiles
from rawattn._kernels.structs import Struct
from rawattn._kernels.target import Target

# The fewest keys of a piece: its partial result is written and read once more.
LEAST_KEYS = 512
# The fewest keys of a part of a line, in ragged batches.
LEAST_PART_KEYS = 256
# The time to merge the parts of a query tile, in units: _JOIN, _JOIN_EACH more for each part that one block reads, and
# _CUT_TILES_COST more where parts end inside query tiles, since a block then leaves two partial results (measured:
# docs/notes/decode.md).
_JOIN, _JOIN_EACH, _CUT_TILES_COST = 2.0, 0.08, 2.0
# Parts that are merged to one before the last merge; the most parts that one block merges at once. Both as in
# kernels_cu/attn/schedule/shared_tile.cuh.
_MERGE_GROUP, _MAX_FLAT_MERGE = 16, 32
# The most heads abreast. They read rows that are neighbours in memory, so there are as many as possible, as long as they keep
# at least the fraction _WORTH_ABREAST of the blocks that run at once busy.
MOST_ABREAST = 64
_WORTH_ABREAST = 0.9
# The fraction of the blocks that run at once that keeps the memory busy.
_BUSY = 0.5
# In ragged batches, pieces are as long as if this many of them came to each block that runs at once, with all sequences as
# long as they may be. So a longer sequence has more pieces, and no piece takes much longer than the others. The second is for
# sequences of one query tile, since merging few rows costs next to nothing (docs/notes/portable-forward.md).
_PIECES = 4
_PIECES_OF_ONE_TILE = 32
# Parts that end where query tiles do are taken if they are at least this fraction of the parts that could be.
_WORTH_CUTTING_NO_TILES = 0.94
_COUNTER_BYTES = 4
# Rows of a 16 x 16 accumulator of which a lane has elements, by threads of a wave.
_SLOTS = {32: 2, 64: 4}


class Tiled(Protocol):
    """The fields of a kernel's configuration that decide how keys are split."""

    @property
    def tile_q(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Splits:
    """Each query tile has at most `count` pieces, of at least `least` key tiles each.

    tiles: the most query tiles of a launch, whatever the lengths are.
    """

    count: int = 1
    least: int = 1
    tiles: int = 0

    @property
    def any(self) -> bool:
        """Whether any query tile may have more than one piece."""
        return self.count > 1

    def fields(self) -> dict[str, Any]:
        """Fields of the kernel's parameters."""
        return {"splits.count": self.count, "splits.least": self.least} if self.any else {}

    def patches(self, struct: Struct) -> tuple[tuple[int, str], ...]:
        """Where the addresses of partial results and of their counters belong."""
        names = ("arrived", "partials") if self.any else ()
        return tuple((structs.offset(struct, f"splits.{name}"), f"split_{name}") for name in names)

    def scratch(self, block_bytes: int) -> dict[str, int]:
        """Bytes by name; block_bytes: of a block's partial result."""
        return {"split_partials": self.tiles * self.count * block_bytes} if self.any else {}

    def counters(self) -> dict[str, int]:
        """Bytes by name."""
        return {"split_arrived": _COUNTER_BYTES * self.tiles} if self.any else {}


WHOLE = Splits()


def split(
    problem: Problem, structure: Structure, config: Tiled, target: Target, tiles: Tiles
) -> Splits:
    """How the keys of a launch's query tiles are split.

    Only bounds of the lengths count, so a batch that grows within them keeps its kernel and its launches. Where `num_splits` is
    given, each query tile has that many pieces if it has as many key tiles. Where it is not, the number of pieces of a query
    tile follows from its length.
    """
    most = _most_query_tiles(structure, tiles)
    keys = -(-structure.k.length_bound // config.tile_k)
    if problem.num_splits is not None:
        count = min(problem.num_splits, keys)
        return Splits(count, 1, most) if count > 1 and most else WHOLE
    # One stands for an unknown number of SMs: the kernel is only compiled.
    if target.multiprocessors == 1 or not most:
        return WHOLE
    met = _key_tiles_met(problem, config, keys)
    pieces = target.multiprocessors * config.blocks_per_sm
    if structure.ragged:
        pieces *= _PIECES_OF_ONE_TILE if structure.q.length_bound <= tiles.rows else _PIECES
    least = max(-(-LEAST_KEYS // config.tile_k), -(-met * most // pieces))
    count = min(-(-met // least), MAX_SPLITS)
    return Splits(count, max(least, -(-met // count)), most) if count > 1 else WHOLE


def affordable(problem: Problem, target: Target, scratch: dict[str, int]) -> dict[str, int]:
    """Returns `scratch`. ValueError where the device cannot hold the partial results of as many pieces as were asked for."""
    nbytes = scratch.get("split_partials", 0)
    if problem.num_splits is not None and target.memory is not None and nbytes > target.memory:
        raise ValueError(
            f"num_splits: got {problem.num_splits}, by which pieces leave {nbytes} bytes ({nbytes >> 30} GiB) for each "
            f"other, but the GPU has {target.memory} ({target.memory >> 30} GiB); pass a smaller number, or None for one "
            "that is chosen"
        )
    return scratch


@dataclass(frozen=True, slots=True)
class Line:
    """A line of all key tiles, cut into parts (kernels_cu/attn/schedule/line.cuh).

    blocks: of the launch.
    count: pieces of each query tile, 0 where the line is cut into equal parts instead.
    least: the fewest units of a part.
    abreast: query tiles of different heads that a part has, each with its own block.
    heads: query tiles that one query of all heads takes.
    busy: the number of parts that keeps the memory busy.
    """

    blocks: int | Tiles
    count: int
    least: int
    abreast: int
    most: int  # the most blocks of a launch, whatever the lengths are
    heads: int
    busy: float = 1.0

    def fields(self, nheads_kv: int) -> dict[str, float]:
        """Fields of the kernel's parameters."""
        blocks = self.blocks // self.abreast if isinstance(self.blocks, int) else 0
        return {
            "splits.count": self.count,
            "splits.least": self.least,
            "splits.abreast": self.abreast,
            "splits.of_group": self.heads // nheads_kv,
            "splits.ranks": self.heads // self.abreast,
            "splits.blocks": blocks,
            "splits.per_busy": 1 / self.busy,
        }

    def patches(self, struct: Struct) -> tuple[tuple[int, str], ...]:
        """Where the addresses of partial results and of their counters belong."""
        names = ("arrived", "partials")
        return tuple((structs.offset(struct, f"splits.{name}"), f"split_{name}") for name in names)

    def scratch(self, block_bytes: int) -> dict[str, int]:
        """Bytes by name; block_bytes: of a segment's partial result. A part shares at most two query tiles with other parts."""
        return {"split_partials": self.most * (1 if self.count else 2) * block_bytes}

    def counters(self) -> dict[str, int]:
        """Bytes by name."""
        return {"split_arrived": _COUNTER_BYTES * self.most}


def line(
    problem: Problem, structure: Structure, config: Tiled, target: Target, tiles: Tiles, unit: int
) -> Line:
    """How a launch cuts its line. unit: key tiles of a unit.

    Only bounds of the lengths count, so a batch that grows within them keeps its kernel and its launch.
    """
    most = _most_query_tiles(structure, tiles)
    slots = target.multiprocessors * config.blocks_per_sm
    abreast = _abreast(tiles.heads, slots)
    keys = _key_tiles_met(problem, config, -(-structure.k.length_bound // config.tile_k))
    if problem.num_splits is not None:
        count = max(1, min(problem.num_splits, keys))
        return Line(replace(tiles, blocks_each=count), count, 1, abreast, most * count, tiles.heads)
    at_once = max(1, slots // abreast)
    streams, units = most // abreast, max(1, -(-keys // unit))
    busy = _BUSY * at_once
    if structure.ragged:
        least = max(1, LEAST_PART_KEYS // (config.tile_k * unit))
        parts = min(_parts_cutting_no_tiles(streams, at_once), streams * units)
    else:
        least, parts = 1, _parts(streams, units, at_once, busy)
    blocks = abreast * parts
    return Line(blocks, 0, least, abreast, blocks, tiles.heads, busy)


def _parts(streams: int, units: int, at_once: int, busy: float) -> int:
    """The number of parts with the shortest expected time, for a line of `streams` streams of `units` units each.

    A stream is a sequence's keys as the heads abreast read them. at_once: parts that run at once. busy: as in `Line`.
    """
    if units == 1 or streams == 0:
        return min(streams, at_once)

    def time(units_of_part: int) -> float:
        """The time of parts of so many units, overlapped with the memory's time for all units; in units."""
        return math.hypot(units_of_part, streams * units / busy)

    cutting = min(at_once, streams * units)
    join = _join(max(2, -(-cutting // streams))) + _CUT_TILES_COST
    found = [(time(-(-streams * units // cutting)) + join, cutting)]
    if streams > at_once:
        whole_tile = _parts_cutting_no_tiles(streams, at_once)
        if streams % whole_tile == 0:
            found.append((time(streams // whole_tile * units), whole_tile))
    for pieces in range(1, min(at_once // streams, units) + 1):
        found.append((time(-(-units // pieces)) + _join(pieces), streams * pieces))
    return min(found)[1]


def _join(pieces: int) -> float:
    """The time to merge the pieces of a query tile, in units."""
    if pieces <= _MAX_FLAT_MERGE:
        return _JOIN + _JOIN_EACH * pieces if pieces > 1 else 0.0
    return 2 * _JOIN + _JOIN_EACH * (_MERGE_GROUP + pieces / _MERGE_GROUP)


def _abreast(heads: int, slots: int) -> int:
    """How many of the query tiles of `heads` stand abreast, where `slots` blocks run at once."""
    divisors = [n for n in range(1, min(heads, MOST_ABREAST) + 1) if heads % n == 0]
    idle = {n: slots % n for n in divisors}  # all slots, where n is larger than their number
    fitting = [n for n in divisors if slots - idle[n] >= _WORTH_ABREAST * slots]
    return max(fitting, default=1)


def _parts_cutting_no_tiles(tiles: int, parts: int) -> int:
    """How many parts to make, of at most `parts`, so that parts of equally long query tiles end where those do.

    A query tile inside which a part ends needs a merge, while a few idle SMs do not make reading slower.
    """
    if tiles <= 0:
        return parts
    fewer = -(-tiles // -(-tiles // parts)) if tiles > parts else parts // tiles * tiles
    return fewer if fewer >= _WORTH_CUTTING_NO_TILES * parts else parts


def partial_bytes(rows: int, headdim_v: int, wave: int) -> int:
    """Bytes of a wave's partial result of a piece: the output, and for each lane two numbers of each of its rows."""
    of_16_rows = 16 * round_up(headdim_v, 16) + 2 * wave * _SLOTS[wave]
    return rows // 16 * of_16_rows * 4


def _key_tiles_met(problem: Problem, config: Tiled, keys: int) -> int:
    """The most key tiles that a query tile meets, of `keys`."""
    left, right = problem.window_left, problem.window_right
    if left is None or right is None:
        return keys
    # A window may begin and end inside a key tile, and so may sink tokens end.
    window = -(-(left + right + config.tile_q) // config.tile_k) + 1
    return min(keys, window + -(-problem.sink // config.tile_k))


def _most_query_tiles(structure: Structure, tiles: Tiles) -> int:
    side = structure.side(tiles.side)
    each = structure.batch * -(-side.length_bound // tiles.rows)
    if structure.packed:
        each = min(each, side.rows // tiles.rows + structure.batch)
    return each * tiles.heads
