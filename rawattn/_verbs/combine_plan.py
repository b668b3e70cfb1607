"""A plan of `combine`."""

from __future__ import annotations

from typing import Any

from rawattn._call import partials
from rawattn._call.options import DEFAULTS
from rawattn._call.partials import PartialsSide
from rawattn._interop.arrays import framework_of
from rawattn._interop.native import native_of
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._runtime import dispatch
from rawattn._runtime.combine import combine_verb
from rawattn._verbs.combine import combine, read
from rawattn._verbs.plan import Plan
from rawattn._verbs.plan_arguments import check_form, description

_NAMES = ("outs", "lses")


class CombinePlan(Plan):
    """A `Plan` of `combine`: calls take as many partials as were planned, listed where these were listed, else stacked."""

    def __init__(self, outs: Any, lses: Any, out: Any, dtype: Any) -> None:
        self._given = partials.given("outs", outs), partials.given("lses", lses)
        self._out, self._dtype = out, dtype
        long = next((x for x in self._given if x.listed and len(x.arrays) > MAX_LISTED), None)
        self._is_long = long is not None
        if long is not None and _is_native(long.arrays[0]):
            raise ValueError(
                f"{long.name}: has more than {MAX_LISTED} arrays, so each call would copy them, and a plan allocates "
                "nothing; pass one stacked, contiguous array"
            )
        arrays, *form = read(outs, lses, dtype, out)
        verb, targets = combine_verb(*form), (out, None)
        if self._is_long:  # planning raises every error that the call has
            dispatch.check(verb, arrays, targets, DEFAULTS, False, None)
            return
        returned: Any = tuple
        super().__init__(verb, arrays, targets, DEFAULTS, False, None, returned, ())

    def __repr__(self) -> str:
        return description(
            "combine",
            (each for side in self._given for each in zip(side.names(), side.arrays, strict=True)),
        )

    def __call__(self, *args: Any, out: Any = None, into: Any = None, **named: Any) -> Any:
        """(out, lse). If a list is long, this is an ordinary call of `combine`."""
        if into is not None:
            raise TypeError("into: this plan writes its results to out=")
        if len(args) > len(_NAMES) or not named.keys() <= set(_NAMES[len(args) :]):
            raise TypeError(
                f"{next(iter(named), 'plan')}: this plan takes outs and lses once each, and out; whatever else the call "
                "has is that of planning time"
            )
        given = dict(zip(_NAMES, args, strict=False)) | named
        sides = [
            _like(given[planned.name], planned) if planned.name in given else planned
            for planned in self._given
        ]
        if self._is_long:
            for side, planned in zip(sides, self._given, strict=True):
                for name, *both in zip(side.names(), side.arrays, planned.arrays, strict=True):
                    check_form(name, *both)
            outs, lses = (list(x.arrays) if x.listed else x.arrays[0] for x in sides)
            return combine(outs, lses, out=self._out if out is None else out, dtype=self._dtype)
        flat = sides[0].arrays + sides[1].arrays
        return super().__call__(*flat) if out is None else super().__call__(*flat, out=out)


def _is_native(array: Any) -> bool:
    """Whether an array is CuPy's or a CUDA tensor of torch, for which plans own kernels and memory."""
    native = native_of(framework_of(array))
    return native is not None and native.read((array,), 1) is not None


def _like(given: Any, planned: PartialsSide) -> PartialsSide:
    """The partials of a call. ValueError if their number differs from planning time, or whether they are listed."""
    side = partials.given(planned.name, given)
    if (side.listed, len(side.arrays)) != (planned.listed, len(planned.arrays)):
        got, expected = (
            f"a list of {len(x.arrays)}" if x.listed else "one array" for x in (side, planned)
        )
        raise ValueError(
            f"{side.name}: got {got}, expected {expected}, as when the call was planned"
        )
    return side
