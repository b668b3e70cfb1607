"""Derivatives of expressions, exact and simplified, so that a derivative that is always 0 or 1 is the constant ZERO or ONE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rawattn._scores.expression import BOOL, FLOAT, Expression, apply, const, walk

ZERO, ONE = const(0.0), const(1.0)


def derivative(expression: Expression, variable: Expression) -> Expression:
    """The derivative of a float with respect to `variable`: SCORE or a load.

    At a kink it is the derivative of the branch that the evaluation takes: `max(a, b)` with equal arguments has that of a. That
    of `abs(x)` is 0 where x is 0. So is that of `sqrt(x)`, unless dx is a constant: then it is infinite there
    (`_zero_at_root`).
    """
    return derivatives(expression, (variable,))[0]


def derivatives(expression: Expression, variables: Iterable[Expression]) -> list[Expression]:
    """The derivatives of a float with respect to each of `variables`, as by `derivative`."""
    nodes = tuple(walk(expression))
    return [_derivative(nodes, variable) for variable in variables]


def _derivative(nodes: Sequence[Expression], variable: Expression) -> Expression:
    """The derivative of the last of `nodes`, among which operands come first."""
    found: dict[Expression, Expression] = {variable: ONE}  # of nodes whose derivative is not ZERO
    for node in nodes:
        if node.type != FLOAT or node in found or not any(x in found for x in node.args):
            continue
        rule = _RULES.get(node.op)
        if rule is not None:
            value = rule(node, *(found.get(x, ZERO) for x in node.args))
            if value != ZERO:
                found[node] = value
    return found.get(nodes[-1], ZERO)


def mentions(expression: Expression, leaf: Expression) -> bool:
    return any(node == leaf for node in walk(expression))


def without_hidden_branches(expression: Expression) -> Expression:
    """The expression without branches of -inf, which hide a key: its gradient is 0 whatever the derivative is.

    So the derivative of `where(condition, score + x, -inf)` becomes 1.
    """
    if expression.op != "where":
        return expression
    condition, x, y = expression.args
    if y == _MINUS_INF:
        return without_hidden_branches(x)
    if x == _MINUS_INF:
        return without_hidden_branches(y)
    return choose(condition, without_hidden_branches(x), without_hidden_branches(y))


def add(x: Expression, y: Expression) -> Expression:
    if ZERO in (x, y):
        return y if x == ZERO else x
    return const(x.value + y.value) if _numbers(x, y) else apply("add", x, y)


def negative(x: Expression) -> Expression:
    if x.op == "const":
        return x if x == ZERO else const(-x.value)
    return x.args[0] if x.op == "neg" else apply("neg", x)


def subtract(x: Expression, y: Expression) -> Expression:
    if ZERO in (x, y):
        return negative(y) if x == ZERO else x
    return const(x.value - y.value) if _numbers(x, y) else apply("sub", x, y)


def multiply(x: Expression, y: Expression) -> Expression:
    if ZERO in (x, y):
        return ZERO
    if ONE in (x, y):
        return y if x == ONE else x
    return const(x.value * y.value) if _numbers(x, y) else apply("mul", x, y)


def divide(x: Expression, y: Expression) -> Expression:
    return x if x == ZERO or y == ONE else apply("div", x, y)


def choose(condition: Expression, x: Expression, y: Expression) -> Expression:
    return x if x == y else Expression("where", FLOAT, (condition, x, y))


def power(x: Expression, n: float) -> Expression:
    return ONE if n == 0 else x if n == 1 else Expression("pow", FLOAT, (x,), n)


def _numbers(*args: Expression) -> bool:
    return all(x.op == "const" and math.isfinite(x.value) for x in args)


def _less(x: Expression, y: Expression) -> Expression:
    return Expression("lt", BOOL, (x, y))


def _quotient(node: Expression, dx: Expression, dy: Expression) -> Expression:
    return divide(subtract(dx, multiply(node, dy)), node.args[1])


def _remainder(node: Expression, dx: Expression, dy: Expression) -> Expression:
    return subtract(dx, multiply(dy, apply("floordiv", *node.args)))


def _power(node: Expression, dx: Expression) -> Expression:
    n, (x,) = node.value, node.args
    found = multiply(multiply(const(float(n)), power(x, n - 1)), dx)
    return _zero_at_root(x, dx, found) if 0 < n < 1 else found


def _zero_at_root(root: Expression, dx: Expression, found: Expression) -> Expression:
    """The derivative `found`, which is infinite where `root` is 0, set to 0 there.

    Needed if dx is not constant: for the root of `max(score, 0)`, dx is 0 on the flat side, and inf * 0 would be NaN.
    """
    if dx.op == "const":
        return found
    return choose(Expression("eq", BOOL, (root, ZERO)), ZERO, found)


def _absolute(node: Expression, dx: Expression) -> Expression:
    (x,) = node.args
    # dx occurs once in the result, so the size of nested derivatives grows linearly, not exponentially.
    below = _less(x, ZERO)
    signed = multiply(choose(below, const(-1.0), ONE), dx)
    return choose(apply("or", _less(ZERO, x), below), signed, ZERO)


# By operation: the derivative of a float node, from the node and the derivatives of its operands. It is ZERO if these are.
# Other operations have 0.
_RULES: dict[str, Callable[..., Expression]] = {
    "add": lambda node, dx, dy: add(dx, dy),
    "sub": lambda node, dx, dy: subtract(dx, dy),
    "neg": lambda node, dx: negative(dx),
    "mul": lambda node, dx, dy: add(multiply(dx, node.args[1]), multiply(node.args[0], dy)),
    "div": _quotient,
    "mod": _remainder,
    "pow": _power,
    "where": lambda node, _, dx, dy: choose(node.args[0], dx, dy),
    "exp": multiply,
    "log": lambda node, dx: divide(dx, node.args[0]),
    "tanh": lambda node, dx: multiply(subtract(ONE, multiply(node, node)), dx),
    "sin": lambda node, dx: multiply(apply("cos", *node.args), dx),
    "cos": lambda node, dx: negative(multiply(apply("sin", *node.args), dx)),
    "sqrt": lambda node, dx: _zero_at_root(node, dx, divide(multiply(const(0.5), dx), node)),
    "abs": _absolute,
    "min": lambda node, dx, dy: choose(_less(node.args[1], node.args[0]), dy, dx),
    "max": lambda node, dx, dy: choose(_less(node.args[0], node.args[1]), dy, dx),
}
_MINUS_INF = const(-math.inf)
