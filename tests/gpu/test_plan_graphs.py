"""Plans of short kernels launch a graph of their own: the same bits on any stream, in any thread, and into other graphs."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._runtime import plan_launches
from tests.cases import Case, dense, ragged
from tests.frameworks import CuPy
from tests.gpu.gate import closed, still_closed
from tests.gpu.test_plan import framework_of
from tests.gpu.test_streams_graphs import arguments, bits
from tests.inputs import materialise

cupy = pytest.importorskip("cupy")
CUPY = CuPy()

_LENS_Q, _LENS_K = (100, 3, 64), (80, 200, 0)
CASES = [
    dense("dense", 1, 128, 128, nheads_q=16, nheads_kv=16),
    dense("decode", 1, 1, 2048, nheads_q=32, nheads_kv=8),
    dense("float32", 1, 90, 70, dtype="float32"),
    ragged("host", _LENS_Q, _LENS_K, causal=True),
    ragged("device", _LENS_Q, _LENS_K, on_device=True),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the streams on which plans launch their graphs."""
    streams: list[Any] = []
    enqueue = cupy.cuda.runtime.graphLaunch

    def launch(graph: int, stream: int) -> None:
        streams.append(stream)
        enqueue(graph, stream)

    monkeypatch.setattr(cupy.cuda.runtime, "graphLaunch", launch)
    return streams


def planned(case: Case, framework: Any = CUPY) -> tuple[rawattn.Plan, list[bytes]]:
    """A plan and the bits of its results."""
    call = arguments(materialise(case), case, framework)
    expected = bits(rawattn.attention(**call), framework)
    q, k, v = (call.pop(name) for name in "qkv")
    return rawattn.plan(rawattn.attention, q, k, v, **call), expected


def poison(results: Any) -> None:
    for x in results:
        x.fill(np.nan) if isinstance(x, cupy.ndarray) else x.fill_(np.nan)


@each_case
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_the_same_bits(case: Case, name: str, graphs: list[Any]) -> None:
    framework = framework_of(name)
    plan, expected = planned(case, framework)
    for n in range(3):
        results = plan()
        assert len(graphs) == n + 1
        assert bits(results, framework) == expected
        poison(results)


@each_case
def test_other_streams(case: Case, graphs: list[Any]) -> None:
    plan, expected = planned(case)
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.ptds, cupy.cuda.Stream()):
        for _ in range(2):
            poison(plan())
            cupy.cuda.Device().synchronize()
            with stream:
                results = plan()
                assert bits(results, CUPY) == expected
            assert graphs[-1] == stream.ptr


@each_case
def test_into_another_graph(case: Case, graphs: list[Any]) -> None:
    plan, expected = planned(case)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        poison(plan())
        del graphs[:]
        stream.begin_capture()
        results = plan()
        captured = stream.end_capture()
        assert not graphs
        for _ in range(3):
            captured.launch(stream)
            assert bits(results, CUPY) == expected
            poison(results)
            assert bits(plan(), CUPY) == expected
            poison(results)


def test_other_arrays_do_not_change_the_graph(graphs: list[Any]) -> None:
    plan, expected = planned(CASES[0])
    q = plan._inputs[0]
    for _ in range(3):
        others = bits(plan(-q), CUPY)
        count = len(graphs)
        assert others != expected
        assert bits(plan(), CUPY) == expected
        assert len(graphs) == count + 1


@each_case
def test_a_new_thread(case: Case) -> None:
    """A thread in which no context is current yet."""
    plan, expected = planned(case)
    poison(plan())
    cupy.cuda.Device().synchronize()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(plan()))
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    assert bits(found[0], CUPY) == expected


@each_case
def test_a_plan_that_is_deleted_before_its_graph_has_run(case: Case) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        plan, expected = planned(case)
        results = plan()
        poison(results)
        stream.synchronize()
        with closed(stream):
            plan()
            del plan
            gc.collect()
            assert still_closed(stream)
        assert bits(results, CUPY) == expected


def test_long_kernels_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(one_by_one: Any) -> Any:
        raise AssertionError("a graph was made")

    monkeypatch.setattr(plan_launches, "_graph_of", refuse)
    plan, expected = planned(dense("long", 2, 60, 30000))
    assert bits(plan(), CUPY) == expected
    with pytest.raises(AssertionError, match="a graph was made"):
        planned(CASES[0])


def test_a_plan_made_during_a_capture(graphs: list[Any]) -> None:
    q, k, v = (cupy.ones((1, 40, 2, 64), np.float16) for _ in range(3))
    expected = bits([rawattn.attention(q, k, v)], CUPY)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = cupy.empty_like(q)
        stream.begin_capture()
        plan = rawattn.plan(rawattn.attention, q, k, v, out=out)
        plan()
        captured = stream.end_capture()
        captured.launch(stream)
        assert bits([out], CUPY) == expected
        out.fill(np.nan)
        assert bits([plan()], CUPY) == expected
    assert not graphs
