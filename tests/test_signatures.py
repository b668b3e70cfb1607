"""The signatures of the public functions show all options, with their types and defaults."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import reference
from rawattn._call.options import (
    ARRAYS,
    DEFAULTS,
    SCORE_NUMBERS,
    AttentionOptions,
    ForwardOptions,
    Options,
    ScoreOptions,
)
from rawattn._call.problem import Problem, describe
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import FORWARD

TAKEN: dict[Callable[..., Any], type] = {
    rawattn.attention: ForwardOptions,
    rawattn.paged_attention: ForwardOptions,
    rawattn.attention_backward: AttentionOptions,
    reference.attention: ForwardOptions,
    reference.paged_attention: ForwardOptions,
    reference.attention_backward: AttentionOptions,
}
X = np.ones((1, 3, 2, 4), np.float32)


def test_types_and_defaults_are_of_the_same_options() -> None:
    assert tuple(ForwardOptions.__annotations__) == Options._fields
    assert set(Options._fields) - set(AttentionOptions.__annotations__) == {"num_splits"}
    assert {*SCORE_NUMBERS} <= {each.name for each in fields(ScoreOptions)} & {*Options._fields}
    assert {each.name for each in fields(ScoreOptions)} <= {each.name for each in fields(Problem)}


def test_options_with_arrays_are_listed_once() -> None:
    """A list of all of them elsewhere would lack an option that is added."""
    assert {*ARRAYS} <= {*Options._fields}
    assert {*ARRAYS} <= {each.name for each in fields(ScoreOptions)}
    root = Path(rawattn.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, (ast.Tuple, ast.List, ast.Set))
        and {*ARRAYS} <= {getattr(each, "value", None) for each in node.elts}
    }
    assert found == {"_call/options.py"}


@pytest.mark.parametrize("function", TAKEN, ids=lambda x: f"{x.__module__}.{x.__name__}")
def test_every_option_is_shown(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    for name, annotation in TAKEN[function].__annotations__.items():
        shown = parameters[name]
        assert shown.kind is shown.KEYWORD_ONLY
        assert shown.default == getattr(DEFAULTS, name)
        assert shown.annotation == annotation.__forward_arg__
    assert not any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    # The function's own parameters come after the options.
    own = [name for name in parameters if name not in Options._fields]
    behind = list(parameters)[-1]
    assert behind in own


OTHER: dict[str, Any] = {
    "causal": True,
    "align": "top-left",
    "window": (1, 1),
    "sink": 1,
    "scale": 0.25,
    "bias": np.ones((3, 3), np.float32),
    "mask": np.ones((3, 3), bool),
    "alibi_slopes": np.ones(2, np.float32),
    "softcap": 2.0,
    "score_mod": rawattn.ScoreMod("score * 2"),
    "sink_logits": np.ones(2, np.float32),
    "dropout_p": 0.5,
    "seed": 3,
    "num_splits": 2,
}
# What an option needs beside it to have an effect.
BESIDE: dict[str, dict[str, Any]] = {
    "align": {"causal": True},
    "sink": {"window": (0, 0)},
    "dropout_p": {"seed": 3},
    "seed": {"dropout_p": 0.5, "seed": 2},
}


@pytest.mark.parametrize("name", [name for name in Options._fields if name != "seqs"])
def test_no_option_is_ignored(name: str) -> None:
    """Each option reaches the description of the call, by which kernels and backends see it."""

    def described(**given: Any) -> Any:
        verb, arrays, values, options = with_arrays(FORWARD, DEFAULTS._replace(**given))
        named = dict(zip(verb.extra_inputs, arrays, strict=True))
        return verb.extra_inputs, values, describe(X, X, X, options, None, named)[0]

    beside = BESIDE.get(name, {})
    assert described(**{**beside, name: OTHER[name]}) != described(**beside)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda **x: rawattn.attention(X, X, X, **x), "rawattn.attention"),
        (lambda **x: reference.attention(X, X, X, **x), "rawattn.reference.attention"),
        (
            lambda **x: rawattn.attention_backward(X, X, X, X, X, X[..., 0], **x),
            "rawattn.attention_backward",
        ),
        (
            lambda **x: reference.attention_backward(X, X, X, X, X, X[..., 0], **x),
            "rawattn.reference.attention_backward",
        ),
        (
            lambda **x: rawattn.paged_attention(X, X, X, [[0]], seqlen_k=[1], **x),
            "rawattn.paged_attention",
        ),
        (
            lambda **x: reference.paged_attention(X, X, X, [[0]], seqlen_k=[1], **x),
            "rawattn.reference.paged_attention",
        ),
    ],
)
def test_what_is_no_option_is_refused(call: Callable[..., Any], name: str) -> None:
    with pytest.raises(
        TypeError, match=f"^cuasal: {name} has no such argument; did you mean causal="
    ):
        call(cuasal=True)
    with pytest.raises(
        TypeError, match=f"^softmax_scale: {name} has no such argument; write scale="
    ):
        call(softmax_scale=1.0, causal=True)


def test_the_backward_takes_no_option_of_the_forward_alone() -> None:
    for function in (rawattn.attention_backward, reference.attention_backward):
        with pytest.raises(TypeError, match=r"^num_splits: .* give it to the forward call alone"):
            function(X, X, X, X, X, X[..., 0], num_splits=2)
