"""Host twin of kernels_cu/portable/schedule.cu: the order of a ragged batch's sequences, found on the GPU."""

from __future__ import annotations

import functools
from typing import Literal

from rawattn._call.structure import Structure
from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, patches, side_fields, side_patches

THREADS = 128
SHARED_BYTES = 8 * THREADS


@functools.cache
def source() -> Source:
    entry, file = "rawattn_schedule", "portable/schedule.cu"
    return _source(entry, file, "portable schedule", helper_params.SCHEDULE)


def blocks(batch: int) -> int:
    return -(-batch // THREADS)


def order_bytes(batch: int) -> int:
    """Of `order`, the sequences."""
    return 4 * batch


def first_tile_bytes(batch: int) -> int:
    """Of `first_tile`: the tiles before each sequence in that order, then their total."""
    return 4 * (batch + 1)


def step(structure: Structure, tile: int, *, of: Literal["q", "k"], names: tuple[str, str]) -> Step:
    """Writes `order` and `first_tile` under these names.

    tile: rows of the tiles to hand out, which are those `of` one side; sequences that are longest on the other come
    first.
    """
    other: Literal["q", "k"] = "k" if of == "q" else "q"
    values = {
        **side_fields("q_side", structure.side(of)),
        **side_fields("k_side", structure.side(other)),
        "batch": structure.batch,
        "tile_q": tile,
    }
    order, first_tile = names
    return Step(
        source=source(),
        blocks=blocks(structure.batch),
        threads=THREADS,
        params=structs.fill(helper_params.SCHEDULE, values),
        patches=(
            *patches(helper_params.SCHEDULE, order=order, first_tile=first_tile),
            *side_patches(helper_params.SCHEDULE, "q_side", structure.side(of), of),
            *side_patches(helper_params.SCHEDULE, "k_side", structure.side(other), other),
        ),
        shared_bytes=SHARED_BYTES,
    )


def orders(structure: Structure, names: tuple[str, str]) -> dict[str, int]:
    """Bytes of what a step writes, by name."""
    return dict(
        zip(names, (order_bytes(structure.batch), first_tile_bytes(structure.batch)), strict=True)
    )
