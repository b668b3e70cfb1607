"""The typed expression tree that a text is parsed into: three types, and every conversion is an explicit node.

Integers have 32 bits and wrap around, on the host as on the device.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

BOOL, INT, FLOAT = "bool", "int", "float"

# The position of a score, and the lengths of its sequence. All are integers.
POSITION = ("batch", "head", "kv_head", "q_idx", "kv_idx", "seqlen_q", "seqlen_k")

_RANKS = {BOOL: 0, INT: 1, FLOAT: 2}


class Expression(NamedTuple):
    """A tree: the operation `op` on `args`. `type` is that of the result. `value` depends on `op`:

    const: the number; position: a name of POSITION; score: None; scalar: its index among the captured numbers;
    load: the index of the captured array (`args` are the indices of its element); pow: the exponent.
    """

    op: str
    type: str
    args: tuple[Expression, ...] = ()
    value: Any = None


SCORE = Expression("score", FLOAT)


def position(name: str) -> Expression:
    return Expression("position", INT, (), name)


QUERY, KEY = position("q_idx"), position("kv_idx")


def const(value: bool | int | float) -> Expression:
    kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
    return Expression("const", kind, (), value)


def apply(op: str, *args: Expression) -> Expression:
    """A node of an operation whose result has the type of its operands."""
    return Expression(op, args[0].type, args)


def converted(x: Expression, kind: str) -> Expression:
    """x converted to a type. Constants are converted here, other expressions when they are evaluated."""
    if x.type == kind:
        return x
    if x.op == "const":
        return const(
            saturated(x.value) if kind == INT else {BOOL: bool, FLOAT: float}[kind](x.value)
        )
    return Expression(f"to_{kind}", kind, (x,))


def saturated(value: float) -> int:
    """The 32-bit int that kernels make of a number: truncated toward 0, clamped to the range; NaN becomes 0."""
    if math.isnan(value):
        return 0
    return int(min(max(value, -(2**31)), 2**31 - 1))


def common_type(args: tuple[Expression, ...], least: str = BOOL) -> str:
    """The type of a result of operands of several types, by Python's rules; at least `least`."""
    return max((least, *(x.type for x in args)), key=_RANKS.__getitem__)


def walk(root: Expression, leaves: Container[Expression] = ()) -> Iterator[Expression]:
    """Every distinct subexpression of `root`, operands first. leaves: expressions whose operands are not visited."""
    seen: dict[int, Expression] = {}
    distinct: set[Expression] = set()
    waiting = [(root, False)]
    while waiting:
        node, operands_done = waiting.pop()
        if operands_done:
            if node not in distinct:
                distinct.add(node)
                yield node
        elif id(node) not in seen:
            seen[id(node)] = node
            waiting.append((node, True))
            if node not in leaves:
                waiting += [(arg, False) for arg in reversed(node.args)]
