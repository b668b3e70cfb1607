"""portable/combine.cu on the CPU machine: every form, and nothing else touched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rawattn._call import partials
from rawattn._kernels import params
from rawattn._kernels.operands import contiguous
from rawattn._kernels.params import MAX_LISTED
from rawattn._kernels.portable import combine
from rawattn._kernels.portable.combine import Side
from rawattn._runtime.combine import _strides
from tests.cases import CANARY
from tests.partials import FORMS, Call, Form, call_of
from tests.shim.launch import Machine
from tests.shim.shim import Builder, Memory


class Placed:
    """An array in memory that ends where it ends."""

    def __init__(self, name: str, array: np.ndarray, *, readonly: bool = True) -> None:
        reach = [stride * (n - 1) for n, stride in zip(array.shape, array.strides, strict=True)]
        first, last = sum(x for x in reach if x < 0), sum(x for x in reach if x > 0)
        lowest = array.__array_interface__["data"][0] + first
        window = np.frombuffer(_bytes_at(array, lowest, last - first + array.itemsize), np.uint8)
        self.memory = Memory(name, window, phase=lowest % 16, readonly=readonly)
        self.address = self.memory.address - first
        self.array, self._first = array, first

    def read(self) -> np.ndarray:
        """The array as it is now."""
        content = self.memory.array()
        return np.ndarray(
            self.array.shape, self.array.dtype, content, -self._first, self.array.strides
        )


def _bytes_at(array: np.ndarray, address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)


def run(
    machine: Machine, call: Call, target: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, of arrays that the kernel can read as they lie."""
    sides = partials.given("outs", call.outs), partials.given("lses", call.lses)
    described = partials.describe(*sides, *(x.arrays for x in sides), call.form.result)
    if target is None:
        target = np.ndarray(described.shape, described.result)
    lse = np.ndarray(described.lse_shape, np.float32)
    lse.reshape(-1).view(np.uint8)[:] = CANARY
    named = {
        "out": Placed("out", target, readonly=False),
        "lse": Placed("lse", lse, readonly=False),
    }
    lying = []
    for side in sides:
        for n, x in enumerate(side.arrays):
            named[f"{side.name}{n}"] = Placed(f"{side.name}{n}", x)
        lying.append(_side(side.arrays, side.listed))
    pointers = 0
    for n in range(len(sides[0].arrays)):
        pointers |= named[f"outs{n}"].address
    to = named["out"].address
    step = combine.step(
        described, *lying, _strides(target.shape, target.strides), pointers % 16, to % 16
    )
    packed = bytearray(step.params)
    for at, name in step.patches:
        packed[at : at + 8] = named[name].address.to_bytes(8, "little")
    config = combine.choose(
        described, lying[0], _strides(target.shape, target.strides), pointers, to
    )
    machine.run(
        step.source,
        np.frombuffer(packed, params.COMBINE.dtype),
        grid=config.blocks(described, machine.wave),
        threads=step.threads,
        memory=[x.memory for x in named.values()],
    )
    return named["out"].read(), named["lse"].read()


def _side(given: Sequence[np.ndarray], listed: bool) -> Side:
    (strides,) = {_strides(x.shape, x.strides) for x in given}
    return Side(strides, None) if listed else Side(strides[1:], strides[0])


# What the caller's side copies first never reaches the kernel as it was.
AS_THEY_LIE = [
    form
    for form in FORMS
    if form.layout not in ("mixed", "sparse")
    and 0 not in form.shape
    and (form.stacked or form.count <= MAX_LISTED)
]


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("form", AS_THEY_LIE, ids=str)
def test_forms(form: Form, wave: int, builder: Builder) -> None:
    call = call_of(form)
    call.check(*run(Machine(builder, wave), call))


@pytest.mark.parametrize("form", AS_THEY_LIE[::4], ids=str)
def test_undefined_behaviour(form: Form, builder: Builder) -> None:
    call = call_of(form)
    call.check(*run(Machine(builder, checked=True), call))


def test_a_full_list(builder: Builder) -> None:
    call = call_of(Form("full", MAX_LISTED, (1, 2, 3, 24)))
    call.check(*run(Machine(builder), call))


@pytest.mark.parametrize("place", [0, 1])
def test_out_of_the_callers(place: int, builder: Builder) -> None:
    call = call_of(Form(dtype="float32", result="float16"))
    buffer = np.full((2, 5, 9, 65), 7, np.float16)
    target = buffer[:, :, place : place + 4, place : place + 64]
    out, lse = run(Machine(builder), call, target)
    call.check(out, lse)


@pytest.mark.parametrize("lost", [0, 2])
def test_nan_of_a_partial_that_weighs_comes_out(lost: int, builder: Builder) -> None:
    call = call_of(Form(dtype="float32", dead=0.0))
    call.lses[lost][0, 1, 3] = np.nan
    out, lse = run(Machine(builder), call)
    assert np.isnan(lse[0, 1, 3])
    assert np.isnan(out[0, 3, 1]).all()
    assert np.isnan(lse).sum() == 1
    for each in call.lses:
        each[0, 1, 3] = np.nan
    assert np.isnan(run(Machine(builder), call)[1][0, 1, 3])


def test_blocks_are_refused_before_they_are_too_many() -> None:
    shape = (1 << 20, 1 << 14, 1, 128)
    described = partials.Partials(2, shape, (1 << 20, 1, 1 << 14), np.dtype("f2"), np.dtype("f2"))
    side = Side(contiguous(shape, 2), None)
    config = combine.choose(described, side, side.strides, 0, 0)
    with pytest.raises(ValueError, match=r"outs: .* split the batch"):
        config.blocks(described)
