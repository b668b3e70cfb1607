"""Evaluates texts in NumPy, for the CPU backend and the reference: floats in the dtype of the scores, integers in int32.

Every function takes the position as integers or integer arrays that broadcast against the scores. `captured` holds the
captured arrays by name, on the host; `scalars` the values of captured numbers in the order of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn._scores.expression import BOOL, FLOAT, INT, POSITION, Expression, walk
from rawattn._scores.program import Program, ScoreText, program
from rawattn._scores.program import predicate as _predicate

Array = NDArray[Any]

_INT32 = np.iinfo(np.int32)


class PartialValues(NamedTuple):
    """Derivatives of scores with respect to a captured array's elements at `indices`. All arrays have the scores' shape."""

    name: str
    indices: tuple[Array, ...]
    partial: Array


def evaluate(
    text: ScoreText, score: Array, batch: Any, head: Any, kv_head: Any, q_idx: Any, kv_idx: Any,
    seqlen_q: Any, seqlen_k: Any, captured: Mapping[str, Any], scalars: Sequence[float],
) -> Array:  # fmt: skip
    """The new scores, in the dtype of `score`."""
    position = (batch, head, kv_head, q_idx, kv_idx, seqlen_q, seqlen_k)
    values = _Evaluation(text, score, position, captured, scalars)
    return values.whole(_of(text).value)


def derivative(
    text: ScoreText, score: Array, batch: Any, head: Any, kv_head: Any, q_idx: Any, kv_idx: Any,
    seqlen_q: Any, seqlen_k: Any, captured: Mapping[str, Any], scalars: Sequence[float],
) -> Array:  # fmt: skip
    """The derivative of the new scores with respect to the old ones, `score`. Undefined where the new score is -inf."""
    position = (batch, head, kv_head, q_idx, kv_idx, seqlen_q, seqlen_k)
    values = _Evaluation(text, score, position, captured, scalars)
    return values.whole(_of(text).derivative)


def partials(
    text: ScoreText, score: Array, batch: Any, head: Any, kv_head: Any, q_idx: Any, kv_idx: Any,
    seqlen_q: Any, seqlen_k: Any, captured: Mapping[str, Any], scalars: Sequence[float],
) -> list[PartialValues]:  # fmt: skip
    """Derivatives of the new scores with respect to the arrays of `wrt`. An array has one entry for each load of it."""
    position = (batch, head, kv_head, q_idx, kv_idx, seqlen_q, seqlen_k)
    values = _Evaluation(text, score, position, captured, scalars)
    return [
        PartialValues(
            text.arrays[each.array][0],
            tuple(map(values.spread, values.clamped(each.array, each.indices))),
            values.whole(each.value),
        )
        for each in _of(text).partials
    ]


def add_partial(total: Array, values: PartialValues, ds: Array) -> None:
    """Adds a captured array's gradient to `total`, which has its shape. ds: the gradient with respect to the new scores."""
    seen = ds != 0  # where a key is hidden its partial derivative is undefined
    products = np.where(seen, ds * np.where(seen, values.partial, 0), 0)
    flat = np.ravel_multi_index(values.indices, total.shape).reshape(-1)
    sums = np.bincount(flat, weights=products.reshape(-1), minlength=total.size)
    total += sums.reshape(total.shape).astype(total.dtype)


def holds(
    text: ScoreText, batch: Any, head: Any, kv_head: Any, q_idx: Any, kv_idx: Any, seqlen_q: Any,
    seqlen_k: Any, captured: Mapping[str, Any], scalars: Sequence[float],
) -> NDArray[np.bool_]:  # fmt: skip
    """Where a predicate is true."""
    position = (batch, head, kv_head, q_idx, kv_idx, seqlen_q, seqlen_k)
    values = _Evaluation(text, np.zeros((), np.float32), position, captured, scalars)
    return values.whole(_predicate(text))


def require_expression(text: ScoreText) -> None:
    """NotImplementedError for a text in CUDA."""
    if text.language != "expression":
        raise NotImplementedError(
            f"score_mod: got a text with language={text.language!r}, which needs a GPU; the CPU backend and "
            "rawattn.reference accept the expression dialect"
        )


def _of(text: ScoreText) -> Program:
    require_expression(text)
    return program(text)


class _Evaluation:
    """Evaluates expressions at given scores and positions. Common subexpressions are computed once."""

    def __init__(
        self,
        text: ScoreText,
        score: Array,
        position: Sequence[Any],
        captured: Mapping[str, Any],
        scalars: Sequence[float],
    ) -> None:
        self._score = np.asarray(score)
        self._float = self._score.dtype
        self._position = dict(zip(POSITION, (_int32(x) for x in position), strict=True))
        self._arrays = [np.asarray(captured[name]) for name, _, _ in text.arrays]
        self._scalars = scalars
        self._shape = np.broadcast_shapes(
            self._score.shape, *(np.shape(x) for x in self._position.values())
        )
        self._found: dict[Expression, Any] = {}

    def whole(self, expression: Expression) -> Array:
        """The value, broadcast to the common shape of scores and positions."""
        return self.spread(self._value(expression))

    def spread(self, x: Any) -> Array:
        return np.broadcast_to(x, self._shape)

    def clamped(self, array: int, indices: Sequence[Expression]) -> tuple[Array, ...]:
        shape = self._arrays[array].shape
        return tuple(
            np.clip(self._value(index), 0, extent - 1)
            for index, extent in zip(indices, shape, strict=True)
        )

    def _value(self, expression: Expression) -> Any:
        with np.errstate(all="ignore"):
            for node in walk(expression):
                if node not in self._found:
                    self._found[node] = self._one(node)
        return self._found[expression]

    def _one(self, node: Expression) -> Any:
        if node.op == "score":
            return self._score
        if node.op == "position":
            return self._position[node.value]
        if node.op == "const":
            return self._typed(node.value, node.type)
        if node.op == "scalar":
            return self._typed(self._scalars[node.value], node.type)
        if node.op == "load":
            return self._loaded(node)
        args = [self._found[x] for x in node.args]
        if node.op == "to_float":
            return self._typed(args[0], FLOAT)
        if node.op == "pow":
            return np.power(args[0], self._typed(node.value, node.type))
        return _OPERATIONS[node.op](*args)

    def _loaded(self, node: Expression) -> Any:
        loaded = self._arrays[node.value][self.clamped(node.value, node.args)]
        return _saturated(loaded) if node.type == INT else self._typed(loaded, node.type)

    def _typed(self, x: Any, kind: str) -> Any:
        dtypes = {FLOAT: self._float, INT: np.dtype(np.int32), BOOL: np.dtype(np.bool_)}
        return np.asarray(x).astype(dtypes[kind], copy=False)


def _int32(x: Any) -> Array:
    return np.asarray(x).astype(np.int32, copy=False)


def _saturated(x: Any) -> Array:
    """Numbers as int32: floats truncated toward 0, values beyond int32 clamped, NaN as 0."""
    x = np.asarray(x)
    if x.dtype.kind == "f":
        x = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
    clipped: Array = np.clip(x, _INT32.min, _INT32.max).astype(np.int32)
    return clipped


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "where": np.where,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "floor": np.floor,
    "min": np.fmin,
    "max": np.fmax,
    "to_int": _saturated,
}
