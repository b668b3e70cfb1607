"""The launch code itself, on a stand-in for CuPy with simulated kernels, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn._call.layout import Lengths
from rawattn._call.problem import describe, result_shapes
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import align_rows
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from rawattn._runtime import calls
from rawattn._runtime.prepared import Prepared
from rawattn._runtime.verbs import BACKWARD, FORWARD, Verb
from tests import exhaustive
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import unaligned
from tests.gradients import NAMES, backward_of, check_gradient
from tests.memory import CANARY, Strided, strided
from tests.shim.cells import call_of
from tests.shim.device import ATTRIBUTES, Allocator, Device
from tests.shim.launch import Machine, Operand
from tests.shim.shim import Builder, Memory
from tests.tiles import aligning, splitting, tensor_stores, usual_tiles
from tests.tolerance import check, check_lse
from tests.verify import expected, layout

SMALL = {"headdim": 16, "nheads_q": 4, "nheads_kv": 2}
DEVICE = {"on_device": True, "max_seqlen": True}
CASES = [
    dense("dense", 2, 70, 90, **SMALL, causal=True),
    dense("other-dims", 1, 33, 50, headdim=24, headdim_v=40, dtype="float32", window=(9, 3)),
    dense("no-queries", 2, 0, 9, **SMALL),
    dense("no-keys", 2, 9, 0, **SMALL),
    padded("padded", (5, 40, 0), (30, 1, 7), 40, 33, **SMALL, causal=True),
    padded("padded-device", (5, 40, 0), (30, 1, 7), 40, 33, **SMALL, **DEVICE),
    ragged("ragged", (70, 0, 9), (30, 9, 90), **SMALL, window=(20, 3), sink=2),
    ragged("ragged-device", (70, 0, 9), (30, 9, 90), **SMALL, **DEVICE, causal=True),
    ragged("slots", (30, 9), (50, 1), **SMALL, room_q=(40, 9), room_k=(60, 8), by_q="seqlen", by_k="cu_seqlen"),
    ragged("given", (30, 9), (50, 1), **SMALL, tail=9, give_out=True, layout="gaps"),
]  # fmt: skip


@pytest.fixture
def device(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(Machine(builder))
    device.install(monkeypatch)
    return device


def bound(device: Device, case: Case) -> tuple[Any, Lengths]:
    """The problem and the lengths of a case, in the device's memory if the case has them there."""
    inputs = call_of(case).inputs
    arrays = [x.view() for x in (inputs.q, inputs.k, inputs.v)]
    problem, lengths = describe(*arrays, seqs=layout(inputs), **inputs.options)
    return problem, device.lengths(lengths) if case.on_device else lengths


