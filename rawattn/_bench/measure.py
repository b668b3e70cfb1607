"""Runs a suite: every case with every available contender, which take turns."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rawattn._bench import machine
from rawattn._bench.cases import Case
from rawattn._bench.contender import Contender, Inputs
from rawattn._bench.report import Report, Result, Row
from rawattn._bench.score_features import AGREE
from rawattn._bench.timing import (
    BURST_SECONDS,
    REPEATS,
    Clock,
    Entrant,
    EventClock,
    Timing,
    race,
    rotate,
)

_MAX_SETS = 8
_BASE = "the case that this one is measured against"

Read = Callable[[], machine.Reading | None]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run."""

    dtype: str = "bfloat16"
    repeats: int = REPEATS
    budget: float = 120.0  # seconds, after which peers are left out
    burst_seconds: float = BURST_SECONDS


def run(
    suite: str,
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    options: Options,
    step: Callable[[str], None],
) -> Report:
    """Measures cases on the current GPU. step(text) is called after each."""
    started = time.monotonic()
    clock, sensors = EventClock(), machine.Sensors()
    facts = machine.facts(sensors)
    report = Report(
        suite=suite,
        dtype=options.dtype,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        repeats=options.repeats,
        burst_seconds=options.burst_seconds,
        machine=facts,
        versions={},
        matmul_flops=machine.matmul_flops(options.dtype, clock),
        ours=[contender.name for contender in contenders if contender.ours],
        peers=[contender.name for contender in contenders if not contender.ours],
        called={contender.name: contender.called for contender in contenders},
    )
    absent: dict[str, str] = {}
    rows = {}
    names = {case.name: case for case in cases}
    for case in sorted(cases, key=lambda case: case.priority):
        if time.monotonic() - started > options.budget:
            spent = f"not run: the budget of {options.budget:.0f} s was spent"
            absent = {**dict.fromkeys(report.peers, spent), **absent}
        wanted = [contender for contender in contenders if contender.takes(case)]
        inputs = make_inputs(case, options.dtype, facts["l2_bytes"])
        # The GPU's clock changes from case to case. So if the ratio of two cases has a bound, they take turns in one race.
        base = None
        if case.over in names and any(not bound.peers for bound in case.bounds):
            base = _base(
                *(names[case.over], contenders[0], options, facts["l2_bytes"]),
                *(clock, sensors.read),
            )
        results = measure_case(
            *(case, wanted, inputs, clock, sensors.read, absent),
            repeats=options.repeats,
            burst_seconds=options.burst_seconds,
            base=base,
        )
        nbytes = case.nbytes(np.dtype(options.dtype).itemsize)
        rows[case.name] = row = Row(
            *(case.name, case.kind, case.headdim, case.flops, nbytes),
            results=results,
            over=case.over,
            by_time=case.by_time,
            bounds=case.bounds,
            panel=case.panel,
            base=base[1] if base else None,
        )
        del base
        step(summary(row))
    report.rows = [rows[case.name] for case in cases]
    report.versions = machine.versions()
    return report


