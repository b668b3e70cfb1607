"""A bias that is copied to slots beside the keys: in boxes by TMA, or row by row; and the boxes' tensor map."""

from __future__ import annotations

from typing import NamedTuple

from rawattn._call.problem import Problem
from rawattn._kernels.operands import ITEMSIZE, Operands
from rawattn._kernels.source import round_up
from rawattn._kernels.steps import Geometry
from rawattn._strides import Strides

BOX_KEYS = 64  # 128 bytes of 16-bit elements
STAGES = 2  # key tiles whose bias may be there or under way, where shared memory has room for them
_ALIGNMENT = 1024  # of boxes in shared memory, and of what has the slots
_PIECE = 16  # bytes: what is copied of a row begins and ends at multiples of it


class Slot(NamedTuple):
    """What a slot holds of a key tile: rows of each of its heads, 1 where all share one."""

    rows: int
    heads: int
    by_rows: bool  # copied one by one (kernels_cu/sm90/forward_bias_rows.cuh), else in boxes


NONE = Slot(0, 0, False)


def slot(problem: Problem, operands: Operands, tile_q: int, heads_per_tile: int) -> Slot:
    """Of a tile of so many query rows in each of so many heads. NONE where lanes must read the bias from memory."""
    form = problem.bias
    # Rows of 32 bits have no room for two key tiles, and copies of them take longer than lanes do.
    if (
        form is None
        or ITEMSIZE[form.dtype] != 2
        or not form.dense
        or "bias" not in operands.alignments
    ):
        return NONE
    *between, _ = strides(problem, operands)
    aligned = operands.alignments["bias"] % 16 == 0 and all(stride % 16 == 0 for stride in between)
    legal = all(0 <= stride < 2**40 for stride in between)
    in_boxes = aligned and legal
    _, head, row = between
    own_heads = head != 0 and form.shape[1] == problem.nheads_q
    return Slot(tile_q if row else 1, heads_per_tile if own_heads else 1, not in_boxes)


def nbytes(slot: Slot, count: int, tile_k: int) -> int:
    """Of so many slots."""
    lines = slot.rows * slot.heads
    if slot.by_rows:
        return round_up(count * lines * (2 * tile_k + _PIECE), _ALIGNMENT)
    return count * -(-tile_k // BOX_KEYS) * round_up(lines * 128, _ALIGNMENT)


def strides(problem: Problem, operands: Operands) -> Strides:
    """In bytes, of all four axes: 0 where the bias is the same for all."""
    assert problem.bias is not None
    shape, given = problem.bias.shape, operands.of_options["bias"]
    own = (0,) * (len(shape) - len(given)) + tuple(given)
    return tuple(stride if extent > 1 else 0 for stride, extent in zip(own, shape, strict=True))


def geometry(problem: Problem, operands: Operands, of: Slot) -> Geometry:
    """The map of boxes: axes (key, row, head, batch, nothing). An axis along which the bias is the same has one element."""
    assert problem.bias is not None
    batch, nheads, rows, keys = problem.bias.shape
    own = strides(problem, operands)[:3]
    extents = tuple(
        n if stride else 1 for n, stride in zip((batch, nheads, rows), own, strict=True)
    )
    # The stride of an axis of one element says nothing.
    legal = tuple(stride or 16 for stride in own)
    return Geometry(
        dtype=problem.bias.dtype,
        dims=(keys, *reversed(extents), 1),
        strides=(*reversed(legal), 16),
        box=(BOX_KEYS, of.rows, of.heads, 1, 1),
        origin=0,
    )
