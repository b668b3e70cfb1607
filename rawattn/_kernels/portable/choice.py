"""How the portable kernels' host twins choose: the first row of a tile table that holds the head dims and fits."""

from __future__ import annotations

from typing import Any, TypeVar

from rawattn._call.problem import Problem
from rawattn._kernels import tile_tables
from rawattn._kernels.features import Features, features
from rawattn._kernels.operands import Operands
from rawattn._kernels.source import ELEMENT, round_up
from rawattn._kernels.target import Target

_C = TypeVar("_C", bound=Features)


def choose(
    config: type[_C],
    tiles: str,
    problem: Problem,
    target: Target,
    operands: Operands,
    table: str | None = None,
    **more: Any,
) -> _C:
    """The fastest known configuration of `problem` that fits the target's shared memory.

    config: the dataclass to make; its `shared_bytes` decides whether a row fits.
    tiles: the file of its tile tables.
    table: its name; by default that of the elements, "16bit" or "32bit".
    more: the fields that neither a row nor the problem gives.
    """
    wide = max(round_up(problem.headdim, 16), round_up(problem.headdim_v, 16))
    full = problem.dtype == "float32"
    fields: dict[str, Any] = {
        "element": ELEMENT[problem.dtype],
        "headdim": problem.headdim,
        "headdim_v": problem.headdim_v,
        "copy_bytes": operands.copy_bytes(problem),
        **features(problem, operands).known_to(config),
        # So it is on every target whose waves have 32 lanes.
        "accumulator_feeds_a": not full and target.wave == 32,
        "wave": target.wave,
        **more,
    }
    # Rows of one head dim are in the order of speed. The last one fits every GPU since Ampere.
    for row in tile_tables.table(tiles, table or ("32bit" if full else "16bit")):
        candidate: Any = config(**row.fields, **fields)
        if wide <= row.headdim and candidate.shared_bytes <= target.shared_limit:
            chosen: _C = candidate
            return chosen
    raise AssertionError(f"no tile of the table fits {target.shared_limit} bytes of shared memory")
