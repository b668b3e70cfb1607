"""A plan of `combine`."""

from __future__ import annotations

from typing import Any

from rawattn._runtime import combine as runtime
from rawattn._runtime import combine_plan
from rawattn._verbs.plan import Plan
from rawattn._verbs.plan_arguments import check_form

_NAMES = ("outs", "lses")


class CombinePlan(Plan):
    """A call of `combine` on partials of one form: the same number, listed or stacked alike."""

    def __init__(self, outs: Any, lses: Any, out: Any, dtype: Any) -> None:
        self._given, self._out, self._dtype = (outs, lses), out, dtype
        self._planned = combine_plan.plan(outs, lses, out, dtype)

    def __call__(self, *args: Any, out: Any = None, into: Any = None, **named: Any) -> Any:
        """out and lse."""
        if into is not None:
            raise TypeError("into: this plan writes its results to out=")
        if len(args) > len(_NAMES) or not named.keys() <= set(_NAMES[len(args) :]):
            raise TypeError(
                f"{next(iter(named), 'plan')}: this plan takes outs and lses once each, and out; whatever else the call "
                "has is that of planning time"
            )
        outs, lses = (
            args[n] if n < len(args) else named.get(name, self._given[n])
            for n, name in enumerate(_NAMES)
        )
        if self._planned is None:
            for name, array, planned in zip(_NAMES, (outs, lses), self._given, strict=True):
                _check(name, array, planned)
        if out is None:
            out = self._out if self._planned is None else self._planned.out
        return runtime.run(outs, lses, out, self._dtype, self._planned)


def _check(name: str, given: Any, planned: Any) -> None:
    """ValueError for partials that are not as many, as long and listed or stacked as those of planning time."""
    listed = isinstance(planned, (list, tuple))
    if isinstance(given, (list, tuple)) != listed or (listed and len(given) != len(planned)):
        expected = f"a list of {len(planned)}" if listed else "one array"
        got = f"a list of {len(given)}" if isinstance(given, (list, tuple)) else "one array"
        raise ValueError(f"{name}: got {got}, expected {expected}, as when the call was planned")
    pairs = zip(given, planned, strict=True) if listed else [(given, planned)]
    for n, (array, own) in enumerate(pairs):
        check_form(f"{name}[{n}]" if listed else name, array, own)
