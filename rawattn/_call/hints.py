"""Advice in error messages for callers who are used to another library.

Pure functions of shapes, names and types. No framework is imported to recognise its arrays.
"""

from __future__ import annotations

import difflib
import inspect
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypedDict, TypeVar

import numpy as np

from rawattn._call.keywords import (
    FUNCTIONS,
    IN_JAX,
    IN_LAYOUT,
    IN_LENGTHS,
    IN_PAGES,
    IN_PULLBACK,
    KEYWORDS,
)
from rawattn._interop.xla import is_traced

_MODULES = ("torch", "jax")  # those of this package that `import rawattn` leaves out
ACCEPTED_WINDOW = "a tuple (left, right) of ints >= 0, or None for an unbounded side"
_MOST_SHOWN = 120  # characters of a value in a message
Shape = Sequence[int]
Function = TypeVar("Function", bound=Callable[..., Any])


def transposed(q: Shape, k: Shape, v: Shape, framework: str | None = None) -> str:
    """Advice for shapes that would fit if the heads axis and the rows axis were swapped, else "".

    Such shapes are (batch, heads, seqlen, D), or packed (heads, total, D). framework: that of the arrays, by `framework_of`.
    """
    if _fits(q, k, v) or not _fits(_swapped(q), _swapped(k), _swapped(v)):
        return ""
    rows = len(q) - 3  # the first of the two axes
    looks = "(batch, heads, seqlen, D)" if rows else "(heads, total, D)"
    by = f"x.transpose({rows}, {rows + 1})"
    if framework is None or framework.partition(".")[0] != "torch":
        by = f"x.swapaxes({rows}, {rows + 1}), in torch {by}"
    return f"; these look like {looks}: pass {by}"


def undivided(q: Shape) -> str:
    """Advice for a q of three axes in a call without `seqs`, which may be (batch, seqlen, width), else ""."""
    if len(q) != 3:
        return ""
    return (
        "; q of three axes is a packed batch, for which seqs says where sequences start: of (batch, seqlen, width) pass "
        "x.reshape(batch, seqlen, heads, D)"
    )


def _fits(q: Shape, k: Shape, v: Shape) -> bool:
    """Whether the shapes agree. The range of the head dim is not checked, since swapping axes does not change it."""
    if not len(q) == len(k) == len(v) or len(q) not in (3, 4):
        return False
    return (
        (len(q) == 3 or q[0] == k[0] == v[0])
        and k[-3] == v[-3]
        and q[-2] >= 1
        and k[-2] >= 1
        and q[-2] % k[-2] == 0
        and k[-2] == v[-2]
        and q[-1] == k[-1]
    )


def _swapped(shape: Shape) -> Shape:
    if len(shape) not in (3, 4):
        return shape
    return (*shape[:-3], shape[-2], shape[-3], shape[-1])


def padding_mask(
    mask: Shape, batch: int, seqlen_q: int, seqlen_k: int, in_pages: bool = False
) -> str:
    """Advice for a `mask` that has the shape of a padding mask, else ""."""
    if len(mask) != 2 or mask[0] != batch or mask[1] not in (seqlen_q, seqlen_k):
        return ""
    lengths = (
        "seqlen_k=mask.sum(1), for a mask of the keys,"
        if in_pages
        else "seqs=SeqLayout.from_padding_mask(mask),"
    )
    return (
        f"; this looks like a padding mask (batch, seqlen): where padding comes last pass {lengths} "
        "else mask=mask[:, None, None, :] (True = keep)"
    )


def renamed(keyword: str, layout: bool = False) -> str | None:
    """Advice for a keyword of another library, as "write ..."; None for a keyword that is not known.

    layout: whether it was given to `SeqLayout` and not to a call.
    """
    return (IN_LAYOUT if layout else KEYWORDS).get(keyword)


class NoOthers(TypedDict):
    """For type checkers: ``**unknown: Unpack[NoOthers]`` accepts no keywords beside the named ones."""


def hides_unknown(function: Function) -> Function:
    """`function` itself, with a signature that hides ``**unknown`` and ``*misplaced``, which it takes only to refuse them.

    A wrapper that refuses them would cost every call more than the empty dict does.
    """
    shown = inspect.signature(function)
    refused = "unknown", "misplaced"
    named = [x for x in shown.parameters.values() if x.name not in refused]
    vars(function)["__signature__"] = shown.replace(parameters=named)
    return function


