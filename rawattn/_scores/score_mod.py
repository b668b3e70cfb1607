"""`ScoreMod`, the user's score function, and `Predicate`, its counterpart for masks: a text and the arrays it captures."""

from __future__ import annotations

import keyword
import math
import re
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rawattn import _handles
from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.options import for_message
from rawattn._interop import dynamo
from rawattn._interop.advice import array_advice, cast
from rawattn._interop.arrays import framework_of, import_array
from rawattn._interop.xla import is_traced
from rawattn._scores import lint
from rawattn._scores.expression import BOOL, FLOAT, INT
from rawattn._scores.language import RESERVED, normalised
from rawattn._scores.program import ELEMENTS, ScoreText, predicate, program

LANGUAGES = ("expression", "cuda")
MAX_ARRAYS = MAX_SCALARS = 8
_MAX_RANK = 4
_ARRAYS = "arrays of 1 to 4 axes and Python numbers"


class ScoreMod:
    """A function of the attention scores, compiled into the kernels and differentiated.

    It is applied after scale and softcap and before the bias. In its text `score` is the score of query `q_idx` and key
    `kv_idx`, both positions in their sequence. `batch`, `head`, `kv_head`, `seqlen_q` and `seqlen_k` can be read too; all of
    these are integers.

    Parameters
    ----------
    forward
        With `language="expression"`: an expression in Python's syntax that gives the new score. Accepted are + - * / // % **,
        comparisons, and/or/not, `a if c else b`, `where(c, a, b)`, exp, log, tanh, sin, cos, sqrt, abs, floor, min, max, int,
        float. `//` and `%` round as in Python, also for negative numbers; the exponent of `**` must be a literal number.
        Integers have 32 bits and wrap around; an integer division by zero gives 0, by a literal 0 it is refused. An index
        outside an axis is clamped to it, so that -1 is the first element, not the last. A score of `-inf` hides the key:
        `where(kv_idx % 2 == 0, score, -inf)`. On GPUs, in calls of 16-bit elements, exp, log, tanh and divisions that depend
        on the score have errors of a few units in the last place of float32; log has an absolute one of 2e-7 near 1.

        With `language="cuda"`: C++ statements that assign `score`; they run on GPUs only. The positions above are `const int`,
        captured numbers are constants, and arrays are read as `slope[head]` or `slope(head)`, those of several axes as
        `table(q_idx, kv_idx)`; indices are clamped here too. Such a text runs as code of your program, so never accept one
        from an untrusted source.
    backward
        For `language="cuda"`: C++ statements that turn `dscore` from the gradient with respect to the new score into the
        gradient with respect to the old score. `score` is the old score in them. Without it gradients raise
        NotImplementedError.
    language : "expression" or "cuda"
        The language of both texts.
    wrt
        Names of captured float arrays for which `attention_backward` returns gradients too, in `Gradients.captured`. Only for
        `language="expression"`, whose texts are differentiated automatically.
    **captured : array or number
        What the text reads by name: arrays (`slope[head]`, `table[q_idx, kv_idx]`) and numbers, at most eight of each. Arrays
        have 1 to 4 axes and may be of any framework; float16, bfloat16, float32, int32, int64 or bool. They must be on the
        device of q. They are never copied: each call reads their values anew.

    Raises
    ------
    TypeError, ValueError
        The message names the argument and the piece of the text, or the captured name, and says what is accepted.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> slopes = np.array([0.5, 0.25], np.float32)
    >>> rawattn.ScoreMod("score + slope[head] * (kv_idx - q_idx)", slope=slopes)
    ScoreMod('score + slope[head] * (kv_idx - q_idx)', slope=float32[2])
    """

    __slots__ = ("__weakref__", "_arrays", "_function", "_scalars", "_text", "handle")

    @dynamo.untraced
    @checks_arguments("rawattn.ScoreMod")
    def __init__(
        self,
        /,
        forward: str,
        backward: str | None = None,
        *,
        language: str = "expression",
        wrt: str | Iterable[str] = (),
        **captured: Any,
    ) -> None:
        given: Any = language
        if not isinstance(given, str) or given not in LANGUAGES:
            error = ValueError if isinstance(given, str) else TypeError
            raise error(f"language: got {for_message(language)}, expected 'expression' or 'cuda'")
        forward = _text("score_mod", forward)
        found = _captured("score_mod", captured)
        names = _wrt(wrt, found, language)
        if language == "expression":
            if backward is not None:
                raise ValueError(
                    f"backward: got {for_message(backward)}, expected None: an expression is differentiated by itself; "
                    'backward is for language="cuda"'
                )
            text = ScoreText(language, normalised(forward), None, names, *found.forms)
            program(text)
        else:
            backward = None if backward is None else _text("backward", backward)
            text = ScoreText(language, forward, backward, names, *found.forms)
            lint.check(text)
        _refuse_unused("score_mod", text)
        self._text = text
        self._arrays, self._scalars = MappingProxyType(found.arrays), found.scalars
        self._function = SharedFunction.of(text, found.scalars, found.arrays)
        self.handle = self._function.handle

    @property
    def text(self) -> ScoreText:
        """The part that decides which kernel is compiled: texts, dtypes and names, no values."""
        return self._text

    @property
    def arrays(self) -> Mapping[str, Any]:
        """The captured arrays as they were given, in the order of their names in `text`."""
        return self._arrays

    @property
    def scalars(self) -> tuple[float, ...]:
        """The values of captured numbers, in the order of their names in `text`."""
        return self._scalars

    def with_arrays(self, arrays: Mapping[str, Any]) -> ScoreMod:
        """The same function with other arrays. arrays: all captured ones, by name, with the same dtypes and numbers of axes."""
        return self._function.with_arrays(arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made anew from the texts and the captured arrays and numbers."""
        text = self._text
        kinds: dict[str, type] = {BOOL: bool, INT: int, FLOAT: float}
        numbers = {
            name: kinds[kind](value)
            for (name, kind), value in zip(text.scalars, self._scalars, strict=True)
        }
        captured = {**self._arrays, **numbers}
        return _unpickle, (text.forward, text.backward, text.language, text.wrt, captured)

    def __repr__(self) -> str:
        return _repr_of("ScoreMod", self)


def _unpickle(
    forward: str,
    backward: str | None,
    language: str,
    wrt: tuple[str, ...],
    captured: dict[str, Any],
) -> ScoreMod:
    return ScoreMod(forward, backward, language=language, wrt=wrt, **captured)


class SharedFunction:
    """A `ScoreMod` without its torch tensors. Compiled programs find it by its handle and get the tensors as inputs.

    All `ScoreMod`s that are equal but for their tensors share one.
    """

    __slots__ = ("__weakref__", "_arrays", "_scalars", "handle", "tensors", "text")

    def __init__(
        self, text: ScoreText, scalars: tuple[float, ...], arrays: Mapping[str, Any], handle: str
    ) -> None:
        """arrays: the captured ones that are not torch tensors."""
        self.text, self.handle = text, handle
        self._scalars, self._arrays = scalars, arrays
        self.tensors = tuple(name for name, *_ in text.arrays if name not in arrays)

    @staticmethod
    def of(
        text: ScoreText, scalars: tuple[float, ...], arrays: Mapping[str, Any]
    ) -> SharedFunction:
        """arrays: all captured ones. Those other than tensors are read at each call, so a function with one equals no other."""
        tensor = getattr(sys.modules.get("torch"), "Tensor", ())
        others = {name: x for name, x in arrays.items() if not isinstance(x, tensor)}
        handle = _handles.unique_handle() if others else _handles.handle_of(tuple(text), scalars)
        return _handles.register(handle, SharedFunction(text, scalars, others, handle))

    def with_tensors(self, tensors: Iterable[Any]) -> ScoreMod:
        """The `ScoreMod` with these tensors, in the order of `self.tensors`."""
        return self.with_arrays({**self._arrays, **dict(zip(self.tensors, tensors, strict=True))})

    def with_arrays(self, arrays: Mapping[str, Any]) -> ScoreMod:
        """The `ScoreMod` with all of these arrays. Unlike the constructor it checks the arrays only, not the text."""
        for name, dtype, rank in self.text.arrays:
            found = _form(name, arrays[name])
            if found != (dtype, rank):
                raise TypeError(
                    f"score_mod: got {name} of {found[0]} with {found[1]} axes in a program or a backward of one of {dtype} "
                    f"with {rank}; expected the same form"
                )
        made = ScoreMod.__new__(ScoreMod)
        made._text, made._scalars = self.text, self._scalars
        made._arrays = MappingProxyType({name: arrays[name] for name, *_ in self.text.arrays})
        made._function, made.handle = self, self.handle
        return made


class Predicate:
    """Which keys a query sees: a text in the expression dialect that gives a bool. It cannot read `score`."""

    __slots__ = ("arrays", "scalars", "text")

    def __init__(self, predicate_text: str, /, **captured: Any) -> None:
        forward = _text("predicate", predicate_text)
        found = _captured("predicate", captured)
        self.text = ScoreText("expression", normalised(forward), None, (), *found.forms)
        predicate(self.text)
        _refuse_unused("predicate", self.text)
        for name, dtype, _ in self.text.arrays:
            if dtype == "float64":
                fix = cast(framework_of(captured[name]), name, "float32")
                raise TypeError(
                    f"{name}: got dtype float64, accepted are {_dtypes()}; convert it, as by {fix}"
                )
        self.arrays: Mapping[str, Any] = MappingProxyType(found.arrays)
        self.scalars = found.scalars

    def __repr__(self) -> str:
        return _repr_of("Predicate", self)


def require_float32(text: ScoreText) -> None:
    """TypeError, naming the array, for float64: only the reference takes it."""
    for name, dtype, _ in text.arrays:
        if dtype == "float64":
            raise TypeError(
                f"{name}: got dtype float64, which rawattn.reference alone takes; accepted are {_dtypes()}; convert it, as by "
                f"{cast(None, name, 'float32')}"
            )


def require_gradient(text: ScoreText) -> None:
    """Refuses a text without a derivative, for calls that need one."""
    if text.language == "cuda" and text.backward is None:
        raise NotImplementedError(
            'score_mod: got a text with language="cuda" and no backward, so it has no gradient; pass backward, '
            "statements that turn `dscore` into the gradient with respect to the old score"
        )


def _dtypes() -> str:
    return ", ".join(name for name in ELEMENTS if name != "float64")


class _Captured(NamedTuple):
    arrays: dict[str, Any]
    scalars: tuple[float, ...]
    forms: tuple[tuple[tuple[str, str, int], ...], tuple[tuple[str, str], ...]]


def _text(argument: str, given: Any) -> str:
    if not isinstance(given, str):
        example = "q_idx >= kv_idx" if argument == "predicate" else "score * 2"
        raise TypeError(f"{argument}: got {for_message(given)}, expected a text, as in {example!r}")
    text = given.strip()
    if not text:
        raise ValueError(f"{argument}: got an empty text")
    return text


def _captured(argument: str, captured: Mapping[str, Any]) -> _Captured:
    arrays: dict[str, Any] = {}
    array_forms, scalar_forms, scalars = [], [], []
    for name, value in captured.items():
        _check_name(argument, name)
        number = _number(name, value)
        if number is None:
            arrays[name] = value
            array_forms.append((name, *_form(name, value)))
        else:
            scalar_forms.append((name, number[0]))
            scalars.append(number[1])
    for kind, found, most in (("arrays", arrays, MAX_ARRAYS), ("numbers", scalars, MAX_SCALARS)):
        if len(found) > most:
            raise ValueError(
                f"{argument}: got {len(found)} captured {kind}, expected at most {most}"
            )
    return _Captured(arrays, tuple(scalars), (tuple(array_forms), tuple(scalar_forms)))


def _check_name(argument: str, name: str) -> None:
    if name in RESERVED:
        raise ValueError(
            f"{argument}: got a captured {name!r}, but the language has this name itself; capture it by another one"
        )
    if keyword.iskeyword(name):
        raise ValueError(
            f"{argument}: got a captured {name!r}, expected a name that is no keyword of Python; capture it by another one"
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
        raise ValueError(
            f"{argument}: got a captured {name!r}, expected a name of letters, digits and underscores"
        )


def _number(name: str, value: Any) -> tuple[str, float] | None:
    """The type and the value of a number; None for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return BOOL, float(value)
    if isinstance(value, (int, np.integer)):
        if abs(int(value)) >= 2**31 or float(np.float32(int(value))) != int(value):
            raise ValueError(
                f"{name}: got {value}, expected an int that float32 holds exactly; pass a float, or an int32 array of one "
                "element"
            )
        return INT, float(value)
    # A bfloat16 number of ml_dtypes is not an np.floating.
    if isinstance(value, (float, np.floating)) or type(value).__name__ == "bfloat16":
        return FLOAT, _float(name, float(value))
    return None


def _float(name: str, value: float) -> float:
    """The value. ValueError if float32, in which kernels get it, would make it infinite or zero."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    if (math.isinf(rounded) and math.isfinite(value)) or (rounded == 0 and value != 0):
        meant = f"float('{rounded}')" if rounded else "0.0"
        raise ValueError(
            f"{name}: got {value}, expected a float that float32 holds: 0, inf, -inf, or of magnitude 1.4e-45 to 3.4e38; "
            f"pass {meant} if that is meant"
        )
    return value


def _form(name: str, value: Any) -> tuple[str, int]:
    """(dtype, rank) of an array, from its attributes if it has them, so that no stream has to wait."""
    if not hasattr(value, "__dlpack__"):
        advice = array_advice(value, name)
        raise TypeError(
            f"{name}: got {for_message(value)}, accepted are {_ARRAYS}{'; ' if advice else ''}{advice or ''}"
        )
    given, value = value, _with_attributes(name, value)
    if not getattr(value.dtype, "isnative", True):  # the dtype's name does not show its byte order
        import_array(name, value)
    dtype = getattr(value.dtype, "name", None) or str(value.dtype).rpartition(".")[2]
    if dtype not in ELEMENTS:
        fix = cast(framework_of(given), name, "int32" if "int" in dtype else "float32")
        raise TypeError(
            f"{name}: got dtype {dtype}; accepted are {_dtypes()}; convert it, as by {fix}"
        )
    shape = tuple(value.shape)
    if not 1 <= len(shape) <= _MAX_RANK:
        advice = (
            "join some of them"
            if shape
            else f"pass the number, {name}.item(), or {name}.reshape(1) and write {name}[0]"
        )
        if is_traced(value):
            advice = f"pass jnp.reshape({name}, 1) and write {name}[0]"
        raise ValueError(f"{name}: got shape {shape}, expected 1 to {_MAX_RANK} axes; {advice}")
    if math.prod(shape) == 0:
        raise ValueError(f"{name}: got shape {shape}, expected at least one element")
    return dtype, len(shape)


def _with_attributes(name: str, value: Any) -> Any:
    """The array itself if it has the attributes dtype and shape, else a view that has them."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    return import_array(name, value).array


def _wrt(given: Any, found: _Captured, language: str) -> tuple[str, ...]:
    listed = isinstance(given, Iterable) and not hasattr(given, "__dlpack__")
    names = (given,) if isinstance(given, str) else tuple(given) if listed else ()
    if not (isinstance(given, str) or listed) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"wrt: got {for_message(given)}, expected names of captured arrays")
    if names and language != "expression":
        raise ValueError(
            f"wrt: got {names}, expected () with language={language!r}: gradients of captured arrays are those of the "
            "expression dialect"
        )
    floats = {name for name, dtype, _ in found.forms[0] if ELEMENTS[dtype] == FLOAT}
    for name in names:
        if name not in floats:
            known = ", ".join(sorted(floats)) or "none"
            raise ValueError(f"wrt: got {name!r}, expected names of captured float arrays: {known}")
    if len(set(names)) < len(names):
        raise ValueError(f"wrt: got {names}, expected each name once")
    return names


def _refuse_unused(argument: str, text: ScoreText) -> None:
    words = set(re.findall(r"[A-Za-z_]\w*", f"{text.forward} {text.backward or ''}"))
    names = (*(name for name, *_ in text.arrays), *(name for name, _ in text.scalars))
    for name in names:
        if name not in words:
            raise ValueError(
                f"{argument}: got a captured {name!r}, which the text does not use; leave it out"
            )


def _repr_of(name: str, it: ScoreMod | Predicate) -> str:
    text = it.text
    parts = [repr(text.forward)]
    if text.backward is not None:
        parts.append(repr(text.backward))
    if text.language != "expression":
        parts.append(f"language={text.language!r}")
    if text.wrt:
        parts.append(f"wrt={text.wrt}")
    for array, dtype, _ in text.arrays:
        shape = _with_attributes(array, it.arrays[array]).shape
        parts.append(f"{array}={dtype}{list(shape)}")
    for (scalar, kind), value in zip(text.scalars, it.scalars, strict=True):
        parts.append(
            f"{scalar}={value if kind == FLOAT else bool(value) if kind == BOOL else int(value)}"
        )
    return f"{name}({', '.join(parts)})"
