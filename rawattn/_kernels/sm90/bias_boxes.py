"""A bias by the copy engine: which ones lie so, in what boxes they come, and their tensor map."""

from __future__ import annotations

from typing import NamedTuple

from rawattn._call.problem import Problem
from rawattn._kernels.operands import ITEMSIZE, Operands, Strides
from rawattn._kernels.steps import Geometry

BOX_KEYS = 64  # 128 bytes of 16-bit elements
STAGES = 2  # key tiles whose bias may be there or under way, where shared memory has room for them
_SLOT_ALIGNMENT = 1024  # of a box in shared memory


class Boxes(NamedTuple):
    """What a box holds: rows of each of its heads, 1 where all share one."""

    rows: int
    heads: int

    def slot_bytes(self, tile_k: int) -> int:
        """Of the boxes of a key tile."""
        aligned = -(-self.rows * self.heads * 128 // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        return -(-tile_k // BOX_KEYS) * aligned


NONE = Boxes(0, 0)


def boxes(problem: Problem, operands: Operands, tile_q: int, heads_per_tile: int) -> Boxes:
    """Of a tile of so many query rows in each of so many heads. NONE where lanes must read the bias from memory."""
    form = problem.bias
    if form is None or ITEMSIZE[form.dtype] != 2 or not form.dense or "bias" not in operands.places:
        return NONE
    *between, _ = strides(problem, operands)
    aligned = operands.places["bias"] % 16 == 0 and all(stride % 16 == 0 for stride in between)
    if not aligned or not all(0 <= stride < 2**40 for stride in between):
        return NONE
    _, head, row = between
    own_heads = head != 0 and form.shape[1] == problem.nheads_q
    return Boxes(tile_q if row else 1, heads_per_tile if own_heads else 1)


def strides(problem: Problem, operands: Operands) -> Strides:
    """In bytes, of all four axes: 0 where the bias is the same for all."""
    assert problem.bias is not None
    shape, given = problem.bias.shape, operands.of_options["bias"]
    own = (0,) * (len(shape) - len(given)) + tuple(given)
    return tuple(stride if extent > 1 else 0 for stride, extent in zip(own, shape, strict=True))


def geometry(problem: Problem, operands: Operands, box: Boxes) -> Geometry:
    """The map: axes (key, row, head, batch, nothing). An axis along which the bias is the same has one element."""
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
        box=(BOX_KEYS, box.rows, box.heads, 1, 1),
        origin=0,
    )
