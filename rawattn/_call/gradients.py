"""`Gradients`: the result of every backward pass, and the arrays that a caller may give to write it to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rawattn._call.options import flag


class Gradients(NamedTuple):
    """Gradients of an attention call, each with the shape of its input.

    A gradient that was not asked for, or whose input was not given, is None. `captured` is a dict of the gradients of arrays
    that a score function captures, by name.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink_logits: Any = None
    captured: Any = None


_NONE = Gradients()


def wanted(into: Any, bias: Any = None, want_dbias: Any = None) -> Gradients:
    """The arrays to write, as `Gradients`. Checks `want_dbias` and types; the arrays are checked with those of the call."""
    if want_dbias is not None and flag("want_dbias", want_dbias) and bias is None:
        raise ValueError("want_dbias: got True, but bias is None; pass the bias or drop want_dbias")
    if into is None:
        return _NONE
    if not isinstance(into, Gradients):
        raise TypeError(
            f"into: got {type(into).__name__}, expected rawattn.Gradients(dq=..., dk=..., dv=...) or None"
        )
    if into.captured is not None and not isinstance(into.captured, Mapping):
        raise TypeError(
            f"into.captured: got {type(into.captured).__name__}, expected a dict of arrays, by names that score_mod has "
            "in wrt"
        )
    return into


def check_given(into: Gradients, made: Collection[str], captured: Collection[str]) -> None:
    """ValueError for an array in `into` that is for a gradient which the call does not have.

    made: the gradients of options' arrays that the call has. captured: the captured arrays that have gradients.
    """
    options = {"dbias": "bias=, and no want_dbias=False", "dsink_logits": "sink_logits="}
    for field, wanted in options.items():
        if getattr(into, field) is not None and field not in made:
            raise ValueError(
                f"into.{field}: got an array, but the call has no such gradient, expected None; to have it pass {wanted}"
            )
    for name in into.captured or ():
        if name not in captured:
            raise ValueError(
                f"into.captured: got an array for {name!r}, expected names that score_mod has in wrt: "
                f"{', '.join(captured) or 'none'}"
            )
