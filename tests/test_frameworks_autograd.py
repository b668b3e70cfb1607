"""docs/frameworks.md with tensors and arrays on the host."""

from __future__ import annotations

import pytest

from tests import autograd
from tests.cases import Case

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("case", autograd.CASES, ids=str)
def test_jax(case: Case) -> None:
    pytest.importorskip("jax")
    autograd.verify_jax(case, "cpu")


def test_jax_in_the_middle_of_a_program() -> None:
    pytest.importorskip("jax")
    autograd.in_the_middle_of_a_program("cpu")


def test_jax_vmap_is_a_batch_axis() -> None:
    jax = pytest.importorskip("jax")
    attention = autograd.page("JAX")["attention_with"](causal=True)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (4, 2, 9, 2, 16)) for key in keys)
    mapped = jax.jit(jax.vmap(attention))(q, k, v)
    for each, whole in zip(
        mapped, attention(*(x.reshape(8, 9, 2, 16) for x in (q, k, v))), strict=True
    ):
        assert bool((each.reshape(whole.shape) == whole).all())


def test_jax_mistakes_are_told() -> None:
    jax = pytest.importorskip("jax")
    attention = autograd.page("JAX")["attention_with"](window=(3, 3))
    q = jax.numpy.ones((1, 9, 2, 16))
    with pytest.raises(Exception, match="v: got seqlen_k = 8 in shape"):
        jax.block_until_ready(jax.jit(attention)(q, q, q[:, 1:]))
