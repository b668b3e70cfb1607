"""portable/combine.cu on the simulator, through the same host code as calls on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._call import partials
from rawattn._call.options import DEFAULTS
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._kernels.portable import combine as twin
from rawattn._runtime import on_gpu
from rawattn._runtime.combine import combine_verb
from rawattn._runtime.option_arrays import OptionsSplit
from rawattn._verbs import fast_path
from rawattn._verbs.combine import read
from tests import exhaustive
from tests.partials import FORMS, Call, Form, call_of
from tests.shim.device import Device
from tests.shim.launch import Machine
from tests.shim.on_device import Native, OnDevice, installed
from tests.shim.shim import Builder
from tests.shim.whole import run_verb


class Runs:
    """Runs calls through the same host code as calls on a GPU."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(
        self, call: Call, target: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        arrays, *form = read(call.outs, call.lses, call.form.result)
        given = OptionsSplit(combine_verb(*form), (), (), DEFAULTS)
        inputs = tuple(map(np.asarray, arrays))
        out, lse = run_verb(self.device, "portable", given, inputs, (target, None), False, False)
        for memory in self.device.memory:
            memory.array()  # asserts that nothing was written around it
        return out, lse


@pytest.fixture
def run(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runs]:
    def make(wave: int = 32, *, checked: bool = False) -> Runs:
        device = Device(Machine(builder, wave, checked))
        device.install(monkeypatch)
        return Runs(device)

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
    """Aligned inputs are read 16 bytes at a time without a copy: nothing but the results is allocated."""
    for form in (Form(), Form(layout="heads", stacked=True), Form(layout="reversed")):
        runs = run()
        call = call_of(form)
        runs(call)
        assert len(runs.device.memory) == len(read(call.outs, call.lses, None)[0]) + 2
        assert "16B 16B" in runs.device.summaries[0]


@pytest.mark.parametrize("offset", [0, 1])
def test_out_of_the_callers(offset: int, run: Callable[..., Runs]) -> None:
    call = call_of(Form(dtype="float32", result="float16"))
    buffer = np.full((2, 5, 9, 65), 7, np.float16)
    target = buffer[:, :, offset : offset + 4, offset : offset + 64]
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


class Gpu:
    """Runs whole calls with arrays of a stand-in framework. asked: how many of them went to the dispatcher."""

    def __init__(self, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.asked = Device(Machine(builder)), 0
        self.own: Native = installed(self.device, monkeypatch)
        run = fast_path.dispatch.run

        def counted(*given: Any) -> Any:
            self.asked += 1
            return run(*given)

        monkeypatch.setattr(fast_path.dispatch, "run", counted)

    def put(self, given: Any) -> Any:
        if isinstance(given, list):
            return [OnDevice(self.device, x) for x in given]
        return OnDevice(self.device, given)

    def call(self, call: Call) -> tuple[Any, Any]:
        return self.put(call.outs), self.put(call.lses)


@pytest.fixture
def gpu(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(builder, monkeypatch)


def results_of(made: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    return made[0].in_memory.array(), made[1].in_memory.array()


@pytest.mark.parametrize("stacked", [False, True])
def test_calls_like_earlier_ones(stacked: bool, gpu: Gpu) -> None:
    form = Form(stacked=stacked)
    for seed in range(4):
        call = call_of(form, seed)
        call.check(*results_of(rawattn.combine(*gpu.call(call))))
    assert gpu.asked == 2
    target = gpu.own.empty(form.shape, np.float16, None)
    for seed in range(3):
        call = call_of(form, seed)
        out, lse = rawattn.combine(*gpu.call(call), out=target)
        assert out is target
        call.check(*results_of((out, lse)))
    assert gpu.asked == 3
    outs, lses = gpu.call(call_of(Form()))
    with pytest.raises(ValueError, match=r"out: shares memory with outs\[1\]"):
        rawattn.combine(outs, lses, out=outs[1])


def test_addresses_of_calls_like_earlier_ones(gpu: Gpu) -> None:
    """A repeated call is right with arrays of another alignment, which may not be read 16 bytes at a time."""
    for layout in ("odd", "dense", "odd", "dense"):
        for seed in range(2):
            call = call_of(Form(dtype="float32", layout=layout), seed)
            call.check(*results_of(rawattn.combine(*gpu.call(call))))


def test_copies_of_a_captured_call_are_the_graphs(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    monkeypatch.setattr(on_gpu.graphs, "keep_forever", lambda *x: held.extend(x))
    call = call_of(Form(layout="mixed"))
    for capturing in (False, True):
        monkeypatch.setattr(on_gpu.streams, "is_capturing", lambda stream, now=capturing: now)
        call.check(*results_of(rawattn.combine(*gpu.call(call))))
        assert len(held) == (len(call.outs) + len(call.lses)) * capturing


@pytest.mark.parametrize("stacked", [False, True])
def test_a_plan(stacked: bool, gpu: Gpu) -> None:
    form = Form(stacked=stacked)
    call, other = call_of(form), call_of(form, seed=3)
    made = rawattn.plan(rawattn.combine, *gpu.call(call))
    assert gpu.device.launched == []
    first = gpu.call(other)
    results = made(*first)
    other.check(*results_of(results))
    assert made()[0] is results[0]
    call.check(*results_of(results))
    assert made(first[0], lses=first[1])[1] is results[1]
    other.check(*results_of(results))
    target = gpu.own.empty(form.shape, np.float16, None)
    out, lse = made(out=target)
    assert out is target
    call.check(*results_of((out, lse)))


def test_a_plan_is_for_one_form(gpu: Gpu) -> None:
    made = rawattn.plan(rawattn.combine, *gpu.call(call_of(Form())))
    for form, message in (
        (Form(count=2), r"outs: got a list of 2, expected a list of 3"),
        (Form(stacked=True), r"outs: got one array, expected a list of 3"),
        (Form(shape=(2, 6, 4, 64)), r"outs\[0\]: got shape \(2, 6, 4, 64\).*plan is for \(2, 5,"),
        (Form(dtype="bfloat16"), r"outs\[0\]: .*bfloat16.* plan is for .*float16"),
    ):
        with pytest.raises(ValueError, match=message):
            made(*gpu.call(call_of(form)))


@pytest.mark.parametrize("name", ["sparse", "mixed", "seventy", "sparse-stacked"])
def test_a_plan_copies_nothing(name: str, gpu: Gpu) -> None:
    (form,) = (x for x in FORMS if x.name == name)
    with pytest.raises(ValueError, match=r"outs(\[0\])?: .*, so each call would copy"):
        rawattn.plan(rawattn.combine, *gpu.call(call_of(form)))


def test_blocks_are_refused_before_they_are_too_many() -> None:
    out = np.broadcast_to(np.float16(0), (1 << 20, 1 << 14, 1, 128))
    lse = np.broadcast_to(np.float32(0), (1 << 20, 1, 1 << 14))
    sides = (partials.given(name, [x, x]) for name, x in (("outs", out), ("lses", lse)))
    problem, _ = partials.describe(*sides, None)
    with pytest.raises(ValueError, match=r"outs: .* split the batch"):
        twin.Config("float16", "float16", 128, 16, 16).blocks(problem, 32)
