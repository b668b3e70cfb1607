"""The slots in shared memory to which a bias is copied, one for each key tile: in boxes by TMA, or row by row."""

from __future__ import annotations

from typing import NamedTuple

from rawattn._call.problem import Problem
from rawattn._kernels.operands import ITEMSIZE, Operands
from rawattn._kernels.source import round_up
from rawattn._kernels.steps import Geometry
from rawattn._strides import Strides

BOX_KEYS = 64  # 128 bytes of 16-bit elements
STAGES = 2  # slots, where shared memory has room for them
_ALIGNMENT = 1024  # bytes, of a box in shared memory and of all slots together
_PIECE = 16  # bytes: copies of a row begin and end at multiples of this


class Slot(NamedTuple):
    """What a slot holds: for each of `heads` heads `rows` rows of the bias. Each is 1 where the bias is the same for all."""

    rows: int
    heads: int
    by_rows: bool  # copied row by row (kernels_cu/sm90/forward_bias_rows.cuh), else in boxes


NONE = Slot(0, 0, False)


def slot(problem: Problem, operands: Operands, tile_q: int, heads_per_tile: int) -> Slot:
    """The slot of a tile of `tile_q` query rows a head. NONE where lanes must read the bias from global memory."""
    form = problem.bias
    # A float32 bias is read by lanes: shared memory has no room for two key tiles of it, and copies would take longer.
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
    """Bytes of `count` slots."""
    lines = slot.rows * slot.heads
    if slot.by_rows:
        return round_up(count * lines * (2 * tile_k + _PIECE), _ALIGNMENT)
    return count * -(-tile_k // BOX_KEYS) * round_up(lines * 128, _ALIGNMENT)


def strides(problem: Problem, operands: Operands) -> Strides:
    """The bias's strides in bytes for (batch, head, row, key), 0 along an axis of one element."""
    assert problem.bias is not None
    shape, given = problem.bias.shape, operands.option_strides["bias"]
    own = (0,) * (len(shape) - len(given)) + tuple(given)
    return tuple(stride if extent > 1 else 0 for stride, extent in zip(own, shape, strict=True))


def geometry(problem: Problem, operands: Operands, of: Slot) -> Geometry:
    """The tensor map of boxes, with axes (key, row, head, batch, unused). An axis whose elements share a bias has length 1."""
    assert problem.bias is not None
    batch, nheads, rows, keys = problem.bias.shape
    own = strides(problem, operands)[:3]
    extents = tuple(
        n if stride else 1 for n, stride in zip((batch, nheads, rows), own, strict=True)
    )
    # An axis of one element may have any legal stride.
    legal = tuple(stride or 16 for stride in own)
    return Geometry(
        dtype=problem.bias.dtype,
        dims=(keys, *reversed(extents), 1),
        strides=(*reversed(legal), 16),
        box=(BOX_KEYS, of.rows, of.heads, 1, 1),
        origin=0,
    )
