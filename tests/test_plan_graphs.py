"""Plans of short kernels launch a CUDA graph on their own arrays. The stand-in for CuPy records captures and launches."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn import attention, plan
from rawattn._call.options import Options
from rawattn._call.partials import PartialsForm
from rawattn._call.problem import Problem, describe
from rawattn._runtime import driver, planned, verbs
from rawattn._runtime.launches import BoundLaunch
from rawattn._runtime.plan_launches import is_short, launcher
from tests.test_plan import aligned
from tests.test_plan_launches import Machine

CAPTURED, OTHER = 40, 48  # streams


class Graphs:
    """CuPy's streams and graphs. events: what was enqueued, as ("kernel" or "graph", stream), during captures too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.capturing: set[int] = set()
        self.made, self.freed = 0, 0
        runtime = SimpleNamespace(
            streamCaptureModeRelaxed=2,
            streamIsCapturing=self.capturing.__contains__,
            graphLaunch=lambda handle, stream: self.events.append(("graph", stream)),
        )
        device = lambda device: contextlib.nullcontext()  # noqa: E731
        cuda = SimpleNamespace(runtime=runtime, Stream=self._stream, Device=device)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(driver, "outside_capture", contextlib.nullcontext)

    def _stream(self, non_blocking: bool) -> Any:
        assert non_blocking
        graphs = self

        class Graph:
            graphExec = 5

            def upload(self, stream: Any) -> None:
                pass

            def __del__(self) -> None:
                graphs.freed += 1

        def begin(mode: int) -> None:
            assert mode == 2
            self.capturing.add(7)

        def end() -> Graph:
            self.capturing.remove(7)
            self.made += 1
            return Graph()

        return SimpleNamespace(
            ptr=7, begin_capture=begin, end_capture=end, synchronize=lambda: None
        )

    def kernel(self) -> BoundLaunch:
        enqueue = lambda blocks, stream, arguments: self.events.append(("kernel", stream))  # noqa: E731
        return BoundLaunch(lambda addresses: None, enqueue, 1, None)  # type: ignore[arg-type]

    def new_events(self) -> list[tuple[str, int]]:
        found = self.events[:]
        self.events.clear()
        return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.mark.parametrize("count", [1, 3])
def test_kernels_are_captured_once_and_launched_as_a_graph(graphs: Graphs, count: int) -> None:
    launch = launcher([graphs.kernel() for _ in range(count)], as_graph=True)
    assert graphs.new_events() == [("kernel", 7)] * count
    for stream in (0, 1, OTHER):
        launch(stream)
        assert graphs.new_events() == [("graph", stream)]
    graphs.capturing.add(CAPTURED)
    launch(CAPTURED)
    assert graphs.new_events() == [("kernel", CAPTURED)] * count
    assert (graphs.made, graphs.freed) == (1, 0)
    del launch
    assert graphs.freed == 1


@pytest.mark.parametrize("count", [0, 2])
def test_without_a_graph(graphs: Graphs, count: int) -> None:
    launch = launcher([graphs.kernel() for _ in range(count)], as_graph=False)
    launch(OTHER)
    assert graphs.new_events() == [("kernel", OTHER)] * count
    assert not graphs.made


def test_a_plan_without_kernels_has_no_graph(graphs: Graphs) -> None:
    launcher([], as_graph=True)(OTHER)
    assert not graphs.events
    assert not graphs.made


