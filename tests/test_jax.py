"""`rawattn.jax` on the CPU: values, gradients, masks, seeds, the examples of the documentation."""

from __future__ import annotations

import doctest
import functools
import importlib
import re
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
# ruff: noqa: E402

import jax.numpy as jnp

import rawattn.jax
from tests import jax_calls
from tests.autograd import PAGE
from tests.cases import Case
from tests.landed import require
from tests.score_cases import few

pytestmark = pytest.mark.frameworks
arrays = functools.partial(jax_calls.random_arrays, "cpu")


@pytest.mark.parametrize("case", jax_calls.CASES_OF_FORWARD, ids=str)
def test_forward(case: Case) -> None:
    jax_calls.verify_forward(case, "cpu")


@pytest.mark.parametrize("case", jax_calls.GRADIENT_CASES, ids=str)
def test_gradients(case: Case) -> None:
    jax_calls.verify_gradients(case, "cpu")


@pytest.mark.parametrize("case", few(jax_calls.SCORE_CASES), ids=str)
def test_scores(case: Case) -> None:
    require(case, "cpu")
    jax_calls.verify_scores(case, "cpu")


def test_in_the_middle_of_a_program() -> None:
    jax_calls.verify_in_the_middle_of_a_program("cpu")


def test_gradient_of_lse_alone() -> None:
    """The gradient of lse with respect to q is the mean of the keys, weighted by their probabilities."""
    q, k, v = arrays(1, 9, 2, 16)

    def lse(q: Any) -> Any:
        return rawattn.jax.attention(q, k, v, scale=1.0, return_lse=True)[1].sum()

    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    exact = jnp.einsum("bhqk,bkhd->bqhd", p, k)
    np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(lse))(q)), np.asarray(exact), atol=1e-5)


def test_a_block_mask() -> None:
    q, k, v = arrays(2, 200, 4, 16)
    keep = np.random.default_rng(0).random((1, 4, 200, 200)) < 0.3
    made = rawattn.block_mask(keep)

    def loss(mask: Any, q: Any) -> Any:
        return (rawattn.jax.attention(q, k, v, mask=mask, causal=True) ** 2).sum()

    for run in (lambda f: f, jax.jit):
        got = run(jax.value_and_grad(functools.partial(loss, made)))(q)
        exact = run(jax.value_and_grad(functools.partial(loss, keep)))(q)
        for a, b in zip(got, exact, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"^mask: jax\.vmap .*jax\.lax\.map"):
        jax.vmap(functools.partial(loss, made))(q[None])


def test_a_block_mask_with_lists_of_keys() -> None:
    q, k, v = arrays(2, 200, 4, 16)
    mask = rawattn.topk_mask(np.random.default_rng(0).random((2, 4, 1, 200)), 30)
    keep = mask.to_bool()
    ours, theirs = (
        jax.jit(jax.grad(lambda q, x=x: (rawattn.jax.attention(q, k, v, mask=x) ** 2).sum()))(q)
        for x in (mask, keep)
    )
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)


def test_a_traced_seed_draws_anew() -> None:
    q, k, v = arrays(2, 33, 4, 16)

    @jax.jit
    def call(key: Any) -> Any:
        seed = jax.random.randint(key, (), 0, 2**31 - 1)
        return rawattn.jax.attention(q, k, v, dropout_p=0.5, seed=seed)

    keys = jax.random.split(jax.random.key(0), 2)
    first, second = call(keys[0]), call(keys[1])
    assert not bool((first == second).all())
    assert bool((call(keys[0]) == first).all())
    exact = rawattn.jax.attention(
        q, k, v, dropout_p=0.5, seed=int(jax.random.randint(keys[0], (), 0, 2**31 - 1))
    )
    assert bool((first == exact).all())
    with pytest.raises(TypeError, match=r"^seed: got dtype uint32, expected int32 or int64"):
        rawattn.jax.attention(q, k, v, dropout_p=0.5, seed=jnp.uint32(3))


def test_numpy_arrays_are_accepted() -> None:
    q = np.ones((1, 9, 2, 16), np.float32)
    out = rawattn.jax.attention(q, q, q)
    assert isinstance(out, jax.Array) and bool((out == 1).all())


def test_docstrings() -> None:
    results = doctest.testmod(importlib.import_module("rawattn._jax.attention"), verbose=False)
    assert results.attempted > 0
    assert results.failed == 0


def test_page() -> None:
    """The Python blocks about JAX in docs/frameworks.md run."""
    section = re.search(r"^## JAX$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    assert section is not None
    blocks = re.findall(r"^```python\n(.*?)^```$", section[1], re.M | re.S)
    assert len(blocks) >= 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