def _concerns(advice: str, accepted: Iterable[str]) -> bool:
    """Whether a function that accepts these arguments accepts all those that `advice` names, q among them.

    In parentheses are arguments of another function.
    """
    outside, before = advice, ""
    while outside != before:
        outside, before = re.sub(r"\([^()]*\)", "", outside), outside
    return set(re.findall(r"(?<![\w.])\w+(?==)|\bq\b", outside)) <= set(accepted)


def refuse_unknown(
    function: str, unknown: Iterable[str], accepted: Iterable[str], layout: bool = False
) -> NoReturn:
    """Raises TypeError for the first keyword in `unknown`, with advice what to write instead."""
    keyword, known = next(iter(unknown)), [x for x in accepted if x not in ("self", "cls")]
    # `SeqLayout.from_lengths` and `from_padding_mask` have other arguments than the ones that the advice names.
    advice = None if function.startswith("SeqLayout.") else renamed(keyword, layout)
    if function.endswith(("paged_attention", "append_kv")):
        advice = IN_PAGES.get(keyword, advice)
    if function == "SeqLayout.from_lengths":
        advice = IN_LENGTHS.get(keyword)
    if function == "rawattn.jax.attention":
        advice = IN_JAX.get(keyword, advice)
    if function.startswith("the backward of"):
        advice = IN_PULLBACK.get(keyword, advice)
    if advice is None or not _concerns(advice, known):
        close = difflib.get_close_matches(keyword, known, 1)
        advice = f"did you mean {close[0]}=" if close else f"accepted are {', '.join(known)}"
    raise TypeError(f"{keyword}: {function} has no such argument; {advice}")


def no_attribute(module: str, name: str, public: Iterable[str] = ()) -> AttributeError:
    """The error for an attribute that a module of this package does not have. public: the names that `rawattn` has."""
    advice = FUNCTIONS.get(name) or (f"it is rawattn.{name}" if name in public else "")
    if module == "rawattn" and name in _MODULES:
        advice = f"write `import rawattn.{name}` first: it is loaded on request alone, as it imports {name}"
    return AttributeError(
        f"module {module!r} has no attribute {name!r}{'; ' if advice else ''}{advice}"
    )


def layout_advice(obj: object) -> str:
    """Advice for a `seqs` that is not a SeqLayout: how to make one of what was given."""
    shape, dtype = getattr(obj, "shape", None), str(getattr(obj, "dtype", ""))
    if shape is not None and len(shape) == 2 and dtype.endswith("bool"):
        return "; of a mask (True for a token) rawattn.SeqLayout.from_padding_mask(mask)"
    if isinstance(obj, dict):
        return "; write rawattn.SeqLayout(**seqs)"
    if isinstance(obj, (int, np.integer)):
        return "; dense sequences of equal lengths need none"
    shown = "..."
    if isinstance(obj, (list, tuple)):
        if any(hasattr(each, "__len__") or hasattr(each, "shape") for each in obj):
            return "; write rawattn.SeqLayout(seqstart_q=..., seqstart_k=...) of starts"
        few = len(obj) <= 8 and all(isinstance(each, (int, np.integer)) for each in obj)
        shown = str([int(each) for each in obj]) if few else shown
    elif shape is not None:
        shown = "cu_seqlens"
    return (
        f"; of starts (cumulative lengths) write rawattn.SeqLayout(seqstart_q={shown}), of lengths "
        "rawattn.SeqLayout.from_lengths(...), of a padded batch's rawattn.SeqLayout(seqlen_q=..., seqlen_k=...)"
    )


def short(value: Any) -> str:
    """The `repr` of a value on one line, cut where it is long: nested lists alone would fill pages."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def window_end(value: Any) -> int | None:
    """One end of `window`: an int >= 0, or None for an unbounded side.

    TypeError or ValueError for anything else. The message about -1, by which other libraries mean unbounded, advises None.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        # Arrays are shown by type only: their contents may be on a GPU.
        shown, fix = f"{short(value)} ", ""
        if hasattr(value, "__dlpack__"):
            shown = ""
            fix = "; pass numbers, as by window=(int(left), int(right))"
        if is_traced(value):
            fix = "; under jax.jit it is a constant: name it in static_argnames='window'"
        raise TypeError(
            f"window: got {shown}({type(value).__name__}), expected {ACCEPTED_WINDOW}{fix}"
        )
    if value == -1:
        raise ValueError(
            f"window: got -1, expected {ACCEPTED_WINDOW}; where -1 meant unbounded use None, as in "
            "window=(None, None)"
        )
    if value < 0:
        raise ValueError(f"window: got {value}, expected {ACCEPTED_WINDOW}")
    return int(value)
