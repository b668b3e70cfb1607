"""The setup launch of a ragged call: how often it is launched, and integers of the host that its parameters carry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn._kernels import helper_params
from rawattn._kernels.portable import ragged_setup
from rawattn._runtime.prepared import Prepared
from rawattn._runtime.verbs import FORWARD
from tests.cases import Case, padded, ragged
from tests.shim.cells import call_of
from tests.shim.device import Allocator, Device
from tests.shim.launch import (
    Machine,
    Operand,
    new_order,
    order_of,
    ordered,
    padding,
    set_up,
)
from tests.shim.shim import POISON, Builder, Memory
from tests.shim.test_launches import bound, prepared, strided_view
from tests.tolerance import check
from tests.verify import expected

SMALL = {"nheads_q": 2, "nheads_kv": 1, "headdim": 16}
GAPS = {"room_q": (40, 9, 3), "by_q": "seqlen"}
SETUP, CARRYING, MAIN = "rawattn_ragged_setup", "rawattn_carrying_setup", "attention"


@pytest.fixture
def device(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(Machine(builder))
    device.install(monkeypatch)
    return device


def carried(case: Case, builder: Builder, wave: int, which: str) -> None:
    """Checks a call in which the setup launch carries the integers of the sides in `which` into memory that held poison."""
    call = call_of(case)
    forward = call.forward()
    memory = list(forward._memory)
    words: list[np.ndarray] = []
    fields: list[Any] = []
    for name, side, each in (
        ("q", forward.q_side, call.lengths.q),
        ("k", forward.k_side, call.lengths.k),
    ):
        if name in which:
            for what, integers in (("start", each.start), ("length", each.length)):
                if integers is not None:
                    side[what]["data"] = 8 * sum(x.size for x in words) // 2  # bytes from `to`
                    raw = np.frombuffer(integers.tobytes(), np.uint32)
                    words.append(np.append(raw, np.zeros(raw.size % 2, np.uint32)))
                    fields.append(side[what])
    sent = np.concatenate(words)
    to = Memory("sent", np.full(sent.nbytes, POISON, np.uint8).view(np.uint64), readonly=False)
    for each in fields:
        each["data"] += to.address
    batch, tile = call.problem.batch, 16
    order = new_order(batch)
    schedule = order_of(forward.q_side, forward.k_side, batch, tile, order)
    heads, headdim = call.problem.nheads_q, call.problem.headdim_v
    fill = padding(call.problem, call.lengths, "q", forward.q_side, forward.out, heads, headdim)
    fill[0]["out"] = forward.out.address
    set_up(
        Machine(builder, wave),
        [*memory, order, to],
        schedules=[schedule],
        paddings=[fill],
        words=sent,
        to=to.address,
    )
    expected = np.argsort(-np.array(case.lens_k), kind="stable")
    np.testing.assert_array_equal(ordered(order)["sequence"][:-1], expected)
    tiles = -(-np.array(case.lens_q)[expected] // tile)
    np.testing.assert_array_equal(ordered(order)["first_tile"], [0, *np.cumsum(tiles)])
    out = strided_view(call.out, forward.out)
    assert not np.any(out[~call.inputs.rows].astype(np.float32))
    np.testing.assert_array_equal(to.array().view(np.uint32), sent)


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("which", ["qk", "q", "k"])
@pytest.mark.parametrize("integers", ["int32", "int64"])
def test_integers_are_read_where_they_come(
    which: str, integers: str, wave: int, builder: Builder
) -> None:
    knobs = {**SMALL, "integers": integers}
    carried(ragged("gaps", (30, 9, 0), (50, 1, 70), **knobs, **GAPS), builder, wave, which)
    lens = [(7 * n) % 23 for n in range(300 if integers == "int32" else 100)]
    carried(ragged("many", lens, lens[::-1], **knobs, tail=9), builder, wave, which)
    by = {"by_q": "cu_seqlen", "by_k": "seqlen"}
    carried(padded("padded", (5, 40, 0), (30, 1, 7), 40, 33, **knobs, **by), builder, wave, which)


def named(device: Device) -> list[str]:
    """The launched kernels, all attention kernels under one name."""
    return [x if x in (SETUP, CARRYING) else MAIN for x in device.launched]


class Runs:
    """A forward of a case, run by a call that was prepared for it or for a case of the same structure."""

    def __init__(self, device: Device, case: Case) -> None:
        self.device, self.case, self.call = device, case, call_of(case)
        self.problem, self.lengths = bound(device, case)
        inputs = {"q": self.call.inputs.q, "k": self.call.inputs.k, "v": self.call.inputs.v}
        self.operands = {name: Operand(name, x) for name, x in inputs.items()}
        self.operands["out"] = Operand("out", self.call.out, readonly=False)
        device.memory += [operand.memory for operand in self.operands.values()]

    def prepared(self) -> Prepared:
        return prepared(FORWARD, self.problem, self.lengths, self.operands, {"out"}, True)

    def addresses(self) -> list[int]:
        return [*(self.operands[name].address for name in ("q", "k", "v", "out")), 0]

    def out(self) -> np.ndarray:
        """The present content of `out`, after checking its rows."""
        exact, rows = expected(self.case), self.call.inputs.rows
        out = strided_view(self.call.out, self.operands["out"])
        check(out[rows], exact.out, exact.low_out, what="out")
        return out

    def run(self, call: Prepared) -> list[str]:
        """Runs the call, checks the result and returns the kernels that it launched."""
        self.device.launched.clear()
        call.run(self.addresses(), 0, Allocator(self.device), self.lengths)
        self.out()
        return named(self.device)


@pytest.mark.parametrize(
    ("case", "launched"),
    [
        (ragged("host", (70, 0, 9), (30, 9, 90), **SMALL), [[CARRYING, MAIN], [MAIN]]),
        (
            ragged("host-gaps", (30, 9, 0), (50, 1, 70), **SMALL, **GAPS),
            [[CARRYING, MAIN], [SETUP, MAIN]],
        ),
        (
            ragged("device", (70, 0, 9), (30, 9, 90), **SMALL, on_device=True, max_seqlen=True),
            [[SETUP, MAIN], [SETUP, MAIN]],
        ),
    ],
    ids=str,
)
def test_launches_of_a_layout(device: Device, case: Case, launched: list[list[str]]) -> None:
    runs = Runs(device, case)
    call = runs.prepared()
    assert [runs.run(call) for _ in launched] == launched


@pytest.mark.parametrize("side", ["q", "k"])
def test_integers_of_the_host_beside_those_of_a_device(device: Device, side: str) -> None:
    runs = Runs(device, ragged("beside", (30, 9, 0), (50, 1, 70), **SMALL, **GAPS))
    there = device.lengths(runs.lengths)
    runs.lengths = replace(there, **{side: getattr(runs.lengths, side)})
    call = runs.prepared()
    assert [runs.run(call) for _ in range(2)] == [[CARRYING, MAIN], [SETUP, MAIN]]


@pytest.mark.parametrize("case_of", [ragged, padded])
def test_layouts_of_one_structure_share_a_call(device: Device, case_of: Any) -> None:
    """Layouts of one structure share a prepared call, even if their longest sequences and numbers of tiles differ."""
    rows = (40, 40) if case_of is padded else ()
    cases = [
        case_of(f"lens-{n}", lens, lens[::-1], *rows, **{**SMALL, "nheads_kv": 2})
        for n, lens in enumerate([(30, 18, 16), (17, 31, 16), (16, 17, 31)])
    ]
    first, *others = [Runs(device, case) for case in cases]
    call = first.prepared()
    for runs in (first, *others, first):
        runs.run(call)


def test_more_integers_than_a_launch_carries(device: Device) -> None:
    count = helper_params.WORDS_A_LAUNCH + 100
    lens = [n % 3 for n in range(count)]
    case = ragged("many", lens, lens, **SMALL, tail=2)
    sending = -(
        -2 * 4 * (count + 2) // ragged_setup.MOST
    )  # starts of q and of k, an even number each
    assert sending > 1 and count % 2 == 0
    runs = Runs(device, case)
    call = runs.prepared()
    assert runs.run(call) == [*[CARRYING] * sending, SETUP, MAIN]
    assert runs.run(call) == [SETUP, MAIN]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_plan_fills_its_own_padding_and_not_the_caller_s(device: Device, on_device: bool) -> None:
    gaps = {**SMALL, **GAPS, "on_device": on_device, "max_seqlen": True}
    case = ragged("plan", (30, 9, 0), (50, 1, 70), **gaps)
    runs = Runs(device, case)
    own = runs.prepared().plan_memory(Allocator(device), 0, runs.lengths)
    assert device.launched == ([] if on_device else [CARRYING])
    rows = runs.call.inputs.rows
    before = strided_view(runs.call.out, runs.operands["out"])
    for theirs in ([3], []):
        device.launched.clear()
        own.run(runs.addresses(), 0, None, theirs)
        assert named(device) == [SETUP, MAIN]
        padding_rows = runs.out()[~rows].view(np.uint8)
        if theirs:
            np.testing.assert_array_equal(padding_rows, before[~rows].view(np.uint8))
        else:
            assert not padding_rows.any()
