"""docs/frameworks.md with tensors and arrays on the GPU."""

from __future__ import annotations

import time

import pytest

from tests import autograd
from tests.cases import Case
from tests.gpu import gate


@pytest.mark.parametrize("case", autograd.CASES, ids=str)
def test_torch(case: Case) -> None:
    pytest.importorskip("torch")
    autograd.verify_torch(case, "cuda")


def test_torch_on_a_stream_of_its_own_waits_for_nothing() -> None:
    torch = pytest.importorskip("torch")
    attention = autograd.page("PyTorch")["attention"]
    values = torch.randn(3, 2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)

    def run() -> list[object]:
        tensors = [x.clone().requires_grad_() for x in values]
        out, lse = attention(*(x * 2 for x in tensors), causal=True)
        (out.float().square().sum() + lse.sum()).backward()
        return [x.grad for x in tensors]

    exact = run()  # compiles what the other call uses
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with gate.closed(gate.of_torch(stream)), torch.cuda.stream(stream):
        got = run()
        assert gate.still_closed(gate.of_torch(stream))
    for name, a, b in zip(("dq", "dk", "dv"), got, exact, strict=True):
        torch.testing.assert_close(a, b, msg=lambda said, name=name: f"{name}: {said}")


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