def make_inputs(case: Case, dtype: str, l2_bytes: int) -> list[Inputs]:
    """So many sets of inputs that none is still in the L2 cache when it is used again."""
    import cupy

    elements = sum(int(np.prod(shape)) for shape in case.shapes) + case.feature.elements
    seqstart = None
    if case.packed:
        seqstart = cupy.asarray(np.cumsum([0, *case.seqlens]), np.int32)
    nbytes = elements * np.dtype(dtype).itemsize
    count = min(_MAX_SETS, max(1, -(-2 * l2_bytes // nbytes)))
    found = []
    for _ in range(count):
        q, k, v, *dout = [machine.random_array(shape, dtype) for shape in case.shapes]
        if case.feature.q_factor != 1:
            # By way of float32, which CuPy converts both from and to.
            q = (q.astype(np.float32) * case.feature.q_factor).astype(np.dtype(dtype))
        found.append(
            Inputs(
                (q, k, v),
                dout=dout[0] if dout else None,
                seqstart=seqstart,
                max_seqlen=max(case.seqlens),
                extras=case.feature.arrays(case, dtype),
            )
        )
    return found


def measure_case(
    case: Case,
    contenders: Sequence[Contender],
    inputs: Sequence[Inputs],
    events: Clock,
    read: Read,
    absent: dict[str, str],
    *,
    repeats: int,
    burst_seconds: float = BURST_SECONDS,
    base: tuple[Entrant, Result] | None = None,
) -> dict[str, Result]:
    """The result of each contender. One that raises, or whose result differs from the first one's, has a reason and no time.

    absent: reasons by peer. Peers that cannot be imported are added, so that they are not tried again.
    base: another call that takes turns with them, and the result that gets its time.
    """
    results: dict[str, Result] = {}
    entrants: dict[str, Entrant] = {}
    first: tuple[str, tuple[Any, ...]] | None = None
    for contender in contenders:
        name = contender.name
        results[name] = result = Result()
        if name in absent:
            result.reason = absent[name]
            continue
        try:
            entrant, result.first_seconds, returned = enter(
                *(case, contender, inputs, events, _noting(result, read)),
                burst_seconds=burst_seconds,
            )
            arrays = contender.read(case, returned)
            result.reason = disagreement(arrays, first, case.feature.agree)
            first = first or (None if result.reason else (name, arrays))
            del returned, arrays
            if result.reason:
                continue
        except ImportError as error:
            result.reason = absent[name] = describe(error)
            continue
        except Exception as error:  # a peer that does not support the case must not end the run
            result.reason = describe(error)
            continue
        entrants[name] = entrant
    del first
    filled = dict(results)
    if base is not None:
        entrants[_BASE], filled[_BASE] = base
    for name, timing in race(entrants, repeats=repeats).items():
        if isinstance(timing, Timing):
            filled[name].seconds, filled[name].spread = timing.seconds, timing.spread
            filled[name].samples = timing.samples
        else:
            filled[name].reason = describe(timing)
    return results


def _base(
    case: Case, contender: Contender, options: Options, l2_bytes: int, clock: Clock, read: Read
) -> tuple[Entrant, Result]:
    """The base of another case's ratio, ready to race, and the result that gets its time."""
    result = Result()
    inputs = make_inputs(case, options.dtype, l2_bytes)
    entrant, result.first_seconds, _ = enter(
        *(case, contender, inputs, clock, _noting(result, read)),
        burst_seconds=options.burst_seconds,
    )
    return entrant, result


def enter(
    case: Case,
    contender: Contender,
    inputs: Sequence[Inputs],
    events: Clock,
    during: Callable[[], None] | None = None,
    *,
    burst_seconds: float = BURST_SECONDS,
) -> tuple[Entrant, float, Any]:
    """A contender ready to race, after its first call, which may compile; the seconds of that call, and its result."""
    clock = contender.clock(events)
    with contender.scope():
        calls = [contender.prepare(case, one) for one in inputs]
        seconds, returned = clock.first(calls[0])
    burst_seconds *= contender.burst_factor
    entrant = Entrant(rotate(calls), clock, contender.scope, during, burst_seconds)
    return entrant, seconds, returned


def _noting(result: Result, read: Read) -> Callable[[], None]:
    def note() -> None:
        if (reading := read()) is not None:
            for name, value in asdict(reading).items():
                setattr(result, name, value)

    return note


def disagreement(
    got: Sequence[Any], first: tuple[str, Sequence[Any]] | None, agree: float = AGREE
) -> str:
    """Why results are not timed; "" if they agree with `first`, the name and the results of the first contender.

    If there is no first one yet, they need only be without NaN.
    """
    name, expected = first or ("itself", got)  # NaN differs from itself
    # A contender without dbias returns fewer results.
    errors = [difference(*pair) for pair in zip(got, expected, strict=False)]
    worst = max(errors, key=lambda error: np.inf if np.isnan(error) else error)
    return "" if worst <= agree else f"not timed: differs from {name} by {worst:.2g} of its RMS"


def difference(got: Any, expected: Any) -> float:
    """The RMS of the difference over the RMS of what was expected; NaN if either has a NaN."""
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    return float((((got - expected) ** 2).mean() / (expected**2).mean()) ** 0.5)


def describe(error: Exception) -> str:
    """The type and the first line of an error, at most 160 characters. Of paths, which tell of one machine, the last name."""
    text = re.sub(
        r"(?<!\w)(?<!https:)(?<!https:/)/\S+/", "", (str(error).strip().splitlines() or [""])[0]
    )
    return f"{type(error).__name__}: {text}"[:160]


def summary(row: Row) -> str:
    """One line for the progress display."""
    cells = []
    for name in row.results:
        rate = row.rate(name)
        cells.append(f"{name} {'n/a' if rate is None else f'{rate / 1e12:.0f}'}")
    return f"{row.name}: {', '.join(cells)} TFLOP/s"
