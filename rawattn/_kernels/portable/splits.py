"""How the keys of a query tile are split among blocks (kernels_cu/attn/splits.cuh): when, and into how many pieces."""

from __future__ import annotations

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
# Likewise of a part of a line.
LEAST_PART_KEYS = 256
# Heads abreast in a line read 2 KB side by side at D 128.
MOST_ABREAST = 8
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
    """A line of all key tiles, cut into parts of equal length (kernels_cu/attn/schedule/line.cuh).

    blocks: of the launch. count: pieces of each query tile, 0 where parts decide. least: units of a part. abreast: tiles
    of a part, each with its own block. heads: tiles beside each other, of all heads.
    """

    blocks: int | Tiles
    count: int
    least: int
    abreast: int
    most: int  # blocks that a launch has at most, whatever the lengths are
    heads: int

    def fields(self, nheads_kv: int) -> dict[str, int]:
        """Of the parameters."""
        blocks = self.blocks // self.abreast if isinstance(self.blocks, int) else 0
        return {
            "splits.count": self.count,
            "splits.least": self.least,
            "splits.abreast": self.abreast,
            "splits.of_group": self.heads // nheads_kv,
            "splits.ranks": self.heads // self.abreast,
            "splits.blocks": blocks,
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
    abreast = max(n for n in range(1, MOST_ABREAST + 1) if tiles.heads % n == 0)
    keys = _met(problem, config, -(-structure.k.most // config.tile_k))
    if problem.num_splits is not None:
        count = max(1, min(problem.num_splits, keys))
        return Line(replace(tiles, times=count), count, 1, abreast, most * count, tiles.heads)
    least = max(1, LEAST_PART_KEYS // (config.tile_k * unit))
    parts = max(most // abreast, -(-most // abreast * max(1, -(-keys // unit)) // least))
    at_once = max(1, target.multiprocessors * config.blocks_per_sm // abreast)
    blocks = abreast * min(_unbroken(most // abreast, at_once), parts)
    return Line(blocks, 0, least, abreast, blocks, tiles.heads)


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
