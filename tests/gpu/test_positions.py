"""Positions of sequences in longer ones: their values are data, wherever they are and however a call is repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout
from tests.frameworks import CuPy, Torch

cupy = pytest.importorskip("cupy")
CUPY = CuPy()

ROWS, KEYS = 200, 300
# Of two sequences: keys around, behind and before the queries.
POSITIONS = [([100, 0], [0, 0]), ([0, 20], [250, 300]), ([900, 55], [7, 2]), ([3, 3], [3, 3])]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (60, 5), "sink": 40},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def framework_of(name: str) -> Any:
    if name == "torch":
        pytest.importorskip("torch")
        return Torch("cuda")
    return CUPY


def inputs(framework: Any, *, rows: int = ROWS, packed: bool = False) -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = ((2, rows, 4, 64), (2, KEYS, 2, 64), (2, KEYS, 2, 64))
    drawn = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
    if packed:
        drawn = [x.reshape(-1, *x.shape[2:]) for x in drawn]
    if framework is CUPY:
        return [cupy.asarray(x) for x in drawn]
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(x).cuda() for x in drawn]


def layout(framework: Any, positions: Any, rows: int, *, packed: bool, device: bool) -> SeqLayout:
    made = framework.integers if device else (lambda x: x)
    given = {
        f"position_{side}": made(np.array(x, np.int32))
        for side, x in zip("qk", positions, strict=True)
    }
    if packed:
        for side, count in (("q", rows), ("k", KEYS)):
            given[f"seqstart_{side}"] = made(np.arange(3, dtype=np.int32) * count)
    return SeqLayout(**given)


def exact(
    arrays: list[Any], framework: Any, positions: Any, rows: int, packed: bool, options: Any
) -> Any:
    seqs = layout(framework, positions, rows, packed=packed, device=False)
    return rawattn.reference.attention(*map(framework.host, arrays), seqs=seqs, **options)


@each_option
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_new_layouts_of_one_form(
    name: str, rows: int, packed: bool, device: bool, options: dict[str, Any]
) -> None:
    """Calls that repeat an earlier one take the positions of their own layout."""
    framework = framework_of(name)
    arrays = inputs(framework, rows=rows, packed=packed)
    for positions in POSITIONS * 3:
        seqs = layout(framework, positions, rows, packed=packed, device=device)
        got = framework.host(rawattn.attention(*arrays, seqs=seqs, **options))
        expected = exact(arrays, framework, positions, rows, packed, options)
        np.testing.assert_allclose(got.astype(np.float64), expected, atol=4e-3)


@each_option
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_positions_change_in_place(name: str, options: dict[str, Any]) -> None:
    """A kept layout, its plan and its graph read the positions that are on the GPU when they run."""
    framework = framework_of(name)
    arrays = inputs(framework)
    kept = cupy.zeros(2, np.int32), cupy.zeros(2, np.int64)
    seqs = SeqLayout(position_q=kept[0], position_k=kept[1])
    plan = rawattn.plan(rawattn.attention, *arrays, seqs=seqs, **options)
    out = plan(*arrays)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    captured = inputs(CUPY)
    with stream:
        rawattn.attention(*captured, seqs=seqs, **options)
        stream.begin_capture()
        of_graph = rawattn.attention(*captured, seqs=seqs, **options)
        graph = stream.end_capture()
    for positions in POSITIONS:
        for array, values in zip(kept, positions, strict=True):
            array[...] = cupy.asarray(values)
        cupy.cuda.Device().synchronize()
        expected = exact(arrays, framework, positions, ROWS, False, options)
        found = rawattn.attention(*arrays, seqs=seqs, **options)
        plan(*arrays)
        graph.launch(stream)
        stream.synchronize()
        for got in (framework.host(found), framework.host(out), of_graph.get()):
            np.testing.assert_allclose(got.astype(np.float64), expected, atol=4e-3)


def test_a_plan_takes_other_positions() -> None:
    arrays = inputs(CUPY)
    first = [cupy.zeros(2, np.int32) for _ in "qk"]
    seqs = SeqLayout(position_q=first[0], position_k=first[1])
    plan = rawattn.plan(rawattn.attention, *arrays, seqs=seqs, causal=True)
    for positions in POSITIONS:
        named = {
            f"position_{n}": cupy.array(x, np.int32) for n, x in zip("qk", positions, strict=True)
        }
        got = plan(*arrays, **named).get().astype(np.float64)
        expected = exact(arrays, CUPY, positions, ROWS, False, {"causal": True})
        np.testing.assert_allclose(got, expected, atol=4e-3)


@each_option
def test_parts_make_the_whole(options: dict[str, Any]) -> None:
    """Parts of the keys, merged, give the rows of one call on all of them; gradients add up."""
    arrays = inputs(CUPY)
    dout = arrays[0][::-1].copy()
    at = {"align": "top-left", **options}
    expected, lse = rawattn.attention(*arrays, return_lse=True, **at)
    gradients = rawattn.attention_backward(dout, *arrays, expected, lse, **at)
    q, k, v = arrays
    parts = [slice(0, 130), slice(130, 145), slice(145, KEYS)]
    layouts = [SeqLayout(position_q=[0, 0], position_k=[x.start] * 2) for x in parts]
    found = [
        rawattn.attention(q, k[:, x], v[:, x], seqs=seqs, return_lse=True, **options)
        for x, seqs in zip(parts, layouts, strict=True)
    ]
    out, own_lse = rawattn.combine(*zip(*found, strict=True))
    np.testing.assert_allclose(*(x.get().astype(np.float32) for x in (out, expected)), atol=4e-3)
    np.testing.assert_allclose(own_lse.get(), lse.get(), atol=2e-3)
    dq = np.zeros(q.shape, np.float32)
    for x, seqs in zip(parts, layouts, strict=True):
        each = rawattn.attention_backward(
            dout, q, k[:, x], v[:, x], out, own_lse, seqs=seqs, **options
        )
        dq += each.dq.get().astype(np.float32)
        for name in ("dk", "dv"):
            got, wanted = getattr(each, name), getattr(gradients, name)[:, x]
            np.testing.assert_allclose(
                *(a.get().astype(np.float32) for a in (got, wanted)), atol=2e-2
            )
    np.testing.assert_allclose(dq, gradients.dq.get().astype(np.float32), atol=2e-2)
