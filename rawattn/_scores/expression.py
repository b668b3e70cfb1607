"""The typed expression tree that a text is parsed into: three types, and every conversion is an explicit node.

Integers have 32 bits and wrap around, on the host as on the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

BOOL, INT, FLOAT = "bool", "int", "float"

# The position of a score, and the lengths of its sequence. All are integers.
POSITION = ("batch", "head", "kv_head", "q_idx", "kv_idx", "seqlen_q", "seqlen_k")

_RANKS = {BOOL: 0, INT: 1, FLOAT: 2}


class Expression:
    """A tree: the operation `op` on `args`. `type` is that of the result. `value` depends on `op`:

    const: the number; position: a name of POSITION; score: None; scalar: its index among the captured numbers;
    load: the index of the captured array (`args` are the indices of its element); pow: the exponent.

    Equal trees are one object. Thus comparing and hashing never visit a tree, whose size as text may be exponential: of
    `a < b < c` both comparisons have b as an operand.
    """

    __slots__ = ("__weakref__", "args", "op", "type", "value")

    op: str
    type: str
    args: tuple[Expression, ...]
    value: Any

    def __new__(
        cls, op: str, type: str, args: tuple[Expression, ...] = (), value: Any = None
    ) -> Expression:
        # 0.0 and -0.0 are equal, but not the same number.
        sign = math.copysign(1, value) if isinstance(value, float) else 0
        key = (op, type, args, value, sign)
        with _lock:
            found = _expressions.get(key)
            if found is None:
                found = _expressions[key] = super().__new__(cls)
                found.op, found.type, found.args, found.value = op, type, args, value
        return found


_lock = threading.RLock()  # reentrant, since a signal handler may make an expression too
_expressions: WeakValueDictionary[tuple[Any, ...], Expression] = WeakValueDictionary()


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


def balanced(op: str, args: Sequence[Expression]) -> Expression:
    """An associative operation on one or more operands, as a tree no deeper than necessary: `depth_of_balanced`."""
    if len(args) == 1:
        return args[0]
    left = 1 << (depth_of_balanced(len(args)) - 1)
    return apply(op, balanced(op, args[:left]), balanced(op, args[left:]))


def depth_of_balanced(count: int) -> int:
    """How many operations lie one in another in `balanced` of so many operands."""
    return (count - 1).bit_length()


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
    seen: set[Expression] = set()
    waiting = [(root, False)]
    while waiting:
        node, operands_done = waiting.pop()
        if operands_done:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            if node not in leaves:
                waiting += [(arg, False) for arg in reversed(node.args)]
