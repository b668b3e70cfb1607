"""Random and edge-case texts of the score language, with the arrays that they capture."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np

from rawattn._scores import numpy_eval
from rawattn._scores.expression import POSITION
from rawattn._scores.score_mod import Predicate, ScoreMod

CAPTURED: dict[str, Any] = {
    "slope": np.float32([0.5, -0.25, 0.125, 1.5, -0.75]),
    "table": np.arange(-6, 6, dtype=np.float16).reshape(3, 4) / 4,
    "ids": np.int32([3, -1, 0, 2, 2, 5]),
    "docs": np.int64([0, 0, 1, 1, 1, 2, 2]),
    "flags": np.array([True, False, False, True]),
    "cap": 1.5,
    "n": 3,
    "on": True,
}


def used(text: str) -> dict[str, Any]:
    words = set(re.findall(r"[a-z_]+", text))
    return {name: value for name, value in CAPTURED.items() if name in words}


def score_mod(text: str) -> ScoreMod:
    """Make a ScoreMod in which all captured float arrays have gradients."""
    captured = used(text)
    wrt = tuple(name for name in ("slope", "table") if name in captured)
    return ScoreMod(text, wrt=wrt, **captured)


def predicate(text: str) -> Predicate:
    return Predicate(text, **used(text))


def positions(count: int, seed: int = 0) -> dict[str, Any]:
    """Return random positions by name. Some are out of range of the captured arrays."""
    draw = np.random.default_rng(seed)
    return {name: draw.integers(0, 12, count) for name in POSITION}


def values_of(mod: ScoreMod | Predicate, score: Any = 0.0, **at: Any) -> np.ndarray:
    """Evaluate in the dtype of `score`, or in float64 if it is a plain number."""
    where = [np.asarray(at.get(name, 0)) for name in POSITION]
    if isinstance(mod, Predicate):
        return numpy_eval.holds(mod.text, *where, mod.arrays, mod.scalars)
    score = score if isinstance(score, np.ndarray) else np.float64(score)
    return numpy_eval.evaluate(mod.text, score, *where, mod.arrays, mod.scalars)


# The value of each text at score 3, head 1, and 0 for all other positions.
EDGES = {
    "0 * score + 1 // q_idx": 0.0,
    "0 * score + 1 % q_idx": 0.0,
    "0 * score + (2147483647 + head)": -2147483648.0,  # integers wrap around
    "0 * score + 65536 * 65536 * head": 0.0,
    "0 * score - 2147483648.0 + -2147483648 // head": -4294967296.0,
    "0 * score + abs(-2147483647 - head)": -2147483648.0,
    "0 * score + (-2147483647 - head) // -1": -2147483648.0,
    "0 * score + (-2147483647 - head) % -1": 0.0,
    "0 * score + int(score * 1e30)": 2147483647.0,
    "0 * score + int(-score * 1e30)": -2147483648.0,
    "0 * score + int(log(-score))": 0.0,
    "0 * score + int(-1.75 * head)": -1.0,
    "0 * score + int(3e9)": 2147483647.0,  # literals saturate too
    "0 * score + int(-1e300)": -2147483648.0,
    "0 * score + int(inf)": 2147483647.0,
    "0 * score + -int(-inf)": -2147483648.0,
    "0 * score + abs(int(-inf))": -2147483648.0,
    "0 * score + (head < int(1e300))": 1.0,
    "0 * score + big[q_idx]": 2147483647.0,
    "0 * score + big[head]": -2147483648.0,
    "0 * score + slope[-1] + slope[99]": 0.5 - 0.75,
    "score + table[-3, 99]": 3.0 - 0.75,
    "min(score, log(-score))": 3.0,
    "max(score, log(-score))": 3.0,
    "score // 0.1": 29.0,
    "-score // inf": -1.0,
    "score // -inf": -1.0,
    "score % -inf": -np.inf,
    "(score - 3) / 1e-40": 0.0,
    "where(head < 1, score, -inf)": -np.inf,
    "score + 1e39": np.inf,
    "-2147483648.0 + 0 * score": -2147483648.0,
}


def edge(text: str) -> ScoreMod:
    captured = {
        "slope": CAPTURED["slope"], "table": CAPTURED["table"], "big": np.array([2**40, -(2**40)]),
    }  # fmt: skip
    return ScoreMod(text, **{name: x for name, x in captured.items() if name in text})


class Writer:
    """Writes random expressions of a given type."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def float(self, depth: int) -> str:
        if depth <= 0:
            leaves = ("score", "score", "cap", "slope[head]", "table[q_idx, kv_idx]", "0.5", "1.25")
            return self._dice.choice(leaves)
        x, y = (lambda: self.float(depth - 1)), (lambda: self.float(depth - 2))
        return self._one_of(
            lambda: f"({x()} + {y()})",
            lambda: f"({x()} - {y()})",
            lambda: f"({x()} * {y()})",
            lambda: f"({x()} / (1.5 + tanh({y()})))",
            lambda: f"{x()} / {self._dice.choice(('4', '-2.5', 'n'))}",
            lambda: f"-({x()})",
            lambda: f"exp(tanh({x()}))",
            lambda: f"log(1.5 + abs({x()}))",
            lambda: f"tanh({x()})",
            lambda: f"sin({x()})",
            lambda: f"cos({x()})",
            lambda: f"sqrt(1 + tanh({x()}) ** 2)",
            lambda: f"abs({x()})",
            lambda: f"min({x()}, {y()}, {self.int(1)})",
            lambda: f"max({x()}, {y()})",
            lambda: f"({x()}) ** {self._dice.choice(('2', '3', '1', '0', '1.0'))}",
            lambda: f"(2 + sin({x()})) ** {self._dice.choice(('-1', '0.5', '-1.5', '2.5', '17'))}",
            lambda: f"where({self.bool(depth - 1)}, {x()}, {y()})",
            lambda: f"({x()} if {self.bool(depth - 1)} else {self.int(depth - 1)})",
            lambda: f"({x()} + {self.int(depth - 1)})",
            lambda: (
                f"({self.exact(2)}) % {self._dice.choice(('0.75', '-0.5', 'cap', '-3', '(slope[head] + 3)'))}"
            ),
            lambda: (
                f"({self.exact(2)}) // {self._dice.choice(('0.75', '-0.5', 'cap', '-3', '(slope[head] + 3)'))}"
            ),
            lambda: f"floor({self.exact(2)})",
            lambda: f"float({self.int(depth - 1)})",
            lambda: f"slope[{self.int(depth - 1)}]",
            lambda: f"table[{self.int(1)}, {self.int(1)}]",
        )

    def exact(self, depth: int) -> str:
        """Return an expression with the same bits on every machine, so that a branch may depend on it."""
        if depth <= 0:
            return self._dice.choice(("score", "0.5", "q_idx", "slope[head]", "table[head, batch]"))
        x, y = self.exact(depth - 1), self.exact(depth - 1)
        return self._dice.choice((f"({x} + {y})", f"({x} - {y})", f"{x} * {y}"))

    def int(self, depth: int) -> str:
        if depth <= 0:
            leaves = (*POSITION, *POSITION, "0", "1", "-2", "7", "n", "ids[q_idx]", "docs[kv_idx]")
            return self._dice.choice(leaves)
        x, y = (lambda: self.int(depth - 1)), (lambda: self.int(depth - 1))
        divisor = self._dice.choice(("3", "-2", "n", "-1", "1", "(1 + abs(kv_idx - q_idx))"))
        return self._one_of(
            lambda: f"({x()} + {y()})",
            lambda: f"({x()} - {y()})",
            lambda: f"({x()} * {y()}) % 13",
            lambda: f"({x()}) // {divisor}",
            lambda: f"({x()}) % {divisor}",
            lambda: f"-({x()})",
            lambda: f"abs({x()})",
            lambda: f"min({x()}, {y()})",
            lambda: f"max({x()}, {y()}, n)",
            lambda: f"floor({x()})",
            lambda: f"int({self.exact(1)})",
            lambda: f"where({self.bool(depth - 1)}, {x()}, {y()})",
            lambda: f"({self.bool(depth - 1)}) + {x()}",
            lambda: f"({self.int(0)}) ** {self._dice.choice(('2', '3', '0'))} % 17",
            lambda: f"ids[{x()}]",
            lambda: f"docs[{x()}]",
        )

    def bool(self, depth: int, *, score: bool = True) -> str:
        if depth <= 0:
            return self._dice.choice(("on", "flags[head]", "q_idx >= kv_idx", "True", "head == n"))
        x, y = (lambda: self.bool(depth - 1, score=score)), (lambda: self.int(depth - 1))
        compare = self._dice.choice(("<", "<=", ">", ">=", "==", "!="))
        number = self.exact(1) if score else self.int(1)
        return self._one_of(
            lambda: f"({x()} and {x()})",
            lambda: f"({x()} or {x()} or {x()})",
            lambda: f"(not {x()})",
            lambda: f"({y()} {compare} {y()})",
            lambda: f"({y()} < {y()} <= {y()})",
            lambda: f"({number} {compare} {y()})",
            lambda: f"where({x()}, {x()}, {x()})",
            lambda: f"flags[{y()}]",
        )

    def predicate(self, depth: int) -> str:
        """Return a bool expression without the score."""
        while "score" in (text := self.bool(depth, score=False)):
            pass
        return text

    def _one_of(self, *ways: Any) -> str:
        return str(self._dice.choice(ways)())


class _Clamped:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        clamped = (min(max(i, 0), n - 1) for i, n in zip(indices, self._array.shape, strict=True))
        return self._array[tuple(clamped)].item()


def by_python(text: str, **names: Any) -> Any:
    """Evaluate a text as Python itself does, for one score and position."""
    captured = {
        name: _Clamped(value) if isinstance(value, np.ndarray) else value
        for name, value in CAPTURED.items()
    }
    functions = {name: getattr(math, name) for name in ("exp", "log", "tanh", "sin", "cos", "sqrt")}
    others = {
        "inf": math.inf,
        "where": lambda c, x, y: x if c else y,
        "floor": lambda x: float(math.floor(x)) if isinstance(x, float) else x,
    }
    return eval(text, {}, {**functions, **others, **captured, **names})
