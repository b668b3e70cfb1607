"""What every contender must do."""

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
    """CuPy arrays of a case, in the shapes of `rawattn.attention`."""

    qkv: tuple[Any, ...]
    dout: Any = None  # of a backward
    seqstart: Any = None
    max_seqlen: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)  # arrays of the case's feature


class Contender:
    """One implementation of attention: two verbs, on the same inputs."""

    burst_factor = 1  # of the bursts that are asked for
    ours = False
    # For the table: call by call from Python (eager) or otherwise, and whose function on whose arrays.
    called = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def takes(self, case: Case) -> bool:
        """Whether it is to be measured on a case."""
        return self.name in case.peers

    def clock(self, events: Clock) -> Clock:
        """How its calls are timed: by events, where it runs on CuPy's current stream."""
        return events

    def scope(self) -> AbstractContextManager[Any]:
        """Entered around `prepare` and around its calls."""
        return contextlib.nullcontext()

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        """The call to measure. Raises when it cannot do the case."""
        return (self.backward if case.backward else self.forward)(case, inputs)

    def forward(self, case: Case, inputs: Inputs) -> Call:
        raise NotImplementedError(f"{self.name}: the forward is not measured")

    def backward(self, case: Case, inputs: Inputs) -> Call:
        """The backward alone: the forward that it needs is made here."""
        raise NotImplementedError(f"{self.name}: the backward is not measured")

    def read(self, case: Case, result: Any) -> tuple[Any, ...]:
        """What a call returned, as CuPy arrays: (out,), or of a backward dq, dk, dv and those of the case's feature."""
        found = result[: case.ngradients] if case.backward else (self.out(result),)
        return tuple(map(self.array, found))

    def out(self, result: Any) -> Any:
        """`out` in what the forward returned, in the shape of q."""
        return result

    def array(self, x: Any) -> Any:
        """Its array as CuPy's."""
        return x
