"""Texts that add to the score a term linear in the key's position, as ALiBi does: `score + slope[head] * (kv_idx - q_idx)`.

The added term is then a row's constant plus a step times the key's index. So kernels need not evaluate the function, nor know
the position, for each score.
"""

from __future__ import annotations

from typing import NamedTuple

from rawattn._scores import derive
from rawattn._scores.expression import KEY, QUERY, SCORE, Expression, const
from rawattn._scores.position_sums import sum_of_positions


class Line(NamedTuple):
    """added: the term that is added to the score; step: its growth from one key to the next, the same for all keys of a row.

    row_step: its growth from one query to the next if that and `step` are the same for a whole head, else None.
    """

    added: Expression
    step: Expression
    row_step: Expression | None


def line(value: Expression, *, causal: bool) -> Line | None:
    """The line of a text's value; None if the text does not add such a term.

    causal: no key beyond `q_idx` is seen, so that `abs(q_idx - kv_idx)` has no bend.
    """
    added = _without_score(value)
    if added is None:
        return None
    step = _step(added, KEY, causal)
    if step is None:
        return None
    row_step = _step(added, QUERY, causal)
    if row_step is not None and (derive.mentions(row_step, KEY) or derive.mentions(step, QUERY)):
        row_step = None
    return Line(added, step, row_step)


def _without_score(node: Expression) -> Expression | None:
    """x of `score + x`; None if the score enters in any other way."""
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


def _step(node: Expression, along: Expression, causal: bool) -> Expression | None:
    """The growth of a float from one position to the next along `along` (QUERY or KEY); None if it depends on the position."""
    if not derive.mentions(node, along):
        return derive.ZERO
    if node.op == "to_float":
        form = sum_of_positions(node.args[0], causal=causal)
        return None if form is None else const(float(form.get(along, 0)))
    if node.op == "neg":
        step = _step(node.args[0], along, causal)
        return step and derive.negative(step)
    if node.op not in ("add", "sub", "mul", "div", "where"):
        return None
    left, right = node.args[-2:]
    x, y = _step(left, along, causal), _step(right, along, causal)
    if x is None or y is None:
        return None
    if node.op == "where":
        condition = node.args[0]
        return None if derive.mentions(condition, along) else derive.choose(condition, x, y)
    if node.op in ("add", "sub"):
        return (derive.add if node.op == "add" else derive.subtract)(x, y)
    if not derive.mentions(right, along):
        return (derive.multiply if node.op == "mul" else derive.divide)(x, right)
    if node.op == "mul" and not derive.mentions(left, along):
        return derive.multiply(left, y)
    return None
