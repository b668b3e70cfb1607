"""How the keys of a query tile are split among blocks (kernels_cu/attn/splits.cuh): when, and into how many pieces."""

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

# A piece has at least so many keys: what it comes to is written and read once more.
LEAST_KEYS = 512
# Likewise of a part of a line, of ragged batches.
LEAST_PART_KEYS = 256
# To join the parts of a query tile takes as long as so many units, and some more for each that one block reads. Where they
# end in the midst of other query tiles, a block leaves two.
_JOIN, _JOIN_EACH, _BROKEN = 2.0, 0.08, 2.0
_BUNCH, _MOST_OF_ONE = 16, 32  # as in kernels_cu/attn/schedule/shared_tile.cuh
# Heads abreast in a line read rows that lie side by side: as many as leave no more than a tenth of the blocks idle.
MOST_ABREAST = 64
_WORTH_ABREAST = 0.9
# Of the blocks that run at once, those that keep the memory busy.
_BUSY = 0.5
# Where sequences differ, pieces are as long as if this many of them came to each block that runs at once, were all
# sequences as long as they may be. So a longer sequence has more of them, and none is waited for much longer than for the
# others. One row is merged at no cost. (Not measured yet.)
_PIECES = 4
_PIECES_OF_ONE_TILE = 32
# Of parts whose ends are those of query tiles there may be so many fewer.
_WORTH_UNBROKEN = 0.94
_COUNTER_BYTES = 4
# Rows of a 16 x 16 accumulator that a lane has elements of, by threads of a wave.
_SLOTS = {32: 2, 64: 4}


