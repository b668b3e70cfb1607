"""What is launched before all else of a ragged call: how often, and with integers that come in its own parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn._kernels import helper_params
from rawattn._kernels.portable import ragged_setup
from rawattn._runtime.verbs import FORWARD
from tests.cases import Case, padded, ragged
from tests.shim.cells import call_of
from tests.shim.device import Allocator, Device
from tests.shim.launch import Machine, Operand, order_of, padding, set_up
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
    """The integers of the sides in `which` come with the launch, where kernels find poison; others are in memory."""
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
                    side[what]["data"] = 8 * sum(x.size for x in words) // 2  # words from `to`
                    raw = np.frombuffer(integers.tobytes(), np.uint32)
                    words.append(np.append(raw, np.zeros(raw.size % 2, np.uint32)))
                    fields.append(side[what])
    sent = np.concatenate(words)
    to = Memory("sent", np.full(sent.nbytes, POISON, np.uint8).view(np.uint64), readonly=False)
    for each in fields:
        each["data"] += to.address
    batch, tile = call.problem.batch, 16
    order = Memory("order", np.full(batch, -1, np.int32), readonly=False)
    first_tile = Memory("first_tile", np.zeros(batch + 1, np.int32), readonly=False)
    schedule = order_of(forward.q_side, forward.k_side, batch, tile, order, first_tile)
    heads, headdim = call.problem.nheads_q, call.problem.headdim_v
    fill = padding(call.problem, call.lengths, "q", forward.q_side, forward.out, heads, headdim)
    fill[0]["out"] = forward.out.address
    set_up(
        Machine(builder, wave),
        [*memory, order, first_tile, to],
        schedules=[schedule],
        paddings=[fill],
        words=sent,
        to=to.address,
    )
    expected = np.argsort(-np.array(case.lens_k), kind="stable")
    np.testing.assert_array_equal(order.array(), expected)
    tiles = -(-np.array(case.lens_q)[expected] // tile)
    np.testing.assert_array_equal(first_tile.array(), [0, *np.cumsum(tiles)])
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
    """What has been launched, kernels of attention by one name."""
    return [x if x in (SETUP, CARRYING) else MAIN for x in device.launched]


def run_forward(device: Device, case: Case, times: int) -> list[list[str]]:
    """What each of so many runs with one layout launches; their results are checked."""
    call = call_of(case)
    problem, lengths = bound(device, case)
    inputs = {"q": call.inputs.q, "k": call.inputs.k, "v": call.inputs.v}
    operands = {name: Operand(name, x) for name, x in inputs.items()}
    operands["out"] = Operand("out", call.out, readonly=False)
    device.memory += [operand.memory for operand in operands.values()]
    forward = prepared(FORWARD, problem, lengths, operands, {"out"}, True)
    exact, rows = expected(case), call.inputs.rows
    launched = []
    for _ in range(times):
        device.launched.clear()
        addresses = [*(operands[name].address for name in ("q", "k", "v", "out")), 0]
        forward.run(addresses, 0, Allocator(device), lengths)
        out = strided_view(call.out, operands["out"])
        check(out[rows], exact.out, exact.low_out, what="out")
        launched.append(named(device))
    return launched


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
    assert run_forward(device, case, 2) == launched


def test_more_integers_than_a_launch_carries(device: Device) -> None:
    count = helper_params.WORDS_A_LAUNCH + 100
    lens = [n % 3 for n in range(count)]
    case = ragged("many", lens, lens, **SMALL, tail=2)
    sending = -(
        -2 * 4 * (count + 2) // ragged_setup.MOST
    )  # starts of q and of k, an even number each
    assert sending > 1 and count % 2 == 0
    first = [*[CARRYING] * sending, SETUP, MAIN]
    assert run_forward(device, case, 2) == [first, [SETUP, MAIN]]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_plan_fills_its_own_padding_and_not_the_caller_s(device: Device, on_device: bool) -> None:
    gaps = {**SMALL, **GAPS, "on_device": on_device, "max_seqlen": True}
    case = ragged("plan", (30, 9, 0), (50, 1, 70), **gaps)
    call = call_of(case)
    problem, lengths = bound(device, case)
    inputs = {"q": call.inputs.q, "k": call.inputs.k, "v": call.inputs.v}
    operands = {name: Operand(name, x) for name, x in inputs.items()}
    operands["out"] = Operand("out", call.out, readonly=False)
    device.memory += [operand.memory for operand in operands.values()]
    forward = prepared(FORWARD, problem, lengths, operands, {"out"}, True)
    own = forward.own(Allocator(device), 0, lengths)
    assert device.launched == ([] if on_device else [CARRYING])
    exact, rows = expected(case), call.inputs.rows
    before = strided_view(call.out, operands["out"])
    for theirs in ([3], []):
        device.launched.clear()
        addresses = [*(operands[name].address for name in ("q", "k", "v", "out")), 0]
        own.run(addresses, 0, None, theirs)
        assert named(device) == [SETUP, MAIN]
        out = strided_view(call.out, operands["out"])
        check(out[rows], exact.out, exact.low_out, what="out")
        padding_rows = out[~rows].view(np.uint8)
        if theirs:
            np.testing.assert_array_equal(padding_rows, before[~rows].view(np.uint8))
        else:
            assert not padding_rows.any()
