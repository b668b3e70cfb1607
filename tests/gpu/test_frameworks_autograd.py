"""docs/frameworks.md with tensors and arrays on the GPU."""

from __future__ import annotations

import time

import pytest

from tests import autograd
from tests.cases import Case


@pytest.mark.parametrize("case", autograd.CASES, ids=str)
def test_jax(case: Case) -> None:
    pytest.importorskip("jax")
    autograd.verify_jax(case, "gpu")


def test_jax_in_the_middle_of_a_program() -> None:
    pytest.importorskip("jax")
    autograd.in_the_middle_of_a_program("gpu")


def test_jax_waits_for_nothing() -> None:
    """A program is dispatched to its end while the device is still busy with what comes first."""
    jax = pytest.importorskip("jax")
    attention = autograd.page("JAX")["attention_with"](causal=True)
    x = jax.random.normal(jax.random.key(0), (1, 64, 2, 64), dtype="float32")
    square = jax.random.normal(jax.random.key(1), (8192, 8192), dtype="float32") / 100

    @jax.jit
    def program(x, square):
        busy = jax.lax.fori_loop(0, 40, lambda _, y: y @ square, square)
        q = x + 1e-30 * busy[0, 0]
        return jax.grad(lambda q: attention(q, q, q)[0].sum())(q)

    jax.block_until_ready(program(x, square))
    started = time.perf_counter()
    result = program(x, square)
    dispatched = time.perf_counter()
    jax.block_until_ready(result)
    finished = time.perf_counter()
    assert dispatched - started < 0.5 * (finished - started)
