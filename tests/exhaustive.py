"""Which cases every run includes, and which only `pytest --exhaustive`.

The curated cases take every path of the forward and backward kernels at least once, and the common paths of the other kernels.
Cases that multiply these (every tile under every mask, more orders in which threads run and copies arrive, more random cases)
are marked `exhaustive`. Those that need a GPU run in .ci/gpu, the others in .ci/nightly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

OPTION = "--exhaustive"
# The cost of compiling one kernel for the CPU (tests/shim), in units of running one case.
_COMPILE = 4

T = TypeVar("T")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="store_true", help="also run the cases that are marked exhaustive"
    )


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the marked cases, unless --exhaustive is given."""
    if config.getoption(OPTION):
        return
    beyond = [item for item in items if item.get_closest_marker("exhaustive")]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def thin(cases: Iterable[T], step: int) -> list[Any]:
    """Mark all but every `step`-th case, from the first, as exhaustive. A tuple holds the values of several parameters."""
    return [_param(case, exhaustive=n % step > 0) for n, case in enumerate(cases)]


def mark(
    cases: Iterable[T],
    traits: Callable[[T], Iterable[Hashable]],
    kernels: Callable[[T], Iterable[Hashable]] = lambda case: (),
) -> list[Any]:
    """Choose a few cases that together have every trait of all cases, and mark the others as exhaustive.

    A tuple holds the values of several parameters, at least two.
    kernels: the kernels that a case needs compiled. Compiling takes longer than running the case.
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
    return [case if n in curated else _param(case, exhaustive=True) for n, case in enumerate(cases)]


def _param(case: Any, *, exhaustive: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[pytest.mark.exhaustive] * exhaustive)