def prepared(
    verb: Verb,
    problem: Any,
    lengths: Lengths,
    operands: dict[str, Operand],
    ours: set[str],
    flag: bool,
) -> Prepared:
    pointers = 0
    for operand in operands.values():
        pointers |= operand.address
    strides = {name: operand.strides for name, operand in operands.items()}
    together = Operands(strides, pointers % 16, frozenset(ours))
    return calls.launches(verb, problem, lengths, together, flag, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(device: Device, case: Case) -> None:
    call = call_of(case)
    problem, lengths = bound(device, case)
    ours = not case.give_out
    inputs = {"q": call.inputs.q, "k": call.inputs.k, "v": call.inputs.v}
    operands = {name: Operand(name, x) for name, x in inputs.items()}
    operands["out"] = Operand("out", call.out, readonly=False)
    _, lse_shape = result_shapes(problem)
    lse = device.keep(Memory("lse", np.full(lse_shape, np.nan, np.float32), readonly=False))
    device.memory += [operand.memory for operand in operands.values()]
    filled = {"out", "lse"} if ours else {"lse"}
    forward = prepared(FORWARD, problem, lengths, operands, filled, True)
    exact, rows = expected(case), call.inputs.rows
    for _ in range(2):
        addresses = [*(operands[name].address for name in ("q", "k", "v", "out")), lse.address]
        forward.run(addresses, 0, Allocator(device), lengths)
        out = strided_view(call.out, operands["out"])
        check(out[rows], exact.out, exact.low_out, what="out")
        log = lse.array().reshape(lse_shape).swapaxes(-1, -2)
        check_lse(log[rows], exact.lse, exact.low_lse)
        assert np.all(log[~rows] == -np.inf)
        if ours:
            assert not np.any(out[~rows].astype(np.float32))


@pytest.mark.parametrize("give_out", [False, True])
@pytest.mark.parametrize("case_of", [ragged, padded])
def test_outputs_that_tma_stores(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, case_of: Any, give_out: bool
) -> None:
    """Hopper's forward stores by TMA, through a map of `out`, in packed calls with many tiles and in others that allow it."""
    device = Device(Machine(builder), sm90_forward.ARCH)
    device.install(monkeypatch)
    rooms = (90, 100) if case_of is padded else ()
    knobs = {**SMALL, "causal": True, "give_out": give_out, "layout": "gaps"}
    with tensor_stores() if case_of is padded else usual_tiles():
        test_forward(device, case_of("stores", (70, 0, 9), (30, 9, 90), *rooms, **knobs))
    (summary,) = {each for each in device.summaries if each.startswith("sm90 forward")}
    assert "tensor_stores" in summary


def test_maps_follow_the_arrays_that_change(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch has tensor maps of its own arrays, whichever of them have changed since the last launch."""
    device = Device(Machine(builder), sm90_forward.ARCH)
    device.install(monkeypatch)
    cases = [ragged(name, (70, 9), (30, 90), **SMALL, layout="gaps") for name in ("one", "two")]
    arrays = []
    for case in cases:
        call = call_of(case)
        inputs = {"q": call.inputs.q, "k": call.inputs.k, "v": call.inputs.v}
        operands = {name: Operand(name, x) for name, x in inputs.items()}
        operands["out"] = Operand("out", call.out, readonly=False)
        device.memory += [operand.memory for operand in operands.values()]
        arrays.append(operands)
    problem, lengths = bound(device, cases[0])
    with usual_tiles():
        forward = prepared(FORWARD, problem, lengths, arrays[0], set(), False)
    exact, rows = [expected(case) for case in cases], call_of(cases[0]).inputs.rows
    assert not np.array_equal(exact[0].out, exact[1].out)
    for read, written in ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0)):
        addresses = [arrays[read][name].address for name in ("q", "k", "v")]
        out = arrays[written]["out"]
        forward.run([*addresses, out.address, 0], 0, Allocator(device), lengths)
        found = strided_view(call_of(cases[written]).out, out)[rows]
        check(found, exact[read].out, exact[read].low_out, what="out")
    assert any("tensor_stores" in summary for summary in device.summaries)


@pytest.mark.parametrize("rows", [(70, 400), (20, 300), (500, 200)])
def test_tiles_split_by_keys(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int]
) -> None:
    """Split keys are right with fewer tiles than blocks and with more, also in a second launch with the same counters."""
    device = Device(Machine(builder), sm90_forward.ARCH)
    device.install(monkeypatch)
    with splitting():
        test_forward(device, dense("shared", 2, *rows, **SMALL))
    assert device.launched == [sm90_forward_config.ENTRY] * 2


@pytest.mark.parametrize("case", exhaustive.thin(unaligned(), 3), ids=str)
def test_operands_that_hopper_cannot_read(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    device = Device(Machine(builder), sm90_forward.ARCH)
    device.install(monkeypatch)
    with aligning():
        test_forward(device, case)
    assert device.launched.count(align_rows.ENTRY) == 2 * 3
    assert device.launched.count(sm90_forward_config.ENTRY) == 2


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(device: Device, case: Case, deterministic: bool) -> None:
    call = backward_of(case)
    problem, lengths = bound(device, case)
    inputs = call.inputs
    given = {"dout": call.dout, "q": inputs.q, "k": inputs.k, "v": inputs.v, "out": call.out}
    operands = {name: Operand(name, x) for name, x in given.items()}
    into = dict(zip(NAMES, call.into or map(canaries, call.shapes, [inputs.q] * 3), strict=True))
    for name, array in into.items():
        operands[name] = Operand(name, array, readonly=False)
    device.memory += [operand.memory for operand in operands.values()]
    lse = device.keep(Memory("lse", call.lse)).address
    dlse = 0 if call.dlse is None else device.keep(Memory("dlse", call.dlse)).address
    ours = call.into is None
    backward = prepared(
        BACKWARD, problem, lengths, operands, set(NAMES) if ours else set(), deterministic
    )
    addresses = {name: operand.address for name, operand in operands.items()}
    addresses |= {"lse": lse, "dlse": dlse}
    for _ in range(2):
        backward.run([addresses[name] for name in BACKWARD.names], 0, Allocator(device), lengths)
        for n, (name, rows) in enumerate(zip(NAMES, call.rows, strict=True)):
            gradient = strided_view(into[name], operands[name])
            check_gradient(call, n, gradient[rows])
            if ours:
                assert not np.any(gradient[~rows].astype(np.float32)), f"{name}: padding is not 0"


def test_kernels_of_a_backward(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward launches no kernel that has nothing to do."""
    # All blocks of the first case run at once.
    monkeypatch.setitem(ATTRIBUTES, "multiprocessors", 4)
    device = Device(Machine(builder))
    device.install(monkeypatch)
    test_backward(device, CASES[1], deterministic=False)
    usual = ["rawattn_backward_prepare", "rawattn_backward", "rawattn_backward_finish"]
    assert device.launched == usual * 2
    device.launched.clear()
    test_backward(device, CASES[0], deterministic=False)  # all keys are in one tile
    assert device.launched == usual[1:2] * 2
    device.launched.clear()
    test_backward(device, CASES[0], deterministic=True)
    alone = ["rawattn_backward_prepare", "rawattn_backward", "rawattn_backward_dq"]
    assert device.launched == [*alone, *usual[2:]] * 2  # it is causal: finish computes NaN again
    device.launched.clear()
    test_backward(device, CASES[2], deterministic=False)  # no queries: dk and dv are 0
    assert device.launched == ["rawattn_backward"] * 2


def canaries(shape: tuple[int, ...], like: Strided) -> Strided:
    array = strided(shape, like.buffer.dtype, "dense")
    array.buffer.view(np.uint8)[:] = CANARY
    return array


def strided_view(array: Strided, operand: Operand) -> np.ndarray:
    """The present content of the operand's memory, in the array's shape."""
    return replace(array, buffer=operand.buffer()).view()
