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
    64: {1: 135, 2: 194, 3: 265, 4: 290},
    96: {1: 120, 2: 231, 3: 324, 4: 475},
    128: {1: 121, 2: 240, 3: 265, 4: 300},
    256: {1: 150, 2: 240, 3: 265, 4: 300},
}
# Corrections by head dim, then by (consumers, tile_k): the measured time over the estimated one. Shapes not listed have 1.
PACES: dict[int, dict[tuple[int, int], float]] = {64: {(1, 48): 1.1, (2, 48): 0.95}, 256: {}}

_T = TypeVar("_T")


def of_headdim(table: Mapping[int, _T], problem: Problem) -> _T:
    """The line of a table that serves a call."""
    headdim = max(problem.headdim, problem.headdim_v)
    for most, found in table.items():
        if headdim <= most:
            return found
    raise ValueError(f"no line for head dim {headdim}")
