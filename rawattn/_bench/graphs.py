"""Calls in CUDA graphs: an entrant of a race is one graph of calls on several sets of inputs.

Launching a graph takes microseconds, as long as a short call. So a graph holds many short calls, and the time of one is that
of a replay divided by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rawattn._bench import machine
from rawattn._bench.timing import Call, Entrant, EventClock

_SHORT_BYTES = 64 << 20  # a call that reads and writes fewer bytes is short
_SHORT_CALLS, _CALLS = 16, 4  # least calls in a graph, of short ones and of others
_MAX_SETS = 16
_WARM_UP = 3  # rounds of torch calls before a capture


@dataclass(frozen=True, slots=True)
class Replay:
    """Launches a graph, and returns the results of its calls from the capture.

    A graph holds addresses only, so this keeps the arrays alive that its calls read and write.
    """

    launch: Call
    calls: Sequence[Call]
    results: Sequence[Any]

    def __call__(self) -> Sequence[Any]:
        self.launch()
        return self.results


Capture = Callable[[Sequence[Call]], Replay]


def sets(nbytes: int) -> int:
    """The number of sets of inputs that together exceed the L2 cache. nbytes: the bytes that a call reads and writes."""
    l2_bytes: int = machine.facts(machine.Sensors())["l2_bytes"]
    return min(_MAX_SETS, max(1, -(-2 * l2_bytes // nbytes)))


def entrant(capture: Capture, calls: Sequence[Call], nbytes: int) -> Entrant:
    """A graph of these calls, one on each set of inputs, repeated to at least 16 short calls or 4 others.

    nbytes: the bytes that one call reads and writes.
    """
    import cupy

    least = _SHORT_CALLS if nbytes < _SHORT_BYTES else _CALLS
    rounds = -(-least // len(calls))
    every = [*calls] * rounds
    cupy.cuda.runtime.deviceSynchronize()  # inputs must be written before other streams read them
    return Entrant(capture(every), EventClock(), calls_each=len(every))


def of_cupy(calls: Sequence[Call]) -> Replay:
    """A graph of calls that launch on CuPy's current stream."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for call in calls:
            call()
        stream.begin_capture()
        try:
            results = [call() for call in calls]
        finally:  # also after an error, since nothing can be read while a stream captures
            graph = stream.end_capture()
    stream.synchronize()
    return Replay(graph.launch, calls, results)


def of_torch(calls: Sequence[Call]) -> Replay:
    """A graph of calls that launch on torch's current stream and return a tensor. A replay returns it as a CuPy array."""
    import cupy
    import torch

    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in [*calls] * _WARM_UP:
                call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for call in calls]
    return Replay(graph.replay, calls, [cupy.from_dlpack(result) for result in results])
