"""Calls of a compiled JAX program, as `rawattn.jax` launches them: on a stand-in for CuPy, against the float64 reference."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn._call.problem import describe
from rawattn._interop import streams
from rawattn._jax import launch
from rawattn._jax.record import Record, with_operands
from tests.cases import Case, dense, padded, ragged
from tests.gradients import backward_of, check_gradient
from tests.shim.device import Allocator, Device
from tests.shim.launch import Machine
from tests.shim.shim import Builder, Memory
from tests.tolerance import check, check_lse
from tests.verify import expected, layout

SMALL = {"headdim": 16, "nheads_q": 4, "nheads_kv": 2}
CASES = [
    dense("dense", 2, 70, 90, **SMALL, causal=True),
    padded("padded", (5, 40, 0), (30, 1, 7), 40, 33, **SMALL, causal=True),
    ragged("ragged", (70, 0, 9), (30, 9, 90), **SMALL, window=(20, 3), sink=2),
]
# The last column of a cell says whether the program computes the lengths.
CELLS = [
    (case, traced) for case in CASES for traced in (False, True)[: 1 if case.name == "dense" else 2]
]
IDS = [f"{case}-{'traced' if traced else 'constant'}" for case, traced in CELLS]


@pytest.fixture
def device(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(Machine(builder))
    device.install(monkeypatch)
    allocator = Allocator(device)

    def alloc(nbytes: int) -> Any:
        owner, address = allocator.keep(nbytes, 0)
        return SimpleNamespace(ptr=address, owner=owner)

    monkeypatch.setattr(sys.modules["cupy"].cuda, "alloc", alloc, raising=False)
    monkeypatch.setattr(streams, "external", lambda handle: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_launchers", {})
    return device


def run(device: Device, record: Record, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Runs a call twice in memory that holds garbage; returns the results of the second run."""
    given = [device.keep(Memory("input", x)) for x in inputs]
    made = [
        device.keep(Memory("output", np.full(shape, np.nan, dtype), readonly=False))
        for shape, dtype in record.outputs
    ]
    call: Any = SimpleNamespace(
        text=record.text.encode(),
        inputs=[memory.address for memory in given],
        outputs=[memory.address for memory in made],
        forms=lambda: [
            *((x.shape, x.dtype.name) for x in inputs),
            *((shape, dtype.name) for shape, dtype in record.outputs),
        ],
    )
    for _ in range(2):
        taken = []  # keeps XLA's memory alive until the call is over

        def allocate(nbytes: int, taken: list[Any] = taken) -> int:
            owner, address = Allocator(device).allocate(nbytes, 0)
            taken.append(owner)
            return address

        call.allocate = allocate
        launch.launcher(call.text, 0).launch(call, 0)
    likes = zip(made, record.outputs, strict=True)
    return [memory.array().reshape(shape) for memory, (shape, _) in likes]


def record_of(case: Case, traced: bool, **fields: Any) -> tuple[Record, list[np.ndarray]]:
    inputs = backward_of(case).inputs
    qkv = [x.view() for x in (inputs.q, inputs.k, inputs.v)]
    problem, lengths = describe(*qkv, seqs=layout(inputs), **inputs.options)
    operands: list[np.ndarray] = []
    if traced:
        lengths, operands = with_operands(lengths)
        assert operands
    return Record(problem, lengths, lse=True, **fields), operands


@pytest.mark.parametrize(("case", "traced"), CELLS, ids=IDS)
def test_forward(device: Device, case: Case, traced: bool) -> None:
    record, operands = record_of(case, traced, deterministic=False)
    inputs, exact = backward_of(case).inputs, expected(case)
    out, lse = run(device, record, [*(x.view() for x in (inputs.q, inputs.k, inputs.v)), *operands])
    rows, log = inputs.rows, lse.swapaxes(-1, -2)
    check(out[rows], exact.out, exact.low_out, what="out")
    check_lse(log[rows], exact.lse, exact.low_lse)
    assert not np.any(out[~rows].astype(np.float32)) and np.all(log[~rows] == -np.inf)
    (launcher,) = launch._launchers.values()
    assert len(launcher.prepared) == 1


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize(("case", "traced"), CELLS, ids=IDS)
def test_backward(device: Device, case: Case, traced: bool, deterministic: bool) -> None:
    record, operands = record_of(case, traced, deterministic=deterministic, backward=True)
    call = backward_of(case)
    arrays = (call.dout, call.inputs.q, call.inputs.k, call.inputs.v, call.out)
    dlse = np.zeros_like(call.lse) if call.dlse is None else call.dlse
    gradients = run(device, record, [*(x.view() for x in arrays), call.lse, dlse, *operands])
    for n, (gradient, rows) in enumerate(zip(gradients, call.rows, strict=True)):
        check_gradient(call, n, gradient[rows])
        assert not np.any(gradient[~rows].astype(np.float32)), "padding is not 0"
