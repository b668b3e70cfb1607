"""Time Hopper's forward with each of its tile shapes, on random shapes: how much longer does the chosen one take?

    python bench/tile_choices.py --shapes 100 --seed 1 --keys pages --json shapes.json

Each call that Hopper's forward takes is timed in CUDA graphs with the tiles that it chooses, and with those that are expected
to take at most --within times as long as the quickest: whole, and split by keys (attn/schedule/stream_k.cuh).
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.shapes import Inputs, Shape, Times, between, call, command_line, make, run, worst
from rawattn._bench import graphs
from rawattn._bench.timing import race
from rawattn._call.problem import Problem
from rawattn._cli import arguments
from rawattn._kernels.selection import using_tiles
from rawattn._kernels.sm90 import stream_k, tile_choice, time_estimate
from rawattn._kernels.sm90.forward_config import rows_of
from rawattn._kernels.sm90.tile_heads import heads_per_tile
from rawattn._kernels.target import Target

KEYS = ("rows", "pages")
_CHOSEN = "chosen"
_HEADDIMS = (64, 64, 80, 96, 128, 128, 128, 192, 256)
_LEAST_BYTES, _MOST_BYTES, _MOST_QUERY_BYTES = 2e6, 1.2e9, 2e8
_MOST_OPERATIONS = 1e12


class Tiles(NamedTuple):
    """A row of the tile tables, and whether the keys of its last query tiles are split."""

    fields: Mapping[str, Any]
    split: bool

    @property
    def name(self) -> str:
        rows, columns = rows_of(self.fields["consumers"]), self.fields["tile_k"]
        return f"{rows} x {columns}{' split' if self.split else ''}"


def draw(source: random.Random, keys: str) -> Shape:
    """Draw a random shape of several rows; rows and seqlen_k are log-uniform."""
    while True:
        group = source.choice((1, 1, 2, 3, 4, 4, 5, 7, 8, 12))
        nheads_kv = source.choice((1, 2, 4, 8, 8, 8, 16, 32))
        shape = Shape(
            keys,
            batch=source.choice((1, 1, 2, 3, 4, 6, 8, 8, 12, 16, 24, 32, 64)),
            rows=between(source, 4, 2048),
            seqlen_k=between(source, 500, 40000),
            nheads_q=group * nheads_kv,
            nheads_kv=nheads_kv,
            headdim=source.choice(_HEADDIMS),
        )
        queries = shape.batch * shape.rows * shape.nheads_q * shape.headdim
        few = 2 * queries <= _MOST_QUERY_BYTES and 4 * queries * shape.seqlen_k <= _MOST_OPERATIONS
        if few and shape.rows <= shape.seqlen_k and _LEAST_BYTES <= shape.nbytes <= _MOST_BYTES:
            return shape


def candidates(problem: Problem, target: Target, within: float) -> list[Tiles]:
    """The tiles that are expected to take at most `within` times as long as the quickest."""
    wide, table = max(problem.headdim, problem.headdim_v), tile_choice.table_of(problem)
    rows = [
        row.fields
        for name in dict.fromkeys((table, "any", "long", "few"))
        for row in tile_choice.rows_of_table(name, wide)[: None if name == "few" else 1]
    ]
    may_split = stream_k.may_split_keys(problem, stream_k.LEAST_KEYS)
    most = tile_choice.most_blocks(problem) if tile_choice.may_share_sm(problem, table, wide) else 1
    expected: dict[str, tuple[float, Tiles]] = {}
    for fields in rows:
        if (blocks := tile_choice.blocks_of(fields)) > most:
            continue
        heads = heads_per_tile(problem, rows_of(fields["consumers"]))
        for split in (False, True) if may_split and blocks == 1 else (False,):
            tiles = Tiles({**fields, "cluster": 1}, split)
            least = stream_k.least_piece_tiles(problem, fields["tile_k"]) if split else 0
            time = time_estimate.duration(
                problem, target.multiprocessors, fields, heads, blocks, least
            )
            if math.isfinite(time):
                expected.setdefault(tiles.name, (time, tiles))
    quickest = min((time for time, _ in expected.values()), default=0.0)
    return [tiles for time, tiles in expected.values() if time <= within * quickest]


@contextmanager
def forced(tiles: Tiles) -> Iterator[None]:
    """Hopper's forward takes these tiles. The name of a table that no kernel has tells prepared calls apart."""
    choice = dict(tiles.fields), tiles.split
    with (
        using_tiles(tile_choice.TILES, f"forced {tiles.name}", ()),
        mock.patch.object(tile_choice, "choose", return_value=choice),
    ):
        yield


def chosen(inputs: Inputs) -> tuple[Problem, Target] | None:
    """What Hopper's forward chooses tiles for in this call. None if it does not take the call."""
    asked: list[tuple[Problem, Target]] = []
    choose = tile_choice.choose

    def spy(problem: Problem, target: Target) -> tuple[dict[str, Any], bool]:
        asked.append((problem, target))
        return choose(problem, target)

    with mock.patch.object(tile_choice, "choose", spy):
        call(inputs, nullcontext)()
    return asked[-1] if asked else None


def measure(shape: Shape, within: float) -> dict[str, float]:
    """The microseconds of a call by the name of its tiles; empty if Hopper's forward does not take the call."""
    sets = [make(shape) for _ in range(graphs.sets(shape.nbytes))]
    if (asked := chosen(sets[0])) is None:
        return {}
    scopes: dict[str, Callable[[], AbstractContextManager[Any]]] = {_CHOSEN: nullcontext}
    for tiles in candidates(*asked, within):
        scopes[tiles.name] = functools.partial(forced, tiles)
    entrants = {
        name: graphs.entrant(graphs.of_cupy, [call(x, scope) for x in sets], shape.nbytes)
        for name, scope in scopes.items()
    }
    return {
        name: 1e6 * timing.seconds
        for name, timing in race(entrants, repeats=5).items()
        if not isinstance(timing, Exception)
    }


def summary(results: Sequence[tuple[Shape, Times]]) -> list[str]:
    """How much longer the chosen tiles take than the quickest, and the twenty worst shapes."""
    over = [(times[_CHOSEN] / min(times.values()), shape, times) for shape, times in results]
    if not over:
        return ["Hopper's forward takes none of these calls"]
    mean = statistics.geometric_mean(ratio for ratio, _, _ in over)
    slower = sum(ratio > 1.05 for ratio, _, _ in over)
    lines = [f"over the quickest tiles: {mean:.3f} in the mean of {len(over)}, {slower} above 1.05"]
    return [*lines, *worst(over, 20)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("python bench/tile_choices.py", __doc__, KEYS, shapes=100)
    parser.add_argument(
        "--within",
        type=arguments.number,
        metavar="X",
        default=1.3,
        help="of the quickest expected time (%(default)s)",
    )
    given = parser.parse_args(argv)
    if not given.within >= 1:
        parser.error(f"--within: got {given.within}, expected a number, at least 1")
    return run(
        parser.prog,
        given,
        lambda source: draw(source, given.keys),
        lambda shape: measure(shape, given.within),
        summary,
    )


if __name__ == "__main__":
    sys.exit(main())
