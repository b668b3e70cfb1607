"""Time of GPU calls: bursts between two CUDA events, contenders taking turns.

A burst is long enough that the host stays ahead of the GPU, and contenders take turns so that a
change of clocks or temperature falls on all alike. The clock that a burst begins with is what the
one before it, by its power, has left: so the order of every turn is drawn anew, and nobody keeps
its neighbours. In short bursts all share one clock; in bursts of a third of a second each has that
of its own power, as calls have that follow each other for long. Times compare within one `race`,
hardly between.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

Call = Callable[[], Any]

REPEATS = 9
BURST_SECONDS = 0.01
_MAX_CALLS_A_SECOND = 20_000
_TRIAL_CALLS = 3
_FLUSHES = 4  # about half a millisecond
_orders = random.Random(0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call over the bursts of a race."""

    samples: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.seconds


class Clock(Protocol):
    """Measures a burst of calls."""

    def burst(self, call: Call, calls: int, during: Call | None = None) -> float:
        """Seconds a call, over `calls` of them. `during` runs while the GPU works, where it can."""

    def first(self, call: Call) -> tuple[float, Any]:
        """Host seconds until the result of one call is there, and the result."""


class EventClock:
    """CUDA events on CuPy's current stream, which the calls must use.

    Each burst starts after writes of `flush_bytes`: they empty the L2 cache of the inputs, and keep
    the GPU busy while the host launches the first call, so that host time stays out. Several, as a
    framework that goes through its autograd first takes longer than one.
    """

    def __init__(self, flush_bytes: int = 512 << 20) -> None:
        import cupy

        self._flush = cupy.empty(flush_bytes, cupy.uint8)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
        self._elapsed: Callable[[Any, Any], float] = cupy.cuda.get_elapsed_time  # ms
        self._synchronize: Call = cupy.cuda.runtime.deviceSynchronize

    def burst(self, call: Call, calls: int, during: Call | None = None) -> float:
        for _ in range(_FLUSHES):
            self._flush.data.memset_async(1, self._flush.nbytes)
        self._start.record()
        for _ in range(calls):
            call()
        self._stop.record()
        if during is not None:
            during()
        self._stop.synchronize()
        return self._elapsed(self._start, self._stop) / 1e3 / calls

    def first(self, call: Call) -> tuple[float, Any]:
        return _first(call, lambda result: self._synchronize())


class HostClock:
    """The host's clock until `wait(result)` returns: for calls on a stream nobody tells."""

    def __init__(self, wait: Callable[[Any], Any]) -> None:
        self._wait = wait

    def burst(self, call: Call, calls: int, during: Call | None = None) -> float:
        self._wait(call())
        started = time.perf_counter()
        for _ in range(calls):
            result = call()
        self._wait(result)
        seconds = (time.perf_counter() - started) / calls
        if during is not None:
            during()
        return seconds

    def first(self, call: Call) -> tuple[float, Any]:
        return _first(call, self._wait)


def _first(call: Call, wait: Callable[[Any], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    wait(result)
    return time.perf_counter() - started, result


def rotate(calls: Sequence[Call]) -> Call:
    """One call that runs each of `calls` in turn: the same function over several sets of inputs."""
    turns = itertools.cycle(calls)

    def call() -> Any:
        return next(turns)()

    return call


@dataclass(frozen=True, slots=True)
class Entrant:
    """One side of a race. `scope` is entered around each burst; `call` stands for `calls_each` calls, of which one is timed."""

    call: Call
    clock: Clock
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    during: Call | None = None
    burst_seconds: float = BURST_SECONDS
    calls_each: int = 1


@dataclass(slots=True)
class _Lane:
    entrant: Entrant
    calls: int = 1
    samples: list[float] = field(default_factory=list)

    def burst(self, calls: int, during: Call | None = None) -> float:
        with self.entrant.scope():
            return self.entrant.clock.burst(self.entrant.call, calls, during)


def race(
    entrants: Mapping[str, Entrant], *, repeats: int = REPEATS
) -> dict[str, Timing | Exception]:
    """Times every entrant; one that raises is out, with its exception, and the others go on."""
    lanes = {name: _Lane(entrant) for name, entrant in entrants.items()}
    failed: dict[str, Exception] = {}

    def each(order: list[str], turn: Callable[[_Lane], None]) -> None:
        for name in order:
            if name not in failed:
                try:
                    turn(lanes[name])
                except Exception as error:  # whatever a peer raises is its result
                    failed[name] = error

    def warm_up(lane: _Lane) -> None:
        seconds = lane.burst(_TRIAL_CALLS)
        burst_seconds = lane.entrant.burst_seconds
        most = max(round(burst_seconds * _MAX_CALLS_A_SECOND), 1)
        fitting = round(burst_seconds / seconds) if seconds > 0 else most
        lane.calls = min(max(fitting, 1), most)
        lane.burst(lane.calls)

    names = list(lanes)
    each(names, warm_up)
    for turn in range(repeats):
        during = turn == repeats - 1

        def sample(lane: _Lane, last: bool = during) -> None:
            seconds = lane.burst(lane.calls, lane.entrant.during if last else None)
            lane.samples.append(seconds / lane.entrant.calls_each)

        each(_orders.sample(names, len(names)), sample)
    return {
        name: failed[name] if name in failed else Timing(tuple(lane.samples))
        for name, lane in lanes.items()
    }


def compare(
    calls: Mapping[str, Call], *, repeats: int = REPEATS, burst_seconds: float = BURST_SECONDS
) -> dict[str, Timing]:
    """Times calls on CuPy's current stream, such as variants of one kernel; raises what one raises.

    >>> timings = compare({"tile 64": launch_64, "tile 128": launch_128})  # doctest: +SKIP
    >>> timings["tile 64"].seconds, timings["tile 64"].spread  # doctest: +SKIP
    """
    clock = EventClock()
    outcome = race(
        {name: Entrant(call, clock, burst_seconds=burst_seconds) for name, call in calls.items()},
        repeats=repeats,
    )
    timings: dict[str, Timing] = {}
    for name, timing in outcome.items():
        if isinstance(timing, Exception):
            raise timing
        timings[name] = timing
    return timings


def time_call(call: Call, *, repeats: int = REPEATS) -> Timing:
    """Time of one call that launches on CuPy's current stream."""
    return compare({"": call}, repeats=repeats)[""]