def test_a_capture_that_fails_is_ended(graphs: Graphs) -> None:
    def fail(blocks: int, stream: int, arguments: Any) -> None:
        raise RuntimeError("no kernel")

    wrong = BoundLaunch(lambda addresses: None, fail, 1, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no kernel"):
        launcher([wrong], as_graph=True)
    assert not graphs.capturing


@pytest.mark.parametrize("may_move", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_calls_of_a_plan(monkeypatch: pytest.MonkeyPatch, short: bool, may_move: bool) -> None:
    """The graph is for the arrays of planning time, whether they are known by identity or by address."""
    machine = Machine(monkeypatch)
    graphs = Graphs(monkeypatch)
    machine.may_move = may_move
    monkeypatch.setattr(planned, "is_short", lambda verb, problem: short)
    monkeypatch.setattr(machine, "_bound_launches", lambda theirs=(): [graphs.kernel()])
    current = [OTHER]
    machine.stream = lambda device: current[0]  # type: ignore[method-assign]
    q, k, v, other = (aligned((1, 5, 2, 8)) for _ in range(4))
    made = plan(attention, q, k, v)
    assert graphs.made == short
    graphs.new_events()
    own = "graph" if short else "kernel"
    for stream in (OTHER, 0, CAPTURED):
        current[0] = stream
        for _ in range(2):
            made(q, k, v)
            made(other, k, v)
            made()
            expected = [(own, stream), ("kernel", stream), (own, stream)]
            assert graphs.new_events() == expected
    graphs.capturing.add(CAPTURED)
    made(q, k, v)
    assert graphs.new_events() == [("kernel", CAPTURED)]
    assert graphs.made == short


def test_a_plan_made_during_a_capture_has_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    graphs = Graphs(monkeypatch)
    monkeypatch.setattr(planned, "is_short", lambda verb, problem: True)
    monkeypatch.setattr(machine, "_bound_launches", lambda theirs=(): [graphs.kernel()])
    machine.stream = lambda device: CAPTURED  # type: ignore[method-assign]
    graphs.capturing.add(CAPTURED)
    given = [aligned((1, 5, 2, 8)) for _ in range(3)]
    made = plan(attention, *given)
    made(*given)
    assert graphs.new_events() == [("kernel", CAPTURED)]
    assert not graphs.made


def _dense(batch: int, rows: int, keys: int, heads: int, kv: int, dim: int = 128) -> Problem:
    q, k = (
        np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (batch, n, h, dim))
        for n, h in ((rows, heads), (keys, kv))
    )
    return describe(q, k, k, Options())[0]


PAGES: Any = object()  # what a problem tells of pages makes no difference
STEP = replace(_dense(64, 1, 8192, 32, 8), packed=True, rows_q=64, pages=PAGES)
APPENDING: Any = SimpleNamespace(written=frozenset({"k_pages"}), outputs=("out",))


def _few_keys(problem: Problem, keys: int, **more: Any) -> Problem:
    return replace(problem, rows_k=keys, max_seqlen_k=keys, **more)


def _partials(count: int) -> Problem:
    form = PartialsForm(count, "float16", (True, True))
    return _few_keys(_dense(64, 1, 1, 32, 32), 0, partials=form)


@pytest.mark.parametrize(
    ("verb", "problem", "expected"),
    [
        (verbs.FORWARD, _dense(1, 128, 128, 16, 16), True),
        (verbs.FORWARD, _dense(1, 1, 2048, 32, 8), True),
        (verbs.FORWARD, _dense(1, 1, 8192, 32, 8), False),  # bytes
        (verbs.FORWARD, _dense(1, 1024, 1024, 2, 2), True),
        (verbs.FORWARD, _dense(1, 512, 512, 16, 16), True),
        (verbs.FORWARD, _dense(1, 4096, 4096, 2, 2), False),  # operations
        (verbs.BACKWARD, _dense(1, 512, 512, 8, 8), True),
        (verbs.BACKWARD, _dense(1, 512, 512, 16, 16), False),
        (verbs.PAGED, STEP, False),
        (verbs.PAGED, _few_keys(STEP, 16), True),
        (APPENDING, STEP, True),
        (verbs.FORWARD, _partials(2), True),
        (verbs.FORWARD, _partials(64), False),
    ],
)
def test_which_calls_are_short(verb: Any, problem: Problem, expected: bool) -> None:
    assert is_short(verb, problem) is expected
