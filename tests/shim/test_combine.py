"""portable/combine.cu on the CPU machine, by the host code that a GPU's calls take."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn._call import partials
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._kernels.operands import contiguous
from rawattn._kernels.portable import combine as twin
from rawattn._kernels.portable.combine import Side
from rawattn._runtime import combine_gpu, combine_plan
from rawattn._runtime.combine import Read
from rawattn._runtime.combine_plan import Planned
from tests import exhaustive
from tests.partials import FORMS, Call, Form, call_of
from tests.shim.device import Device
from tests.shim.launch import Machine
from tests.shim.shim import POISON, Builder, Memory
from tests.shim.whole import Placed


class OnDevice(np.ndarray):
    """An array of NumPy's in memory that kernels reach, as CuPy would have it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)


class Runs:
    """Makes calls as if of CuPy's arrays."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        device.install(monkeypatch)
        cuda = SimpleNamespace(
            Device=lambda ordinal: nullcontext(),
            get_current_stream=lambda: SimpleNamespace(ptr=0),
        )
        fake = SimpleNamespace(ndarray=self.empty, ascontiguousarray=self.copied, cuda=cuda)
        monkeypatch.setitem(sys.modules, "cupy", fake)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> OnDevice:
        raw = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, POISON, np.uint8)
        memory = self.device.keep(Memory("new", raw, readonly=False))
        return _view(
            memory, memory.address, shape, contiguous(shape, np.dtype(dtype).itemsize), dtype
        )

    def copied(self, array: OnDevice) -> OnDevice:
        new = self.empty(array.shape, array.dtype)
        new[...] = array
        return new

    def placed(self, name: str, array: np.ndarray, *, readonly: bool = True) -> OnDevice:
        placed = Placed(name, array, readonly=readonly)
        self.device.keep(placed.memory)
        return _view(placed.memory, placed.address, array.shape, array.strides, array.dtype)

    def read(self, call: Call) -> Read:
        sides = partials.given("outs", call.outs), partials.given("lses", call.lses)
        described = partials.describe(*sides, *(x.arrays for x in sides), call.form.result)
        given = [
            [self.placed(n, x) for n, x in zip(side.names(), side.arrays, strict=True)]
            for side in sides
        ]
        return Read(described, sides, *given, None, 0)

    def __call__(
        self, call: Call, target: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        out = None if target is None else self.placed("out", target, readonly=False)
        results = combine_gpu.cuda(*self.read(call)[:4], out)
        for memory in self.device.memory:
            memory.array()  # not written around
        out, lse = (x.view(np.ndarray) for x in results)
        return out, lse


def _view(
    memory: Memory, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any
) -> OnDevice:
    raw = memory._bytes
    return np.ndarray(shape, dtype, raw, address - memory.address, strides).view(OnDevice)


@pytest.fixture
def run(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runs]:
    def make(wave: int = 32, *, checked: bool = False) -> Runs:
        return Runs(Device(Machine(builder, wave, checked)), monkeypatch)

    return make


@pytest.mark.parametrize(
    ("form", "wave"), exhaustive.thin(itertools.product(FORMS, (32, 64)), 5), ids=str
)
def test_forms(form: Form, wave: int, run: Callable[..., Runs]) -> None:
    call = call_of(form)
    runs = run(wave)
    call.check(*runs(call))
    assert runs.device.launched == ([] if 0 in form.shape else ["rawattn_combine"])


@pytest.mark.parametrize("form", exhaustive.thin(FORMS[::4], 4), ids=str)
def test_undefined_behaviour(form: Form, run: Callable[..., Runs]) -> None:
    call = call_of(form)
    call.check(*run(checked=True)(call))


def test_a_full_list(run: Callable[..., Runs]) -> None:
    call = call_of(Form("full", MAX_LISTED, (1, 2, 3, 24)))
    call.check(*run()(call))


def test_what_lies_well_is_read_as_it_lies(run: Callable[..., Runs]) -> None:
    """Sixteen bytes at a time, without a copy: beside the results nothing is allocated."""
    for form in (Form(), Form(layout="heads", stacked=True), Form(layout="reversed")):
        runs = run()
        runs(call_of(form))
        assert [x.name for x in runs.device.memory].count("new") == 2
        assert "16B 16B" in runs.device.summaries[0]


@pytest.mark.parametrize("place", [0, 1])
def test_out_of_the_callers(place: int, run: Callable[..., Runs]) -> None:
    call = call_of(Form(dtype="float32", result="float16"))
    buffer = np.full((2, 5, 9, 65), 7, np.float16)
    target = buffer[:, :, place : place + 4, place : place + 64]
    out, lse = run()(call, target)
    call.check(out, lse)


@pytest.mark.parametrize("lost", [0, 2])
def test_nan_of_a_partial_that_weighs_comes_out(lost: int, run: Callable[..., Runs]) -> None:
    call = call_of(Form(dtype="float32", dead=0.0))
    call.lses[lost][0, 1, 3] = np.nan
    out, lse = run()(call)
    assert np.isnan(lse[0, 1, 3])
    assert np.isnan(out[0, 3, 1]).all()
    assert np.isnan(lse).sum() == 1
    for each in call.lses:
        each[0, 1, 3] = np.nan
    assert np.isnan(run()(call)[1][0, 1, 3])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    own = SimpleNamespace(stream=lambda device: 0)
    monkeypatch.setattr(combine_plan, "native", lambda framework: own)
    monkeypatch.setattr(combine_plan.streams, "wait", lambda stream, device: found.append(stream))
    return found


@pytest.mark.parametrize("stacked", [False, True])
def test_a_plan(stacked: bool, run: Callable[..., Runs], waits: list[int]) -> None:
    runs = run()
    form = Form(stacked=stacked)
    call, other = call_of(form), call_of(form, seed=3)
    planned = Planned(runs.read(call), None, "cupy", SimpleNamespace(ptr=0))
    assert waits == [0]
    assert runs.device.launched == []
    before = len(runs.device.memory)
    for case in (call, other, call):
        read = runs.read(case)
        planned.check(read)
        out, lse = combine_gpu.cuda(*read[:4], planned.out, planned.lse)
        assert out is planned.out
        assert lse is planned.lse
        case.check(out.view(np.ndarray), lse.view(np.ndarray))
    assert all(x.name != "new" for x in runs.device.memory[before:])


def test_a_plan_is_for_one_form(run: Callable[..., Runs], waits: list[int]) -> None:
    runs = run()
    planned = Planned(runs.read(call_of(Form())), None, "cupy", SimpleNamespace(ptr=0))
    for form, message in (
        (Form(count=2), r"outs: got 2 partials"),
        (Form(stacked=True), r"outs: got 3 partials .* not listed or stacked as planned"),
        (
            Form(shape=(2, 6, 4, 64)),
            r"outs\[0\]: got shape \(2, 6, 4, 64\).*the plan is for \(2, 5,",
        ),
        (Form(dtype="bfloat16"), r"outs\[0\]: .*bfloat16; the plan is for .*float16"),
    ):
        with pytest.raises(ValueError, match=message):
            planned.check(runs.read(call_of(form)))


@pytest.mark.parametrize("name", ["sparse", "mixed", "seventy", "sparse-stacked"])
def test_a_plan_copies_nothing(name: str, run: Callable[..., Runs]) -> None:
    (form,) = (x for x in FORMS if x.name == name)
    with pytest.raises(ValueError, match=r"outs: has .*, so each call would copy it"):
        Planned(run().read(call_of(form)), None, "cupy", SimpleNamespace(ptr=0))


def test_blocks_are_refused_before_they_are_too_many() -> None:
    shape = (1 << 20, 1 << 14, 1, 128)
    described = partials.Partials(2, shape, (1 << 20, 1, 1 << 14), np.dtype("f2"), np.dtype("f2"))
    side = Side(contiguous(shape, 2), None)
    config = twin.choose(described, side, side.strides, 0, 0)
    with pytest.raises(ValueError, match=r"outs: .* split the batch"):
        config.blocks(described, 32)
