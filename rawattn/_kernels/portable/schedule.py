"""Host twin of kernels_cu/portable/order_sequences.cuh: the order of a ragged batch's sequences, found on the GPU."""

from __future__ import annotations

from typing import Literal

from rawattn._call.structure import Structure
from rawattn._kernels.steps import Part, side_fields, side_names


def order_bytes(batch: int) -> int:
    """Of `order`, the sequences."""
    return 4 * batch


def first_tile_bytes(batch: int) -> int:
    """Of `first_tile`: the tiles before each sequence in that order, then their total."""
    return 4 * (batch + 1)


def part(structure: Structure, tile: int, *, of: Literal["q", "k"], names: tuple[str, str]) -> Part:
    """Writes `order` and `first_tile` under these names.

    tile: rows of the tiles to hand out, which are those `of` one side; sequences that are longest on the other come
    first.
    """
    other: Literal["q", "k"] = "k" if of == "q" else "q"
    tiled, longest = structure.side(of), structure.side(other)
    return Part(
        {
            **side_fields("q_side", tiled),
            **side_fields("k_side", longest),
            "batch": structure.batch,
            "tile_q": tile,
        },
        {
            **dict(zip(("order", "first_tile"), names, strict=True)),
            **side_names("q_side", tiled, of),
            **side_names("k_side", longest, other),
        },
    )


def orders(structure: Structure, names: tuple[str, str]) -> dict[str, int]:
    """Bytes of what a part writes, by name."""
    return dict(
        zip(names, (order_bytes(structure.batch), first_tile_bytes(structure.batch)), strict=True)
    )
