"""What the CUDA graphs of `rawattn bench` hold, and for how long, with fakes of CuPy and torch."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from rawattn._bench import graphs, machine
from rawattn._bench.timing import Call, race
from tests.bench_fakes import FakeClock

MB = 1 << 20


class Device:
    """Fake streams and graphs. A replay logs what it launches.

    capturing: the calls of the capture in progress.
    """

    def __init__(self) -> None:
        self.capturing: list[str] | None = None
        self.log: list[str] = []

    def launch(self, name: str) -> None:
        (self.log if self.capturing is None else self.capturing).append(name)

    def begin_capture(self) -> None:
        self.capturing = []

    def end_capture(self) -> Any:
        assert self.capturing is not None
        held, self.capturing = self.capturing, None
        return types.SimpleNamespace(launch=lambda: self.log.extend(held))

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        self.log.append("wait")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    @contextlib.contextmanager
    def capture(graph: Any) -> Iterator[None]:
        found.begin_capture()
        yield
        graph.replay = found.end_capture().launch

    cupy = types.SimpleNamespace(
        from_dlpack=lambda tensor: ("CuPy's", tensor),
        cuda=types.SimpleNamespace(
            Stream=lambda non_blocking: found,
            runtime=types.SimpleNamespace(deviceSynchronize=found.synchronize),
        ),
    )
    torch = types.SimpleNamespace(
        no_grad=contextlib.nullcontext,
        cuda=types.SimpleNamespace(
            Stream=lambda: found,
            stream=lambda stream: stream,
            graph=capture,
            CUDAGraph=types.SimpleNamespace,
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(machine, "Sensors", lambda: None)
    monkeypatch.setattr(machine, "facts", lambda sensors: {"l2_bytes": 50 * MB})
    monkeypatch.setattr(graphs, "EventClock", FakeClock)
    return found


class Array:
    """An object that a test can ask whether it is still alive."""

    def __init__(self, name: str) -> None:
        self.name = name


def _call(device: Device, array: Array) -> Array:
    device.launch(array.name)
    return Array(f"out {array.name}")


def make(device: Device, count: int) -> list[Call]:
    return [functools.partial(_call, device, Array(str(n))) for n in range(count)]


@pytest.mark.parametrize(
    ("nbytes", "sets", "calls"),
    [
        (MB, 16, 16),
        (11 * MB, 10, 20),
        (40 * MB, 3, 18),
        (63 * MB, 2, 16),
        (64 * MB, 2, 4),
        (1 << 31, 1, 4),
    ],
)
def test_short_calls_are_many_in_a_graph(
    device: Device, nbytes: int, sets: int, calls: int
) -> None:
    assert graphs.sets(nbytes) == sets
    entrant = graphs.entrant(graphs.of_cupy, make(device, sets), nbytes)
    assert entrant.calls_each == calls
    assert device.log[0] == "wait", "inputs are written on another stream"
    device.log.clear()
    results = entrant.call()
    assert device.log == [str(n % sets) for n in range(calls)]
    assert [x.name for x in results] == [f"out {name}" for name in device.log]


@pytest.mark.parametrize("capture", [graphs.of_cupy, graphs.of_torch])
def test_a_graph_keeps_what_its_calls_read_and_write(
    device: Device, capture: graphs.Capture
) -> None:
    calls = make(device, 2)
    read = [weakref.ref(call.args[1]) for call in calls]
    replay = capture(calls)
    del calls
    gc.collect()
    assert all(array() is not None for array in read)
    assert len({id(x) for x in replay()}) == 2
    assert replay() is replay.results
    del replay
    gc.collect()
    assert all(array() is None for array in read)


def test_calls_run_before_they_are_captured(device: Device) -> None:
    graphs.of_cupy(make(device, 2))
    assert device.log == ["0", "1", "wait"]
    device.log.clear()
    replay = graphs.of_torch(make(device, 2))
    assert device.log == [*["0", "1"] * 3, "wait"]
    assert [(whose, x.name) for whose, x in replay()] == [("CuPy's", "out 0"), ("CuPy's", "out 1")]


def test_a_capture_that_fails_has_ended(device: Device) -> None:
    def call() -> None:
        if device.capturing is not None:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.of_cupy([call])
    assert device.capturing is None


def test_the_time_is_that_of_one_call(device: Device) -> None:
    def capture(calls: Any) -> Any:
        return lambda: 1e-5 * len(calls)  # the seconds that the fake clock reads

    entrants = {
        "short": graphs.entrant(capture, make(device, 16), MB),
        "long": graphs.entrant(capture, make(device, 1), 1 << 31),
    }
    times = race(entrants)
    assert {name: timing.seconds for name, timing in times.items()} == {
        "short": pytest.approx(1e-5),
        "long": pytest.approx(1e-5),
    }
