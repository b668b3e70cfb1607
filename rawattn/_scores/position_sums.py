"""Integer expressions that are linear sums of positions, and conversions of them to float that need not be made per score."""

from __future__ import annotations

from rawattn._scores.expression import (
    FLOAT,
    INT,
    KEY,
    QUERY,
    Expression,
    apply,
    converted,
    walk,
)

# A linear sum: the coefficient of each position, and under the key None the constant.
Sum = dict[Expression | None, int]

# The bound on positions with which sums are checked against wrapping around in int32.
_LARGEST_POSITION = 2**26


def sum_of_positions(node: Expression, *, causal: bool = False) -> Sum | None:
    """The linear sum of positions that an int expression is; None if it is none, or may wrap around.

    causal: no key beyond `q_idx` is seen, so that `abs(q_idx - kv_idx)` has no bend.
    """
    form = _sum(node, causal)
    if form is None:
        return None
    most = sum(abs(n) * (1 if of is None else _LARGEST_POSITION) for of, n in form.items())
    return form if most < 2**31 else None


def _sum(node: Expression, causal: bool) -> Sum | None:
    if node.type != INT:
        return None
    if node.op == "const":
        return {None: node.value}
    if node.op == "position":
        return {node: 1}
    forms = [sum_of_positions(arg, causal=causal) for arg in node.args]
    if node.op not in ("add", "sub", "neg", "mul", "abs") or None in forms:
        return None
    x, y = forms[0], forms[-1]
    assert x is not None and y is not None
    if node.op == "neg":
        return _times(x, -1)
    if node.op == "abs":
        return _magnitude(x) if causal else None
    if node.op != "mul":
        sign = 1 if node.op == "add" else -1
        return {of: x.get(of, 0) + sign * y.get(of, 0) for of in {**x, **y}}
    if set(y) <= {None}:
        return _times(x, y.get(None, 0))
    return _times(y, x.get(None, 0)) if set(x) <= {None} else None


def _magnitude(form: Sum) -> Sum | None:
    """The absolute value of a sum if no key is beyond its query: a multiple of `q_idx - kv_idx` plus a constant of the same
    sign. None for other sums.
    """
    kept = {of: n for of, n in form.items() if n}
    apart = kept.get(QUERY, 0)
    if set(kept) - {QUERY, KEY, None} or apart != -kept.get(KEY, 0):
        return None
    for sign in (1, -1):
        if sign * apart >= 0 and sign * kept.get(None, 0) >= 0:
            return _times(kept, sign)
    return None


def _times(form: Sum, n: int) -> Sum:
    return {of: n * each for of, each in form.items()}


def with_early_floats(root: Expression) -> Expression:
    """The same values, with conversions to float moved inward to sums of positions where possible: `float(abs(q_idx - kv_idx))`
    becomes `abs(float(q_idx - kv_idx))`.
    """
    found: dict[Expression, Expression] = {}
    for node in walk(root):
        args = tuple(found[x] for x in node.args)
        early = _early_float(node.args[0]) if node.op == "to_float" else None
        found[node] = early or Expression(node.op, node.type, args, node.value)
    return found[root]


def _early_float(node: Expression) -> Expression | None:
    """An int expression as a float, converted at its sums of positions; None if it is not made of such sums."""
    if sum_of_positions(node) is not None:
        return converted(node, FLOAT)
    if node.op not in ("abs", "neg", "min", "max"):
        return None
    args = [_early_float(x) for x in node.args]
    return None if None in args else apply(node.op, *(x for x in args if x is not None))
