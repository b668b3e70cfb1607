"""The language of score functions: what it accepts, its values on host and device, and its derivatives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rawattn import ScoreMod
from rawattn._scores import numpy_eval
from rawattn._scores.cuda_text import device_text
from rawattn._scores.expression import POSITION, const, walk
from rawattn._scores.program import program
from rawattn._scores.score_mod import Predicate
from tests.score_trees import (
    CAPTURED,
    EDGES,
    Writer,
    by_python,
    edge,
    positions,
    predicate,
    score_mod,
    values_of,
)

TREES = st.randoms(use_true_random=False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("score +", r"invalid syntax.*\n  score \+\n {9}\^$"),
        ("score + 2147483648", "32 bits"),
        ("score - -2147483649", "32 bits"),
        ("score = 2", "invalid syntax|cannot assign"),
        ("score; 1", "invalid syntax"),
        ("score # more", "got a text with `#`"),
        ("foo + score", "got `foo`, which is unknown; known are score, batch, head.*inf, slope, table, n"),
        ("slope * score", r"got `slope`, an array.*`slope\[kv_idx\]`"),
        ("exp + score", r"got `exp`, a function.*`exp\(\.\.\.\)`"),
        ("score + 'a'", "got `'a'`, str"),
        ("score + None", "got `None`, NoneType"),
        ("score + 2j", "got `2j`, complex"),
        ("score + 3000000000", "got `3000000000`.*32 bits.*3000000000.0"),
        ("[score]", r"got `\[score\]`, List; accepted are numbers, \+ "),
        ("lambda: score", "got `lambda: score`, Lambda"),
        ("(score := 1)", "NamedExpr"),
        ("score, 1", "Tuple"),
        ("f'{score}'", "JoinedStr"),
        ("[score for x in y]", "ListComp"),
        ("score + math.inf", "got `math.inf`, Attribute.*write `inf` alone$"),
        ("score + self.n", "got `self.n`, Attribute.*write `n` alone$"),
        ("score.real", "got `score.real`, Attribute.*int, float$"),
        ("score @ score", "got `score @ score`, MatMult"),
        ("q_idx & 1", "BitAnd.*write `and`"),
        ("q_idx << 1", "got `q_idx << 1`, LShift"),
        ("score + ~q_idx", "got `~q_idx`, `~`; write `not`"),
        ("np.exp(score)", r"got `np.exp\(score\)`, an unknown function.*write `exp\(...\)`"),
        ("erf(score)", r"got `erf\(score\)`, an unknown function; known are exp.*float$"),
        ("sigmoid(score)", r"an unknown function.*; write `1 / \(1 \+ exp\(-x\)\)`"),
        ("torch.clamp(score, 0, 1)", r"an unknown.*; write `min\(max\(x, low\), high\)`"),
        ("pow(score, 2)", r"an unknown function.*; write `x \*\* 2`"),
        ("score && 1", r"expected one expression; write `and`\n  score && 1\n {9}\^$"),
        ("head ? 1 : score", r"expected one expression; write `a if c else b`\n"),
        ("__import__(score)", "an unknown function"),
        ("exp(score, 1)", "exp of 2 arguments, expected 1"),
        ("exp()", "exp of 0 arguments, expected 1"),
        ("min(score)", "min of 1 arguments, expected 2 or more"),
        ("where(head == 1, score)", "where of 2 arguments, expected 3"),
        ("exp(x=score)", "keywords"),
        ("exp(*score)", "Starred"),
        ("slope(head)", r"a call of an array.*`slope\[\.\.\.\]`"),
        ("slope[head, 1]", "2 indices of an array of 1 axis"),
        ("slope[head,]", "1 indices of an array of 1 axis"),
        ("table[head]", "1 indices of an array of 2 axes"),
        ("slope[1:2]", "got `1:2`, Slice"),
        ("slope[score]", r"got `score`, a float, expected an int as an index; write `int\(\.\.\.\)`"),
        ("slope[head / 2]", "got `head / 2`, a float"),
        ("score[head]", "expected an element of a captured array; captured are slope, table"),
        ("n[head]", "expected an element of a captured array"),
        ("where(score, 1, 2)", "got `score`, a float, expected a bool here; compare"),
        ("score if head else 1", "got `head`, an int, expected a bool"),
        ("score and head == 1", "got `score`, a float, expected a bool"),
        ("not head", "got `head`, an int"),
        ("head in q_idx", "got `head in q_idx`, In; accepted are < <= >"),
        ("head is q_idx", "Is; accepted are"),
        ("score ** score", "got `score \\*\\* score`, a power; .* number written out.*exp\\(y \\* log\\(x\\)\\)"),
        ("score ** n", "a power"),
        ("score ** True", "a power"),
        ("score ** inf", "a power"),
        ("q_idx ** 65", "a power of an int; accepted are exponents up to 64"),
        ("q_idx // 0", "a division of integers by 0"),
        ("q_idx % 0", "a division of integers by 0"),
        ("head == 1", "the text gives a bool, expected a number.*where"),
        ("+" * 300 + "score", "nests more than"),
        ("(" * 5000 + "score" + ")" * 5000, "nested|cannot be parsed|recursion"),
        ("score" + " + score" * 5000, "characters, expected at most"),
        ("score" + " + score" * 1000, "nests more than"),
        ("max(" + "score, " * 1200 + "1)", "nests more than"),
        ("min(" * 150 + "score, " + "1, 2), " * 149 + "3)", "nests more than"),
    ],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_mistakes_are_refused(text: str, says: str) -> None:
    captured = {"slope": CAPTURED["slope"], "table": CAPTURED["table"], "n": 3}
    with pytest.raises(ValueError, match=rf"(?s)^score_mod: .*({says})"):
        ScoreMod(text, **captured)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("score > 0", "got `score`, but a predicate has no score; known are batch"),
        ("head", "the text gives an int, expected a bool"),
        ("head / 2", "the text gives a float, expected a bool"),
        ("mask[head]", "expected an element of a captured array; captured are none"),
    ],
)
def test_mistakes_in_predicates_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^predicate: .*{says}"):
        Predicate(text)


LONG = {
    "and": ("score if " + " and ".join(f"kv_idx != {n}" for n in range(1100)) + " else 0", True),
    "or": ("0 if " + " or ".join(f"kv_idx == {n}" for n in range(1100)) + " else score", True),
    "chain": (
        "score if " + " <= ".join(f"{n // 5} + 0 * kv_idx" for n in range(900)) + " else 0",
        True,
    ),
    "long chain": ("score if " + "<".join(str(n % 10) for n in range(9900)) + " else 0", False),
    "nested chains": ("score if " + "0 < (" * 60 + "kv_idx" + ") < 9" * 60 + " else 0", False),
    "max": ("max(" + ", ".join(f"score - {n}" for n in range(190)) + ")", True),
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts(name: str) -> None:
    """Texts without deep nesting are accepted up to the limit of characters, in a time that grows with their length."""
    text, kept = LONG[name]
    mod = ScoreMod(text)
    assert len(device_text(mod.text, exact=True)) < 300_000
    at = np.array([-1, 5000]) if name == "or" else np.array([1200, 5000])
    assert values_of(mod, np.float32([3, 4]), kv_idx=at).tolist() == ([3, 4] if kept else [0, 0])


def test_long_logic_is_that_of_its_parts() -> None:
    parts = [f"kv_idx != {n}" for n in range(0, 40, 3)]
    at = np.arange(50)
    for op in ("and", "or"):
        whole = values_of(Predicate(f" {op} ".join(parts)), kv_idx=at)
        each = [values_of(Predicate(part), kv_idx=at) for part in parts]
        combine = np.logical_and if op == "and" else np.logical_or
        np.testing.assert_array_equal(whole, combine.reduce(each))
    chain = values_of(Predicate("0 <= kv_idx < 45 != 44 > kv_idx >= 3 < 7"), kv_idx=at)
    np.testing.assert_array_equal(chain, (at >= 3) & (at < 44))


def test_equal_expressions_are_one_object_and_signed_zeros_are_two() -> None:
    one, other = (program(ScoreMod(f"tanh({x}) / (head + 1)").text) for x in ("score", " score"))
    assert one.value is other.value and one.derivative is other.derivative
    assert const(0.0) is not const(-0.0) and const(1) is not const(True)
    assert values_of(ScoreMod("0.0 * score + 1 / -0.0"), np.float32([3])) == -np.inf


@pytest.mark.parametrize("y", [-5, -2, -1, 1, 3, 2**31 - 1, -(2**31)])
def test_integers_divide_as_in_python(y: int) -> None:
    numbers = np.array([-(2**31) + 1, -7, -6, -1, 0, 1, 5, 6, 2**31 - 1])
    mod = ScoreMod("x[q_idx] // y[0] + 0.0", x=numbers, y=np.array([y]))
    rest = ScoreMod("x[q_idx] % y[0] + 0.0", x=numbers, y=np.array([y]))
    index = np.arange(len(numbers))
    for x, quotient, remainder in zip(
        numbers.tolist(), values_of(mod, q_idx=index), values_of(rest, q_idx=index), strict=True
    ):
        assert (quotient, remainder) == divmod(x, y)


@pytest.mark.parametrize("text", EDGES)
def test_edges(text: str) -> None:
    """At score 3, head 1 and zeros elsewhere."""
    score = np.float32([3])
    if "1e39" in text:
        assert values_of(edge(text), score.astype(np.float64), head=1) == 1e39
    np.testing.assert_array_equal(values_of(edge(text), score, head=1), [np.float32(EDGES[text])])


def test_dtype_and_shape_of_values() -> None:
    at = {"q_idx": np.arange(3)[:, None], "kv_idx": np.arange(4)}
    for dtype in (np.float32, np.float64):
        for text in ("score + q_idx / 3", "head", "1", "0.1", "where(q_idx > 1, score, 2)"):
            result = values_of(ScoreMod(text), np.zeros((3, 4), dtype), **at)
            assert result.dtype == dtype and result.shape == (3, 4)
    assert values_of(Predicate("q_idx > kv_idx"), **at).dtype == np.bool_
    assert values_of(Predicate("True"), **at).shape == (3, 4)


@given(TREES)
@settings(max_examples=150)
def test_values_are_those_of_python(dice: random.Random) -> None:
    writer = Writer(dice)
    text, test = writer.float(4), writer.predicate(3)
    at = positions(6, dice.randrange(1000))
    score = np.linspace(-2.1, 2.3, 6)
    found, holds = values_of(score_mod(text), score, **at), values_of(predicate(test), **at)
    for n in range(6):
        position = {name: int(x[n]) for name, x in at.items()}
        expected = by_python(text, score=float(score[n]), **position)
        np.testing.assert_allclose(found[n], expected, rtol=1e-10, atol=1e-10, err_msg=text)
        assert holds[n] == by_python(test, **position), test


@given(TREES)
@settings(max_examples=150)
def test_derivatives_by_differences(dice: random.Random) -> None:
    text = Writer(dice).float(4)
    mod = score_mod(text)
    at = positions(8, dice.randrange(1000))
    where = [at[name] for name in POSITION]
    score = np.linspace(-2.1, 2.3, 8)
    # Random values do not lie at kinks, not even where arrays are compared. Only numbers written out in the text can.
    draw = np.random.default_rng(3)
    arrays = {
        name: draw.normal(size=x.shape) if x.dtype.kind == "f" else x
        for name, x in mod.arrays.items()
    }

    def value(score: np.ndarray, **changed: np.ndarray) -> np.ndarray:
        return numpy_eval.evaluate(mod.text, score, *where, {**arrays, **changed}, mod.scalars)

    def check(found: np.ndarray, ahead: Any) -> None:
        """`ahead(step)`: the values at that distance.

        Where two steps or two sides give different slopes, a kink lies there, or the text swings too fast for a slope.
        """
        far, near = ((ahead(h) - ahead(-h)) / (2 * h) for h in (4e-6, 1e-6))
        scale = 1 + np.abs(near) + np.abs(ahead(0))
        right, left = ((ahead(h) - ahead(0)) / h for h in (1e-6, -1e-6))
        smooth = (np.abs(far - near) < 1e-7 * scale) & (np.abs(right - left) < 1e-3 * scale)
        assume(smooth.mean() > 0.5)
        np.testing.assert_array_less((np.abs(near - found) / scale)[smooth], 1e-6, err_msg=text)

    derivative = numpy_eval.derivative(mod.text, score, *where, arrays, mod.scalars)
    check(derivative, lambda h: value(score + h))
    if program(mod.text).additive:
        assert np.all(derivative == 1)
    ds = np.random.default_rng(1).normal(size=8)
    partials = numpy_eval.partials(mod.text, score, *where, arrays, mod.scalars)
    for name in mod.text.wrt:
        total = np.zeros_like(arrays[name])
        for each in partials:
            if each.name == name:
                numpy_eval.add_partial(total, each, ds)
        direction = np.random.default_rng(2).normal(size=total.shape)
        along = np.zeros(8)  # the derivative in that direction, score by score
        for n in range(8):
            one = np.zeros_like(total)
            for each in partials:
                if each.name == name:
                    numpy_eval.add_partial(one, each, np.where(np.arange(8) == n, 1.0, 0.0))
            along[n] = (one * direction).sum()
        check(along, lambda h, name=name, d=direction: value(score, **{name: arrays[name] + h * d}))
        np.testing.assert_allclose(
            (along * ds).sum(), (total * direction).sum(), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize(
    ("text", "additive", "needs_score"),
    [
        ("score", True, False),
        ("score + slope[head] * (kv_idx - q_idx)", True, False),
        ("slope[head] * head - (-score)", True, False),
        ("where(kv_idx > 3, score, -inf)", True, False),
        ("where(kv_idx > 3, -inf, where(head == 1, score + 1, -inf))", True, False),
        ("where(kv_idx > 3, score + 1, score * 1)", True, False),
        ("score if q_idx > 1 else score - 2 ** 3", True, False),
        ("2 * score - score", True, False),
        ("score / 1 + floor(score)", True, False),
        ("score ** 1 + score // 3", True, False),
        ("(score + 0) % 3", True, False),
        ("2 * score", False, False),
        ("score * slope[head]", False, True),  # the partial derivative for slope is the score
        ("score * n", False, False),
        ("where(kv_idx > 3, score, 0)", False, False),
        ("where(score > 3, score + 1, score)", True, False),
        ("where(score > 3, score, 0)", False, True),
        ("score ** 2", False, True),
        ("tanh(score)", False, True),
        ("abs(score)", False, True),
        ("1.0", False, False),
        ("max(score, 0)", False, True),
    ],
)
def test_simple_derivatives_are_recognised(text: str, additive: bool, needs_score: bool) -> None:
    found = program(score_mod(text).text)
    assert (found.additive, found.needs_score) == (additive, needs_score)


def test_partials_are_one_for_each_element_that_is_read() -> None:
    text = "score + slope[head] * slope[head] + slope[q_idx] + slope[head] + 0 * table[0, 0]"
    found = program(score_mod(text).text)
    assert [each.array for each in found.partials] == [0, 0]
    assert not program(score_mod("where(slope[head] > 0, score, 1)").text).partials


def test_parts_of_a_gradient_outside_an_axis_belong_to_its_end() -> None:
    mod = score_mod("score + slope[kv_idx - 2]")
    values = numpy_eval.partials(
        mod.text, np.zeros(9), 0, 0, 0, 0, np.arange(9), 1, 9, mod.arrays, mod.scalars
    )
    total = np.zeros(5)
    numpy_eval.add_partial(total, values[0], np.arange(1.0, 10))
    np.testing.assert_array_equal(total, [1 + 2 + 3, 4, 5, 6, 7 + 8 + 9])


def test_where_the_gradient_is_zero_a_partial_derivative_may_be_anything() -> None:
    mod = score_mod("score + sqrt(slope[kv_idx])")
    arrays = {"slope": np.array([0.0, 4.0])}
    values = numpy_eval.partials(mod.text, np.zeros(2), *[0] * 4, np.arange(2), 0, 0, arrays, ())
    total = np.zeros(2)
    numpy_eval.add_partial(total, values[0], np.array([0.0, 1.0]))
    np.testing.assert_array_equal(total, [0, 0.25])


def test_derivatives_of_nested_roots_grow_by_sums() -> None:
    mod = ScoreMod("sqrt(" * 20 + "max(score, 0)" + ")" * 20)
    assert sum(1 for _ in walk(program(mod.text).derivative)) < 500


def test_derivatives_of_nested_magnitudes_grow_by_sums() -> None:
    text = "score"
    for n in range(20):
        text = f"abs({text} - {n}.5)"
    mod = ScoreMod(text)
    assert sum(1 for _ in walk(program(mod.text).derivative)) < 500
    at = [0] * len(POSITION)
    slope = numpy_eval.derivative(mod.text, np.array([-3.0, 100.0]), *at, {}, ())
    assert np.abs(slope).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "slopes"),
    [
        ("sqrt(max(score, 0))", [0, 0, 0.25]),
        ("max(score, 0) ** 0.5", [0, 0, 0.25]),
        ("sqrt(2 * max(score, 0) * 2)", [0, 0, 0.5]),
        ("sqrt(score)", [np.nan, np.inf, 0.25]),
        ("score ** -1", [-1 / 9, -np.inf, -1 / 16]),
    ],
)
def test_a_root_of_what_is_bent_at_zero(text: str, slopes: list[float]) -> None:
    score = np.array([-3.0, 0.0, 4.0])
    found = numpy_eval.derivative(ScoreMod(text).text, score, *[0] * len(POSITION), {}, ())
    np.testing.assert_allclose(found, slopes)


def test_a_negative_power_of_an_int_is_that_of_a_float() -> None:
    text, at = ScoreMod("score * (kv_idx + 1) ** -2").text, (0, 0, 0, 0, np.arange(3), 0, 0)
    found = numpy_eval.evaluate(text, np.full(3, 36.0), *at, {}, ())
    np.testing.assert_allclose(found, [36, 9, 4])


@pytest.mark.parametrize("text", ["abs(score)", "abs(3 * score)", "abs(sqrt(score))"])
def test_the_derivative_of_a_magnitude_at_zero_is_zero(text: str) -> None:
    at = [0] * len(POSITION)
    for score in (np.float32([0]), np.float64([0]), np.float64([-0.0])):
        assert numpy_eval.derivative(ScoreMod(text).text, score, *at, {}, ()).tolist() == [0.0]
