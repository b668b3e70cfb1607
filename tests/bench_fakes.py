"""Fake contenders, clocks and cases for the tests of `rawattn bench`."""

from __future__ import annotations

import contextlib

import numpy as np

from rawattn._bench import cases, contender
from rawattn._bench.timing import Entrant, Timing


class FakeClock:
    """A clock for which a call returns its own seconds. It records who ran and how often."""

    def __init__(self):
        self.log = []

    def burst(self, call, calls, during=None):
        seconds = [call() for _ in range(calls)]
        if during is not None:
            during()
        self.log.append((round(seconds[0], 6), calls))
        return sum(seconds) / calls

    def first(self, call):
        return 1.5, call()


def small(packed=False, **more):
    """Return a backward case of two sequences, and its inputs as NumPy arrays."""
    case = cases.Case(
        "dense", "", (6, 6), 4, 2, 8, causal=True, packed=packed, backward=True, **more
    )
    rng = np.random.default_rng(0)
    leading = (12,) if packed else (2, 6)
    q, k, v, dout = (
        rng.standard_normal((*leading, heads, 8), dtype=np.float32) for heads in (4, 2, 2, 4)
    )
    starts = np.array([0, 6, 12], np.int32) if packed else None
    return case, contender.Inputs((q, k, v), dout=dout, seqstart=starts, max_seqlen=6)


class Fake(contender.Contender):
    def __init__(self, name, seconds=0.001, value=1.0, error=None):
        super().__init__(name)
        self.ours = name in ("rawattn", "deterministic")
        self.seconds, self.value, self.error, self.prepared = seconds, value, error, 0

    def takes(self, case):
        wanted = case.deterministic if self.name == "deterministic" else self.ours
        return wanted or super().takes(case)

    @contextlib.contextmanager
    def scope(self):
        self.inside = True
        yield
        self.inside = False

    def prepare(self, case, inputs):
        assert self.inside
        self.prepared += 1
        self.calls = 0
        if self.error is not None:
            raise self.error

        def call():
            assert self.inside
            self.calls += 1
            return self.seconds

        return call

    def read(self, case, result):
        arrays = [np.full(4, 1.0, np.float32) for _ in range(3 if case.backward else 1)]
        arrays[-1][:] = self.value
        return tuple(arrays)


def pretended(seconds, value=1.0):
    """Return an entrant for `pretended_race` whose result is filled with `value`."""
    return Entrant(lambda: [np.full(4, value, np.float32)], clock=seconds)


def pretended_race(ready, repeats=1):
    """Stand in for a race: an entrant's result is its clock, which holds its seconds or the exception it raises."""
    clocks = {name: entrant.clock for name, entrant in ready.items()}
    return {n: c if isinstance(c, Exception) else Timing((c,)) for n, c in clocks.items()}
