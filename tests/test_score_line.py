"""Which score texts add a term that is linear in the key index, and the slope of that term."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import ScoreMod
from rawattn._scores.expression import Expression, walk
from rawattn._scores.line import Line
from rawattn._scores.numpy_eval import _Evaluation
from rawattn._scores.position_sums import with_early_floats
from rawattn._scores.program import line_of, program

ARRAYS = {
    "slope": np.float32([0.5, -0.25]),
    "row": np.linspace(-1, 1, 9, dtype=np.float32),
    "start": np.int32([3, 5]),
}
# Texts that are a line: the score plus a term linear in the key index. The flag: whether a text is one without a causal mask
# too.
LINES = {
    "score": True,
    "score + 2.0": True,
    "score + row[q_idx]": True,
    "score + slope[head] * (kv_idx - q_idx)": True,
    "slope[head] * (kv_idx - q_idx) + score - row[q_idx]": True,
    "score - (q_idx - kv_idx) * slope[head] / 16": True,
    "score + 0.02 * float(2 * kv_idx - 3 * q_idx + seqlen_k)": True,
    "where(head == 0, score - slope[head] * kv_idx, score + 1.0)": True,
    "score + float(start[batch]) * (float(kv_idx) - start[batch])": True,
    "score + float(q_idx) * kv_idx": True,
    "score + float(seqlen_k + kv_idx) / 8": True,
    "score + (slope[head] * kv_idx - kv_idx / 8)": True,
    "score - (slope[head] * kv_idx + kv_idx / 8)": True,
    "score - slope[head] * abs(q_idx - kv_idx)": False,
    "score - abs(kv_idx - q_idx - 1) / 8": False,
    "score + -abs(2 * (q_idx - kv_idx)) * slope[head]": False,
}
# Lines whose rows differ by more than a constant step from row to row.
UNEVEN = (
    "score + row[q_idx]",
    "slope[head] * (kv_idx - q_idx) + score - row[q_idx]",
    "score + float(q_idx) * kv_idx",
)
NO_LINES = (
    "2 * score",
    "score + score",
    "score * slope[head] + kv_idx",
    "kv_idx - score",
    "tanh(score) + kv_idx",
    "score + kv_idx ** 2",
    "score + float(kv_idx) * kv_idx",
    "score + 1 / (kv_idx + 1)",
    "score + kv_idx // 2",
    "score + kv_idx % 4",
    "score + row[kv_idx]",
    "score + max(kv_idx - q_idx, 0)",
    "score - abs(q_idx - kv_idx - 1)",
    "score - abs(q_idx + kv_idx - 8)",
    "score - abs(q_idx - kv_idx - head)",
    "score - abs(q_idx - kv_idx + batch - seqlen_k)",
    "score - abs(4 - kv_idx)",
    "where(kv_idx < 4, score, score + 1.0)",
    "where(score < 0, score, score + kv_idx)",
    "where(q_idx < 4, score, -inf)",
    # Not linear, because integers wrap around.
    "score + (kv_idx - start[batch])",
    "score + kv_idx * 100000",
)


def mod(text: str) -> ScoreMod:
    return ScoreMod(text, **{name: x for name, x in ARRAYS.items() if f"{name}[" in text})


def line(text: str, causal: bool) -> Line | None:
    return line_of(mod(text).text, causal=causal)


@pytest.mark.parametrize("text", LINES)
def test_lines(text: str) -> None:
    found = line(text, causal=True)
    assert found is not None and (line(text, causal=False) is not None) == LINES[text]
    given, value = mod(text), program(mod(text).text).value
    i, j = np.indices((9, 9))

    def of(root: Expression, score: float) -> Any:
        scores, position = np.full((9, 9), score), (1, 0, 0, i, j, 9, 9)
        return _Evaluation(given.text, scores, position, given.arrays, ()).whole(root)

    seen = (j <= i) | LINES[text]
    added, step = of(found.added, np.nan), of(found.step, np.nan)
    for score in (0.0, 1.5):
        np.testing.assert_allclose((added + score)[seen], of(value, score)[seen], rtol=1e-6)
    pairs = seen[:, 1:] & seen[:, :-1]
    np.testing.assert_allclose(np.diff(added)[pairs], step[:, 1:][pairs], rtol=1e-5, atol=1e-6)
    assert (step == step[:, :1]).all()
    assert (found.row_step is not None) == (text not in UNEVEN)
    if found.row_step is not None:
        row_step = of(found.row_step, np.nan)
        assert np.unique(row_step).size == np.unique(step).size == 1
        pairs = seen[1:] & seen[:-1]
        np.testing.assert_allclose(np.diff(added, axis=0)[pairs], row_step[1:][pairs], 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("text", "conversions"),
    [
        ("score - slope[head] * abs(q_idx - kv_idx)", ["sub"]),
        ("score + max(min(kv_idx, 3), -abs(q_idx)) / 2", ["position", "position"]),
        ("score + 0.5 * abs(kv_idx // 2 - q_idx)", ["abs"]),
        ("score + (q_idx - kv_idx) ** 2", ["pow"]),
    ],
)
def test_floats_are_made_of_sums_of_positions(text: str, conversions: list[str]) -> None:
    value = program(mod(text).text).value
    early = with_early_floats(value)
    assert sorted(x.args[0].op for x in walk(early) if x.op == "to_float") == sorted(conversions)
    i, j = np.indices((9, 9))
    scores, position = np.ones((9, 9)), (1, 0, 0, i, j, 9, 9)
    both = [
        _Evaluation(mod(text).text, scores, position, mod(text).arrays, ()).whole(each)
        for each in (value, early)
    ]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("text", NO_LINES)
def test_others(text: str) -> None:
    assert line(text, causal=True) is None


def test_texts_in_cuda_are_none() -> None:
    text = ScoreMod("score += kv_idx;", language="cuda").text
    assert line_of(text, causal=True) is None
