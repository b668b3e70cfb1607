"""Host twin of kernels_cu/attn/schedule/order_sequences.cuh: the order of a ragged batch's sequences, found on the GPU."""

from __future__ import annotations

from typing import Literal

from rawattn._call.structure import Structure
from rawattn._kernels.params import ORDERED_SEQUENCE
from rawattn._kernels.steps import SubTask, side_fields, side_names


def order_bytes(batch: int) -> int:
    """Bytes of an order: an entry for each sequence, and one behind the last."""
    return ORDERED_SEQUENCE.dtype.itemsize * (batch + 1)


def sub_task(structure: Structure, tile: int, *, of: Literal["q", "k"], name: str) -> SubTask:
    """The part of a setup launch that writes an order of the sequences to the address called `name`.

    of: the side whose tiles are handed out in this order. tile: rows of such a tile. The sequences that are longest on the
    other side come first.
    """
    other: Literal["q", "k"] = "k" if of == "q" else "q"
    tiled, longest = structure.side(of), structure.side(other)
    return SubTask(
        {
            **side_fields("tiled", tiled),
            **side_fields("other", longest),
            "batch": structure.batch,
            "tile": tile,
        },
        {
            "order": name,
            **side_names("tiled", tiled, of),
            **side_names("other", longest, other),
        },
    )
