"""What is refused when planning, and runs nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, attention, attention_backward, plan
from tests.test_plan import arrays

CUDA = rawattn.ScoreMod("score = 2.f * score;", language="cuda")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"k": np.zeros((1, 5, 3, 8), np.float32)}, ValueError, r"^q: got nheads_q = 2"),
        ({"causal": 1}, TypeError, r"^causal: got 1"),
        ({"backend": "tpu"}, ValueError, r"^backend: got 'tpu'"),
        ({"softcap": -1.0}, ValueError, r"^softcap: got -1"),
        ({"q": [1.0]}, TypeError, r"^q: got list"),
        (
            {"out": np.zeros((1, 5, 2, 9), np.float32)},
            ValueError,
            r"^out: got shape \(1, 5, 2, 9\)",
        ),
        (
            {"score_mod": CUDA, "backend": "cpu"},
            NotImplementedError,
            r"^score_mod: got a text with",
        ),
    ],
)
def test_what_is_wrong_is_told_when_planning(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    q, k, v = arrays(1, 5, 2, 8)
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "backend": "cpu", **change}
    with pytest.raises(error, match=says):
        plan(attention, **call)


def test_wrong_arrays_for_gradients_are_told_when_planning() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    out, lse = attention(q, k, v, return_lse=True, backend="cpu")
    with pytest.raises(ValueError, match=r"^into\.dk: shares memory with k"):
        plan(attention_backward, out, q, k, v, out, lse, into=Gradients(dk=k), backend="cpu")
    with pytest.raises(TypeError, match=r"^out: got dtype float16, expected float32"):
        plan(rawattn.combine, [q, k], [lse, lse], out=q.astype(np.float16))


def test_only_verbs_are_planned() -> None:
    q, k, v = arrays(1, 5, 2, 8)
    with pytest.raises(NotImplementedError, match=r"^fn: got sum; this version plans"):
        plan(sum, q, k, v)
    made = plan(attention, q, k, v, backend="cpu")
    with pytest.raises(TypeError, match=r"^scale: this plan takes q, k, v once each"):
        made(q, k, v, scale=2.0)
    with pytest.raises(TypeError, match=r"^k: this plan takes"):
        made(q, k, v, k=k)
