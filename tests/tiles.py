"""Context managers that force kernels other than the usual choice: tiles of smaller GPUs, clusters, TMA stores, split keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from rawattn._call.problem import Problem, describe
from rawattn._kernels import tile_tables
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import forward as portable_forward
from rawattn._kernels.selection import only, using_tiles
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import (
    forward_config,
    line_estimate,
    query_tiles,
    stream_k,
    tile_choice,
)
from rawattn._kernels.target import SHARED_LIMIT, Target
from rawattn._runtime import kernel, on_gpu
from rawattn._verbs import fast_path
from tests.memory import DTYPES


@dataclass(frozen=True)
class TileShape:
    """What selects a tile shape: the dtype, D, and the bytes of shared memory of a block."""

    dtype: str
    headdim: int
    shared_limit: int
    tile: str

    def __str__(self) -> str:
        return f"{self.dtype}-d{self.headdim}-{self.tile}"


def tile_shapes() -> list[TileShape]:
    """One case of each tile shape of the portable forward, over all GPUs that it supports."""

    def tile(problem: Problem, limit: int) -> str:
        config = portable_forward.choose(problem, Target("sm_80", limit), Operands())
        return f"{config.tile_q}x{config.tile_k}x{config.waves}x{config.stages}"

    return _shapes(tile)


def backward_tile_shapes() -> list[TileShape]:
    """The same for the backward: tile shapes of its main kernel, together with those of the kernel of dq alone."""

    def tile(problem: Problem, limit: int) -> str:
        target = Target("sm_80", limit)
        main = portable_backward.choose(problem, target, Operands())
        dq = portable_backward.choose_dq(problem, target, Operands())
        waves = f"{main.key_waves}x{main.column_waves}"
        shape = f"{main.tile_q}x{main.tile_k}x{waves}x{main.stages}"
        return f"{shape}-{dq.tile_q}x{dq.tile_k}x{dq.waves}x{dq.stages}"

    return _shapes(tile)


def _shapes(tile: Callable[[Problem, int], str]) -> list[TileShape]:
    shapes: dict[Any, TileShape] = {}
    for dtype in ("bfloat16", "float32"):
        for headdim in (64, 96, 128, 192, 256):
            # long enough that the tables for short sequences do not apply
            q = np.broadcast_to(np.zeros((), DTYPES[dtype]), (1, 2048, 1, headdim))
            problem, _ = describe(q, q, q)
            for limit in sorted(set(SHARED_LIMIT.values()), reverse=True):
                shape = TileShape(dtype, headdim, limit, tile(problem, limit))
                shapes.setdefault((dtype, headdim, shape.tile), shape)
    return list(shapes.values())


@contextmanager
def large_tiles() -> Iterator[None]:
    """Make the backward take the tiles for many query rows, however few there are."""
    with (
        mock.patch.object(portable_backward, "is_short", return_value=False),
        nothing_prepared(),
    ):
        yield


@contextmanager
def nothing_prepared() -> Iterator[None]:
    """Prepare calls afresh, and forget them afterwards."""
    known: dict[str, dict[Any, Any]] = {name: {} for name in fast_path.closures_by_call}
    with (
        mock.patch.object(on_gpu, "_prepared", {}),
        mock.patch.object(fast_path, "closures_by_call", known),
    ):
        yield


@contextmanager
def aligning() -> Iterator[None]:
    """Make Hopper's forward copy operands that it cannot read in place, however short the sequences are."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sm90_forward, "ALIGN_SEQLEN", 1))
        stack.enter_context(nothing_prepared())
        yield


@contextmanager
def splitting(alike: bool = True) -> Iterator[None]:
    """Make Hopper's forward split its last tiles along keys wherever blocks would be idle otherwise, and weigh short ones.

    alike: True takes all query tiles to be about equally long. False takes none to be, so that causal tiles are weighted by
    their keys.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(query_tiles, "ALIKE", 0 if alike else 2))
        stack.enter_context(mock.patch.object(line_estimate, "ITEM_MERGE_COST_KEYS", 0))
        stack.enter_context(mock.patch.object(line_estimate, "_HARDLY_LONGER", -(2**31)))
        stack.enter_context(mock.patch.object(line_estimate, "_weighing_pays", return_value=alike))
        stack.enter_context(mock.patch.object(tile_choice, "_in_equal_rounds", return_value=True))
        least = {
            "ALWAYS_KEYS": 1,
            "LEAST_KEYS": 1,
            "LEAST_KEYS_UNLIKE": 1,
            "LEAST_GAIN_TILES": 0,
            "LEAST_PIECE_TILES": 1,
        }
        for name, value in least.items():
            stack.enter_context(mock.patch.object(stream_k, name, value))
        stack.enter_context(nothing_prepared())
        yield


@contextmanager
def sharing(keys: int) -> Iterator[None]:
    """Let consumers of Hopper's forward share the tiles of pieces of work from so few keys in pages on."""
    with mock.patch.object(forward_config, "_LEAST_SHARED_KEYS_PAGED", keys), nothing_prepared():
        yield


@contextmanager
def splitting_by_length() -> Iterator[None]:
    with splitting(alike=False):
        yield


@contextmanager
def splitting_in_clusters() -> Iterator[None]:
    with splitting(), clusters():
        yield


@contextmanager
def clusters() -> Iterator[None]:
    """Make the blocks of Hopper's forward work in pairs (clusters), whatever the head dim and however few the queries."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tile_choice, "LONG_SEQLEN", 1))
        for table in ("any", "long", "left"):
            rows = [
                replace(row, shape=tuple({**row.fields, "cluster": 2}.items()))
                for row in tile_tables.table(tile_choice.TILES, table)
            ]
            stack.enter_context(using_tiles(tile_choice.TILES, table, rows))
        stack.enter_context(usual_tiles())
        yield


@contextmanager
def usual_tiles() -> Iterator[None]:
    """Make Hopper's forward take the usual row of a table, however few SMs the small calls of tests keep busy."""
    with mock.patch.object(tile_choice, "_WORTH_CHANGING", 0):
        yield


@contextmanager
def whole_tiles() -> Iterator[None]:
    """Make calls take Hopper's forward, with query tiles of the usual shape, and whole ones."""
    with (
        only("sm90"),
        usual_tiles(),
        mock.patch.object(stream_k, "may_split_keys", return_value=False),
        nothing_prepared(),
    ):
        yield


@contextmanager
def tensor_stores() -> Iterator[None]:
    """Make Hopper's forward store its output by TMA where it can and where there is room: at head dims up to 128."""
    with ExitStack() as stack:
        for table in tile_tables.SCHEMAS[tile_choice.TILES].tables:
            rows = [
                replace(row, shape=tuple({**row.fields, "tensor_stores": True}.items()))
                if row.headdim <= 128
                else row
                for row in tile_tables.table(tile_choice.TILES, table)
            ]
            stack.enter_context(using_tiles(tile_choice.TILES, table, rows))
        yield


@contextmanager
def shared_limit(limit: int | None) -> Iterator[None]:
    """Make launches choose tiles as on a GPU with `limit` bytes of shared memory a block."""
    if limit is None:
        yield
        return

    target = kernel.target

    def smaller(device: int) -> Target:
        return replace(target(device), shared_limit=limit)

    with ExitStack() as stack:
        stack.enter_context(only("portable"))
        stack.enter_context(mock.patch.object(kernel, "target", smaller))
        stack.enter_context(large_tiles())
        # Launches prepared for the GPU as it is are kept for later calls.
        stack.enter_context(nothing_prepared())
        yield
