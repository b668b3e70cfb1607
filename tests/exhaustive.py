"""Which cases every run has, and which only a run of all of them: `pytest --exhaustive`.

The curated cases take every path of the forward and backward kernels at least once, and of other kernels
the common ones. What multiplies them (every tile under every mask, more orders of turns, more draws of
chance) is marked `exhaustive`: where it needs a GPU for the run on one (.ci/gpu), else for the nightly run
(.ci/nightly).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

OPTION = "--exhaustive"
# What it takes to compile a kernel of the CPU machine, in runs of one.
_COMPILE = 4

T = TypeVar("T")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="store_true", help="also run the cases that are marked exhaustive"
    )


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the marked cases, unless the run is to be exhaustive."""
    if config.getoption(OPTION):
        return
    beyond = [item for item in items if item.get_closest_marker("exhaustive")]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def thin(cases: Iterable[T], step: int) -> list[Any]:
    """Parameters of a test: every `step`-th from the first on, the others marked. A tuple is that of several parameters."""
    marks = ((), (pytest.mark.exhaustive,))
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[n % step > 0])
        for n, case in enumerate(cases)
    ]


def mark(
    cases: Iterable[T],
    traits: Callable[[T], Iterable[Hashable]],
    kernels: Callable[[T], Iterable[Hashable]] = lambda case: (),
) -> list[Any]:
    """Parameters of a test: few cases that together show every trait of all of them, the others marked.

    kernels: what a case needs compiled, which takes longer than to run it.
    """
    cases = list(cases)
    shown = [set(traits(case)) for case in cases]
    needed = [set(kernels(case)) for case in cases]
    missing: set[Hashable] = set().union(*shown)
    compiled: set[Hashable] = set()
    curated = set()

    def worth(n: int) -> float:
        return len(shown[n] & missing) / (1 + _COMPILE * len(needed[n] - compiled))

    while missing:
        best = max(range(len(cases)), key=worth)
        curated.add(best)
        missing -= shown[best]
        compiled |= needed[best]
    return [
        case if n in curated else pytest.param(case, marks=pytest.mark.exhaustive)
        for n, case in enumerate(cases)
    ]
