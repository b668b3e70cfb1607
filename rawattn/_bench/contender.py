"""The interface of contenders."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rawattn._bench.cases import Case
from rawattn._bench.timing import Call, Clock


@dataclass(frozen=True, slots=True)
class Inputs:
    """The CuPy arrays of a case, in the shapes of `rawattn.attention`."""

    qkv: tuple[Any, ...]
    dout: Any = None  # for a backward
    seqstart: Any = None
    max_seqlen: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)  # arrays of the case's feature


class Contender:
    """One implementation of attention, with a forward and a backward."""

    burst_factor = 1  # its bursts are this many times as long as the run's
    ours = False
    # For the table: how it is called (eager: call by call from Python), on which framework's arrays, by which function.
    called = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def takes(self, case: Case) -> bool:
        """Whether it is measured on a case."""
        return self.name in case.peers

    def clock(self, events: Clock) -> Clock:
        """The clock for its calls: events, if it runs on CuPy's current stream."""
        return events

    def scope(self) -> AbstractContextManager[Any]:
        """A context for `prepare` and for its calls."""
        return contextlib.nullcontext()

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        """The call to measure. Raises if it does not support the case."""
        return (self.backward if case.backward else self.forward)(case, inputs)

    def forward(self, case: Case, inputs: Inputs) -> Call:
        raise NotImplementedError(f"{self.name}: the forward is not measured")

    def backward(self, case: Case, inputs: Inputs) -> Call:
        """The backward alone: the forward that it needs runs here, before."""
        raise NotImplementedError(f"{self.name}: the backward is not measured")

    def read(self, case: Case, result: Any) -> tuple[Any, ...]:
        """The result of a call as CuPy arrays: (out,), or for a backward dq, dk, dv and the gradients of the case's feature."""
        found = result[: case.ngradients] if case.backward else (self.out(result),)
        return tuple(map(self.array, found))

    def out(self, result: Any) -> Any:
        """`out`, in the shape of q, from the result of the forward."""
        return result

    def array(self, x: Any) -> Any:
        """An array of the contender as a CuPy array."""
        return x
