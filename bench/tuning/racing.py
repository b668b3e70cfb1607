"""Run candidates on the GPU as calls of the library, taking turns with the present choice and with peers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import geometric_mean
from typing import Any

from bench.tuning.candidates import SearchedRow, untaken
from rawattn._bench import machine
from rawattn._bench.cases import Case
from rawattn._bench.contender import Contender
from rawattn._bench.measure import make_inputs, measure_case
from rawattn._bench.ours import Ours
from rawattn._bench.report import Result
from rawattn._bench.timing import EventClock
from rawattn._kernels.selection import only, using_tiles
from rawattn._kernels.tile_tables import Row

_PROFILED_CALLS = 3


@contextmanager
def running(searched: SearchedRow, rows: tuple[Row, ...]) -> Iterator[None]:
    """Make calls take their tiles from these rows."""
    with ExitStack() as stack:
        if searched.kernel.family is not None:
            stack.enter_context(only(searched.kernel.family))
        stack.enter_context(using_tiles(searched.kernel.name, searched.table, rows))
        yield


def contender(searched: SearchedRow, name: str, row: Row) -> Ours:
    """Return a candidate as the contender that `rawattn bench` uses for the library itself.

    Raises ValueError if calls would not take the row.
    """
    rows = searched.with_row(row)
    with running(searched, rows):
        configs = [
            searched.kernel.choose(problem, searched.arch, searched.shared_limit)
            for problem in searched.problems
        ]
    if fields := untaken(row, configs):
        raise ValueError(f"{name}: the chooser takes other values of {', '.join(fields)}")
    scope = functools.partial(running, searched, rows)
    return Ours(name, scope, deterministic=searched.kernel.deterministic)


class Racer:
    """Measures candidates by name.

    results: the latest result of each entrant, by case. dropped: why a candidate is out.
    """

    def __init__(
        self,
        searched: SearchedRow,
        rows: Mapping[str, Row],
        present: str,
        cases: Sequence[Case],
        peers: Sequence[Contender],
        dtype: str,
        *,
        burst_seconds: float,
    ) -> None:
        self._burst_seconds = burst_seconds
        self._contenders = {name: contender(searched, name, row) for name, row in rows.items()}
        self._present, self._cases, self._peers = present, cases, peers
        self._clock, self._sensors = EventClock(), machine.Sensors()
        facts = machine.facts(self._sensors)
        self.device = str(facts["device"])
        self._inputs = [make_inputs(case, dtype, facts["l2_bytes"]) for case in cases]
        self._absent: dict[str, str] = {}
        self.results: dict[str, dict[str, Result]] = {}
        self.dropped: dict[str, str] = {}

    def __call__(self, names: Sequence[str], repeats: int) -> dict[str, float]:
        """Return the speed relative to the present choice, over all cases, of each candidate that is right in every case."""
        alive = list(names)
        for case, inputs in zip(self._cases, self._inputs, strict=True):
            wanted: list[Contender] = [self._contenders[name] for name in alive]
            wanted += [peer for peer in self._peers if peer.takes(case)]
            # measure_case compares results with the first contender: the present choice.
            found = measure_case(
                *(case, wanted, inputs, self._clock, self._sensors.read, self._absent),
                repeats=repeats,
                burst_seconds=self._burst_seconds,
            )
            for name, result in found.items():
                self.results.setdefault(name, {})[case.name] = result
                if name in alive and result.seconds is None:
                    self.dropped[name] = f"{case.name}: {result.reason}"
                    alive.remove(name)
        if self._present not in alive:
            return {}
        return {name: speed(self.results[name], self.results[self._present]) for name in alive}


def speed(results: Mapping[str, Result], present: Mapping[str, Result]) -> float:
    """Return the geometric mean, over the cases, of the present choice's time divided by this one's."""
    pairs = ((present[name].seconds, result.seconds) for name, result in results.items())
    return geometric_mean(before / after for before, after in pairs if before and after)


def profile(searched: SearchedRow, name: str, row: Row, cases: Sequence[Case], dtype: str) -> None:
    """Launch one candidate a few times on each case, for a profiler that selects kernels by name."""
    import cupy

    ours = contender(searched, name, row)
    for case in cases:
        with ours.scope():
            call: Any = ours.prepare(case, make_inputs(case, dtype, 1)[0])
            for _ in range(1 + _PROFILED_CALLS):  # the first call is cold
                call()
            cupy.cuda.runtime.deviceSynchronize()
        print(f"{name}: {1 + _PROFILED_CALLS} calls of {case.name}")
