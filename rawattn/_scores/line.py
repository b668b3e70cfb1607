"""Texts that add to a score what grows evenly from key to key, as slopes do: `score + slope[head] * (kv_idx - q_idx)`.

What is added is then a number for each row, and another one times the key: kernels need neither function nor place of each
score.
"""

from __future__ import annotations

from typing import NamedTuple

from rawattn._scores import derive
from rawattn._scores.expression import INT, SCORE, Expression, const, place

_QUERY, _KEY = place("q_idx"), place("kv_idx")
# No place is beyond it, as far as integers that must not wrap around are concerned.
_LARGEST_PLACE = 2**26


class Line(NamedTuple):
    """added: what is added to the score; step: by how much it grows to the next key, the same for all keys of a row."""

    added: Expression
    step: Expression


def line(value: Expression, *, causal: bool) -> Line | None:
    """Of a text's value; None where it is nothing of the kind.

    causal: no key beyond `q_idx` is seen, so that `abs(q_idx - kv_idx)` has no bend.
    """
    added = _without_score(value)
    if added is None:
        return None
    step = _step(added, causal)
    return None if step is None else Line(added, step)


def _without_score(node: Expression) -> Expression | None:
    """Of `score + x`: x. None where the score is more than a summand."""
    if node == SCORE:
        return derive.ZERO
    if node.op == "where":
        condition, *branches = node.args
        x, y = map(_without_score, branches)
        free = not derive.mentions(condition, SCORE)
        return derive.choose(condition, x, y) if free and x and y else None
    if node.op not in ("add", "sub"):
        return None
    combine = derive.add if node.op == "add" else derive.subtract
    left, right = node.args
    if not derive.mentions(right, SCORE):
        rest = _without_score(left)
        return rest and combine(rest, right)
    if node.op == "add" and not derive.mentions(left, SCORE):
        rest = _without_score(right)
        return rest and combine(left, rest)
    return None


def _step(node: Expression, causal: bool) -> Expression | None:
    """Of a float: how much it is more for the next key. None where that depends on the key."""
    if not derive.mentions(node, _KEY):
        return derive.ZERO
    if node.op == "to_float":
        form = _linear(node.args[0], causal)
        return None if form is None else const(float(form.get(_KEY, 0)))
    if node.op == "neg":
        step = _step(node.args[0], causal)
        return step and derive.negative(step)
    if node.op not in ("add", "sub", "mul", "div", "where"):
        return None
    left, right = node.args[-2:]
    x, y = _step(left, causal), _step(right, causal)
    if x is None or y is None:
        return None
    if node.op == "where":
        condition = node.args[0]
        return None if derive.mentions(condition, _KEY) else derive.choose(condition, x, y)
    if node.op in ("add", "sub"):
        return (derive.add if node.op == "add" else derive.subtract)(x, y)
    if not derive.mentions(right, _KEY):
        return (derive.multiply if node.op == "mul" else derive.divide)(x, right)
    if node.op == "mul" and not derive.mentions(left, _KEY):
        return derive.multiply(left, y)
    return None


def _linear(node: Expression, causal: bool) -> dict[Expression | None, int] | None:
    """An int as a sum of places, each so many times, and of a number, whose key is None. None where it may be no such sum,
    or wrap around.
    """
    form = _sum(node, causal)
    if form is None:
        return None
    most = sum(abs(n) * (1 if of is None else _LARGEST_PLACE) for of, n in form.items())
    return form if most < 2**31 else None


def _sum(node: Expression, causal: bool) -> dict[Expression | None, int] | None:
    if node.type != INT:
        return None
    if node.op == "const":
        return {None: node.value}
    if node.op == "place":
        return {node: 1}
    forms = [_linear(arg, causal) for arg in node.args]
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


def _magnitude(form: dict[Expression | None, int]) -> dict[Expression | None, int] | None:
    """Where no key is beyond its row."""
    kept = {of: n for of, n in form.items() if n}
    apart = kept.get(_QUERY, 0)
    if set(kept) - {_QUERY, _KEY, None} or apart != -kept.get(_KEY, 0):
        return None
    for sign in (1, -1):
        if sign * apart >= 0 and sign * kept.get(None, 0) >= 0:
            return _times(kept, sign)
    return None


def _times(form: dict[Expression | None, int], n: int) -> dict[Expression | None, int]:
    return {of: n * each for of, each in form.items()}