class Tiled(Protocol):
    """What of a kernel's configuration decides."""

    @property
    def tile_q(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Splits:
    """Of each query tile at most `count` pieces, of `least` key tiles at least.

    tiles: query tiles that a launch has at most, whatever the lengths are.
    """

    count: int = 1
    least: int = 1
    tiles: int = 0

    @property
    def any(self) -> bool:
        """Whether any query tile may have more than one."""
        return self.count > 1

    def fields(self) -> dict[str, Any]:
        """Of the parameters."""
        return {"splits.count": self.count, "splits.least": self.least} if self.any else {}

    def patches(self, struct: Struct) -> tuple[tuple[int, str], ...]:
        """Where the addresses of what blocks leave for each other belong."""
        names = ("arrived", "partials") if self.any else ()
        return tuple((structs.offset(struct, f"splits.{name}"), f"split_{name}") for name in names)

    def scratch(self, block_bytes: int) -> dict[str, int]:
        """Bytes by name; block_bytes: of what a block's rows come to."""
        return {"split_partials": self.tiles * self.count * block_bytes} if self.any else {}

    def counters(self) -> dict[str, int]:
        """Bytes by name."""
        return {"split_arrived": _COUNTER_BYTES * self.tiles} if self.any else {}


WHOLE = Splits()


def split(
    problem: Problem, structure: Structure, config: Tiled, target: Target, tiles: Tiles
) -> Splits:
    """How the keys of a launch's query tiles are split.

    It follows from bounds of the lengths, so a batch that grows within them keeps its kernel and its launches. `num_splits`
    is exact where a query tile has as many key tiles. Else lengths decide how many pieces each has.
    """
    most = _most(structure, tiles)
    keys = -(-structure.k.most // config.tile_k)
    if problem.num_splits is not None:
        count = min(problem.num_splits, keys)
        return Splits(count, 1, most) if count > 1 and most else WHOLE
    # Of a kernel that is only compiled nobody knows how many multiprocessors there are.
    if target.multiprocessors == 1 or not most:
        return WHOLE
    met = _met(problem, config, keys)
    pieces = target.multiprocessors * config.blocks_per_sm
    if structure.ragged:
        pieces *= _PIECES_OF_ONE_TILE if structure.q.most <= tiles.rows else _PIECES
    least = max(-(-LEAST_KEYS // config.tile_k), -(-met * most // pieces))
    count = min(-(-met // least), MAX_SPLITS)
    return Splits(count, max(least, -(-met // count)), most) if count > 1 else WHOLE


def affordable(problem: Problem, target: Target, scratch: dict[str, int]) -> dict[str, int]:
    """`scratch`. ValueError where the device cannot hold what pieces leave for each other, as many as were asked for."""
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

    blocks: of the launch. count: pieces of each query tile, 0 where parts decide. least: units of a part. abreast: tiles
    of a part, each with its own block. heads: tiles beside each other, of all heads. busy: parts that keep the memory busy.
    """

    blocks: int | Tiles
    count: int
    least: int
    abreast: int
    most: int  # blocks that a launch has at most, whatever the lengths are
    heads: int
    busy: float = 1.0

    def fields(self, nheads_kv: int) -> dict[str, float]:
        """Of the parameters."""
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
        """Where the addresses of what blocks leave for each other belong."""
        names = ("arrived", "partials")
        return tuple((structs.offset(struct, f"splits.{name}"), f"split_{name}") for name in names)

    def scratch(self, block_bytes: int) -> dict[str, int]:
        """Bytes by name; block_bytes: of what a segment comes to, of which a part shares two with others."""
        return {"split_partials": self.most * (1 if self.count else 2) * block_bytes}

    def counters(self) -> dict[str, int]:
        """Bytes by name."""
        return {"split_arrived": _COUNTER_BYTES * self.most}


def line(
    problem: Problem, structure: Structure, config: Tiled, target: Target, tiles: Tiles, unit: int
) -> Line:
    """How a launch cuts its line. unit: key tiles.

    It follows from bounds of the lengths, so a batch that grows within them keeps its kernel and its launch.
    """
    most = _most(structure, tiles)
    slots = target.multiprocessors * config.blocks_per_sm
    abreast = _abreast(tiles.heads, slots)
    keys = _met(problem, config, -(-structure.k.most // config.tile_k))
    if problem.num_splits is not None:
        count = max(1, min(problem.num_splits, keys))
        return Line(replace(tiles, times=count), count, 1, abreast, most * count, tiles.heads)
    at_once = max(1, slots // abreast)
    streams, units = most // abreast, max(1, -(-keys // unit))
    busy = _BUSY * at_once
    if structure.ragged:
        least = max(1, LEAST_PART_KEYS // (config.tile_k * unit))
        parts = min(_unbroken(streams, at_once), streams * -(-units // least))
    else:
        least, parts = 1, _parts(streams, units, at_once, busy)
    blocks = abreast * parts
    return Line(blocks, 0, least, abreast, blocks, tiles.heads, busy)


def _parts(streams: int, units: int, at_once: int, busy: float) -> int:
    """Of a line of so many sequences of as many units each, where so many parts run at once: what takes the shortest."""
    if units == 1 or streams == 0:
        return min(streams, at_once)

    def time(units_of_part: int) -> float:
        """In units: of a part's, beside what the memory takes for those of all."""
        return math.hypot(units_of_part, streams * units / busy)

    broken = min(at_once, streams * units)
    join = _join(max(2, -(-broken // streams))) + _BROKEN
    found = [(time(-(-streams * units // broken)) + join, broken)]
    if streams > at_once:
        unbroken = _unbroken(streams, at_once)
        if streams % unbroken == 0:
            found.append((time(streams // unbroken * units), unbroken))
    for pieces in range(1, min(at_once // streams, units) + 1):
        found.append((time(-(-units // pieces)) + _join(pieces), streams * pieces))
    return min(found)[1]


def _join(pieces: int) -> float:
    """What it takes to join the pieces of a query tile, in units."""
    if pieces <= _MOST_OF_ONE:
        return _JOIN + _JOIN_EACH * pieces if pieces > 1 else 0.0
    return 2 * _JOIN + _JOIN_EACH * (_BUNCH + pieces / _BUNCH)


def _abreast(heads: int, slots: int) -> int:
    """How many of these heads stand abreast, where so many blocks run at once."""
    divisors = [n for n in range(1, min(heads, MOST_ABREAST) + 1) if heads % n == 0]
    idle = {n: slots % n for n in divisors}  # all of them of more than there are
    fitting = [n for n in divisors if slots - idle[n] >= _WORTH_ABREAST * slots]
    return max(fitting, default=1)


def _unbroken(tiles: int, parts: int) -> int:
    """How many of so many parts to make, so that parts of query tiles with as many keys each end where those do.

    What ends in their midst is merged, and a few multiprocessors less read no slower.
    """
    if tiles <= 0:
        return parts
    fewer = -(-tiles // -(-tiles // parts)) if tiles > parts else parts // tiles * tiles
    return fewer if fewer >= _WORTH_UNBROKEN * parts else parts


def partial_bytes(rows: int, headdim_v: int, wave: int) -> int:
    """Of what a wave's rows come to in a piece of their keys: the output, and two numbers of each row of each lane."""
    of_16_rows = 16 * round_up(headdim_v, 16) + 2 * wave * _SLOTS[wave]
    return rows // 16 * of_16_rows * 4


def _met(problem: Problem, config: Tiled, keys: int) -> int:
    """Key tiles that a query tile meets at most, of so many."""
    left, right = problem.window_left, problem.window_right
    if left is None or right is None:
        return keys
    # Neither sink tokens nor a window begin or end with a tile.
    window = -(-(left + right + config.tile_q) // config.tile_k) + 1
    return min(keys, window + -(-problem.sink // config.tile_k))


def _most(structure: Structure, tiles: Tiles) -> int:
    side = structure.side(tiles.side)
    each = structure.batch * -(-side.most // tiles.rows)
    if structure.group:
        each = min(each, side.rows // tiles.rows + structure.batch)
    return each * tiles.heads
