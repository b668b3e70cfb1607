"""Speed of calls without score options over that of an earlier version of this package.

RAWATTN_BENCH_BEFORE names a folder that holds the earlier package, such as a checkout of it. Each version runs in a process of
its own, since both packages have the same name. The two take turns at bursts on one GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rawattn._bench import measure
from rawattn._bench.report import Figure

FOLDER = "RAWATTN_BENCH_BEFORE"
_MIN_SPEEDUP = 0.99
_TURNS = 21
# Columns: suite, our contender, case.
CASES = (
    ("forward", "rawattn", "dense D64 S4096 causal"),
    ("forward", "rawattn", "dense D64 S4096 full"),
    ("forward", "rawattn", "dense D128 S1024 causal"),
    ("forward", "rawattn", "dense D128 S4096 causal"),
    ("forward", "rawattn", "dense D128 S4096 full"),
    ("forward", "rawattn", "dense D256 S4096 causal"),
    ("forward", "rawattn", "ragged D128 H16/16 causal"),
    ("forward", "rawattn", "window D128 S16384 left1024 causal"),
    ("forward", "portable", "dense D64 S4096 causal"),
    ("forward", "portable", "dense D128 S4096 causal"),
    ("backward", "rawattn", "dense D64 S4096 causal"),
    ("backward", "rawattn", "dense D128 S4096 causal"),
    ("backward", "rawattn", "dense D128 S4096 full"),
    ("backward", "rawattn", "dense D256 S4096 causal"),
    ("backward", "rawattn", "ragged D128 H16/16 causal"),
    ("backward", "deterministic", "dense D128 S4096 causal"),
)
# The child answers each line [suite, contender, case, dtype, calls] with the mean seconds of a call in a burst of `calls`. With
# calls = 0 it prepares the case first, and times 3 calls.
_CHILD = """
import json, sys
from rawattn._bench import grids, machine, measure, ours, timing
clock = timing.EventClock()
l2_bytes = machine.facts(machine.Sensors())["l2_bytes"]
entrant = None
for line in sys.stdin:
    try:
        suite, name, case, dtype, calls = json.loads(line)
        if not calls:
            entrant = None
            (case,) = [c for c in getattr(grids, suite)() if c.name == case]
            (side,) = [c for c in ours.ours(suite) if c.name == name]
            entrant, _, _ = measure.enter(case, side, measure.make_inputs(case, dtype, l2_bytes), clock)
        with entrant.scope():
            answer = clock.burst(entrant.call, calls or 3)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Version:
    """A process that runs one version of the package."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *question: Any) -> None:
        """Sends a question. RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise RuntimeError("the process of a version has ended") from None

    def answer(self) -> float:
        """The answer to the oldest open question. RuntimeError if the call failed or the process has ended."""
        assert self._process.stdout is not None
        answer = json.loads(
            self._process.stdout.readline() or '"the process of a version has ended"'
        )
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return float(answer)


@contextlib.contextmanager
def version(folder: Path) -> Iterator[Version]:
    """A process that imports the package in a folder."""
    # `python -c` looks for packages in the working folder first.
    command = [sys.executable, "-c", _CHILD]
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Version(process)
    finally:
        process.kill()
        process.communicate()


def figures(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """A figure for each kernel; without an earlier version, one figure that says so."""
    earlier = os.environ.get(FOLDER)
    if not earlier:
        name = "every kernel without score options, speed over the version before"
        return [Figure(name, None, "x", _MIN_SPEEDUP, of=f"{FOLDER} names no folder of it")]
    here = Path(__file__).resolve().parents[2]
    with version(Path(earlier)) as before, version(here) as after:
        return [_figure(before, after, (*question, dtype)) for question in CASES]


def _figure(before: Version, after: Version, question: tuple[str, ...]) -> Figure:
    suite, contender, case, _ = question
    name = f"{contender}, {suite}, speed over the version before: {case}"
    figure = Figure(name, None, "x", _MIN_SPEEDUP)
    try:
        old, new = compare(before, after, question)
    except RuntimeError as error:
        figure.of = measure.describe(error)
    else:
        figure.value, figure.of = old / new, f"{1e3 * new:.3f} ms, {1e3 * old:.3f} ms"
    return figure


def compare(before: Version, after: Version, question: tuple[str, ...]) -> tuple[float, float]:
    """The median seconds a call of both versions."""
    sides = (before, after)
    for side in sides:
        side.ask(*question, 0)  # both compile at the same time
    trials, failures = [], []
    for side in sides:
        try:
            trials.append(side.answer())
        except RuntimeError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    calls = max(1, round(0.01 / min(trials)))
    samples: list[list[float]] = [[], []]
    for turn in range(_TURNS + 1):
        for n in (0, 1) if turn % 2 else (1, 0):
            sides[n].ask(*question, calls)
            samples[n].append(sides[n].answer())
    # The first turn only warms up.
    old, new = (statistics.median(side[1:]) for side in samples)
    return old, new
