"""Times GPU calls: bursts of calls between two CUDA events, in which contenders take turns.

A burst is so long that the host stays ahead of the GPU. Contenders take turns so that changes of the GPU's clock
or temperature affect all alike. A burst begins with the clock that the power of the burst before it has left, so
the order is shuffled anew in every turn. In short bursts all contenders share one clock. In bursts of a third of
a second each reaches the clock of its own power, as in a long run of equal calls. Times are comparable within one
`race`, but hardly between races.
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
_FLUSHES = 4  # writes of the flush buffer before a burst, about half a millisecond together
_orders = random.Random(0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call, one sample for each burst of a race."""

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
        """Seconds a call, over `calls` calls. `during` runs while the GPU works, if the clock allows it."""

    def first(self, call: Call) -> tuple[float, Any]:
        """Host seconds until the result of one call is ready, and the result."""


class EventClock:
    """CUDA events on CuPy's current stream, which the calls must use.

    Each burst starts after several writes of `flush_bytes`. They evict the inputs from the L2 cache, and keep the GPU
    busy while the host launches the first call, so that host time is not measured. One write would be too short for a
    framework whose calls go through its autograd.
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
    """The host's clock until `wait(result)` returns, for calls whose stream is not known."""

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
    """A call that runs one of `calls` at a time, in turn: the same function on several sets of inputs."""
    turns = itertools.cycle(calls)

    def call() -> Any:
        return next(turns)()

    return call


@dataclass(frozen=True, slots=True)
class Entrant:
    """One side of a race. scope: a context for each burst. calls_each: how many calls `call` makes; the time is that of one."""

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
    """Times every entrant. One that raises leaves the race, with its exception as its result; the others go on."""
    lanes = {name: _Lane(entrant) for name, entrant in entrants.items()}
    failed: dict[str, Exception] = {}

    def each(order: list[str], turn: Callable[[_Lane], None]) -> None:
        for name in order:
            if name not in failed:
                try:
                    turn(lanes[name])
                except Exception as error:  # the exception is the entrant's result
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
    """Times calls on CuPy's current stream, such as variants of one kernel. An exception of a call is raised.

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
    """The time of one call that launches on CuPy's current stream."""
    return compare({"": call}, repeats=repeats)[""]
