"""Copies of arrays whose rows do not begin at multiples of 16 bytes: their room and the kernel's parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._kernels import helper_params
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import align_rows
from rawattn._kernels.source import round_up
from tests.problems import problem

D = {"q": 9, "k": 9, "v": 13}
HEADS = {"q": 4, "k": 2, "v": 2}
ROWS = {"q": 15, "k": 21, "v": 21}


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("batch", [None, 3])
def test_a_copy_has_every_row(name: str, batch: int | None) -> None:
    axes = () if batch is None else (batch,)
    shapes = {each: (*axes, ROWS[each], HEADS[each], D[each]) for each in D}
    seqs = None if batch else SeqLayout(seqstart_q=[0, 9, 15], seqstart_k=[0, 2, 21])
    given = {each: np.empty(shape, np.float16).strides for each, shape in shapes.items()}
    made = align_rows.copy(problem(shapes, seqs=seqs), Operands(given, 2), name, "copy")
    *rest, headdim = shapes[name]
    room = np.empty((*rest, round_up(headdim, 8)), np.float16)
    assert (made.nbytes, made.strides) == (room.nbytes, room.strides)
    count = (batch or 1) * ROWS[name]
    assert made.step.blocks == -(-count // (align_rows.THREADS // 32))
    params: Any = np.frombuffer(made.step.params, helper_params.ALIGN_ROWS.dtype)[0]
    fields = {"batch": batch or 1, "rows": ROWS[name], "nheads": HEADS[name]}
    assert {field: params[field] for field in fields} == fields
