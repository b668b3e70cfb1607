"""A text as the backends take it: the expressions of its value, its derivative, and its partial derivatives."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rawattn._scores import derive
from rawattn._scores.expression import FLOAT, INT, SCORE, Expression, walk
from rawattn._scores.language import Array, Names, number, parse, truth
from rawattn._scores.line import Line, line

# The dtypes of captured arrays, and the types that their elements have in a text.
ELEMENTS = {
    "float16": FLOAT,
    "bfloat16": FLOAT,
    "float32": FLOAT,
    "float64": FLOAT,  # the reference alone: kernels and the CPU backend compute in float32
    "int32": INT,
    "int64": INT,
    "bool": "bool",
}


class ScoreText(NamedTuple):
    """The part of a score function that decides which kernel is compiled. It is part of the key of compiled kernels.

    arrays: (name, dtype, rank) of each captured array; scalars: (name, type) of each captured number. No shapes, no values.
    wide: the names of arrays in which a step along an axis is 2 GiB or more, so that kernels multiply in 64 bits.
    """

    language: str
    forward: str
    backward: str | None
    wrt: tuple[str, ...]
    arrays: tuple[tuple[str, str, int], ...]
    scalars: tuple[tuple[str, str], ...]
    wide: tuple[str, ...] = ()

    def of_strides(self, strides: Iterable[Sequence[int]]) -> ScoreText:
        """The text for captured arrays of these strides, in bytes."""
        wide = tuple(
            name
            for (name, _, _), each in zip(self.arrays, strides, strict=True)
            if any(abs(step) >= 1 << 31 for step in each)
        )
        return self._replace(wide=wide)


class Partial(NamedTuple):
    """The derivative with respect to the element at `indices` of a captured array. array: its index in `ScoreText.arrays`."""

    array: int
    indices: tuple[Expression, ...]
    value: Expression


class Program(NamedTuple):
    """A text in the expression dialect: the new score and its derivatives."""

    value: Expression
    derivative: Expression
    partials: tuple[Partial, ...]

    @property
    def additive(self) -> bool:
        """Whether the derivative is exactly 1 wherever a key is seen."""
        return self.derivative == derive.ONE

    @property
    def needs_score(self) -> bool:
        """Whether derivatives, or where they belong, depend on the score as it was before the function."""
        found = (
            self.derivative,
            *(x for each in self.partials for x in (each.value, *each.indices)),
        )
        return any(derive.mentions(each, SCORE) for each in found)


@functools.lru_cache(maxsize=256)
def program(text: ScoreText) -> Program:
    """The program of a score text. ValueError for a text that the dialect does not accept."""
    value = number("score_mod", _parsed("score_mod", text, has_score=True))
    visible = derive.without_hidden_branches(value)
    loads = [
        node for node in walk(value) if node.op == "load" and text.arrays[node.value][0] in text.wrt
    ]
    of_score, *of_loads = derive.derivatives(visible, (SCORE, *loads))
    partials = (
        Partial(node.value, node.args, each) for node, each in zip(loads, of_loads, strict=True)
    )
    return Program(value, of_score, tuple(each for each in partials if each.value != derive.ZERO))


@functools.lru_cache(maxsize=256)
def line_of(text: ScoreText, *, causal: bool) -> Line | None:
    """The term that a score text adds if it is linear in the key's position, else None (`line.line`)."""
    if text.language != "expression":
        return None
    return line(program(text).value, causal=causal)


@functools.lru_cache(maxsize=256)
def predicate(text: ScoreText) -> Expression:
    """The expression of a predicate's text."""
    return truth("predicate", _parsed("predicate", text, has_score=False))


def _parsed(argument: str, text: ScoreText, *, has_score: bool) -> Expression:
    arrays = {
        name: Array(n, ELEMENTS[dtype], rank) for n, (name, dtype, rank) in enumerate(text.arrays)
    }
    names = Names(arrays, dict(text.scalars))
    return parse(argument, text.forward, names, has_score=has_score)
