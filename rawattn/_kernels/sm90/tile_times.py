"""What a tile of Hopper's forward takes, measured, by its shape.

All times are in one unit: the time that a tile of two consumers (128 rows) takes for one key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from rawattn._call.problem import Problem

# These tables are indexed by the largest head dim that a line serves, then by the consumers of all blocks that an SM runs at
# once. Consumers share the tensor cores and the special function units; one consumer alone leaves one idle while it uses the
# other. Measured: docs/notes/hopper-forward.md.
# The time for one key of a tile.
TIMES = {
    64: {1: 0.69, 2: 1.0, 3: 1.22, 4: 1.81},
    96: {1: 0.7, 2: 1.0, 3: 1.45, 4: 2.0},
    128: {1: 0.77, 2: 1.0, 3: 1.31, 4: 1.9},
    256: {1: 0.71, 2: 1.0, 3: 1.31, 4: 1.9},
}
# The time to begin and end a tile.
BEGIN_KEYS = {
    64: {1: 113, 2: 153, 3: 236, 4: 292},
    96: {1: 104, 2: 161, 3: 290, 4: 325},
    128: {1: 136, 2: 227, 3: 281, 4: 346},
    256: {1: 111, 2: 187, 3: 265, 4: 320},
}
# Corrections by head dim, then by (consumers, tile_k): the measured time over the estimated one. Shapes not listed have 1.
PACES: dict[int, dict[tuple[int, int], float]] = {
    64: {
        **{(1, 48): 0.9, (1, 64): 0.99, (1, 128): 1.055},
        **{(2, 48): 0.92, (3, 112): 0.965, (3, 128): 0.97, (4, 64): 0.88},
    },
    96: {(1, 128): 1.095, (2, 32): 0.98, (3, 64): 0.9, (3, 96): 0.865, (3, 112): 0.865},
    128: {(1, 64): 1.01, (1, 80): 1.01, (1, 128): 1.02, (3, 64): 1.03, (3, 80): 1.03},
    256: {(1, 64): 1.1, (2, 48): 1.08, (2, 96): 0.97, (2, 128): 0.95},
}
# The time to load one key and its value for a tile, where heads begin inside a sector of 32 bytes. Those of other head dims
# load faster than any tile computes.
LOADS = {64: 0.6, 96: 0.73, 128: 0.74, 256: 0.0}

_T = TypeVar("_T")


def of_headdim(table: Mapping[int, _T], problem: Problem) -> _T:
    """The line of a table that serves a call."""
    headdim = max(problem.headdim, problem.headdim_v)
    for most, found in table.items():
        if headdim <= most:
            return found
    raise ValueError(f"no line for head dim {headdim}")


def load(problem: Problem) -> float:
    """The least time for one key of a tile, by how fast an SM loads keys and values. 0 if that is faster than any tile."""
    inside_sectors = any(dim % 16 for dim in (problem.headdim, problem.headdim_v))
    return of_headdim(LOADS, problem) if inside_sectors and not problem.float8 else 0.0
