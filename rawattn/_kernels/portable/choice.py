"""How the portable kernels' host twins choose: the first row of a tile table that holds the head dims and fits."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from rawattn._call.problem import Problem
from rawattn._kernels import source, tile_tables


class _Config(Protocol):
    @property
    def shared_bytes(self) -> int: ...


_C = TypeVar("_C", bound=_Config)


def choose(
    config: type[_C],
    tiles: str,
    problem: Problem,
    *,
    copy_bytes: int,
    shared_limit: int,
    **more: bool,
) -> _C:
    """The fastest known configuration of `problem` that fits `shared_limit` bytes of shared memory a block.

    config: the dataclass to make; `tiles`: the file of its tables; `more`: fields that neither these nor the problem say.
    copy_bytes: the widest access that every row of the kernel's arrays allows (2 to 16).
    """
    wide = max(source.round_up(problem.headdim, 16), source.round_up(problem.headdim_v, 16))
    full = problem.dtype == "float32"
    fields: dict[str, Any] = {
        "element": source.ELEMENT[problem.dtype],
        "headdim": problem.headdim,
        "headdim_v": problem.headdim_v,
        "copy_bytes": copy_bytes,
        "ragged": problem.ragged,
        **source.masks(problem),
        "accumulator_feeds_a": not full,
        **more,
    }
    # The last row of each headdim fits every GPU since Ampere.
    for row in tile_tables.table(tiles, "32bit" if full else "16bit"):
        candidate = config(**row.fields, **fields)
        if wide <= row.headdim and candidate.shared_bytes <= shared_limit:
            return candidate
    raise AssertionError(f"no tile of the table fits {shared_limit} bytes of shared memory")
