"""attn/fill_padding.cuh writes every row outside the sequences, and no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cases import Case, padded, ragged
from tests.memory import CANARY
from tests.shim.cells import call_of
from tests.shim.launch import Machine
from tests.shim.shim import Builder


def cases() -> list[Case]:
    lens, rooms = (5, 0, 30, 1), (5, 3, 47, 1)
    packed = {"room_q": rooms, "by_q": "seqlen", "give_out": True}
    plain = [
        ragged("no-gaps", lens, lens, give_out=True),
        ragged("around", lens, lens, lead=9, tail=70, give_out=True),
        ragged("between", lens, lens, **packed),
        ragged("everywhere", lens, lens, **packed, lead=1, tail=2, integers="int64"),
        ragged("nothing-else", (0, 0), (4, 4), **{**packed, "room_q": (0, 0)}, lead=100),
        ragged("no-sequences", (), (), lead=11, give_out=True),
        padded("batch", lens, lens, 50, 50, give_out=True),
        padded("batch-cumulative", lens, lens, 50, 50, by_q="cu_seqlen", give_out=True),
    ]
    wide = [replace(plain[3], name=f"d{n}", headdim=32, headdim_v=n) for n in (1, 7, 64, 65, 256)]
    lying = [replace(plain[3], layout=layout) for layout in ("bhsd", "gaps", "reversed", "odd")]
    lying = [replace(case, name=case.layout) for case in lying]
    return [*plain, *wide, *lying, *(replace(case, dtype="float32") for case in plain)]


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("what", ["both", "out", "lse"])
def test_padding_is_filled(case: Case, what: str, wave: int, builder: Builder) -> None:
    call = call_of(case)
    forward = call.forward(return_lse=what != "out")
    forward.fill_padding(Machine(builder, wave), fill_out=what != "lse")

    buffer = forward.out.buffer().view(f"u{call.out.buffer.itemsize}")
    expected = replace(call.out, buffer=call.out.buffer.view(buffer.dtype).copy())
    if what != "lse":
        expected.view()[~call.inputs.rows] = 0
    np.testing.assert_array_equal(buffer, expected.buffer)
    if forward.lse is not None:
        log = forward.lse.array().reshape(forward.lse_shape).swapaxes(-1, -2)
        assert np.all(log[~call.inputs.rows] == -np.inf)
        untouched = np.ascontiguousarray(log[call.inputs.rows])
        assert np.all(untouched.view(np.uint8) == CANARY)
