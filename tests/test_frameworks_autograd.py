"""docs/frameworks.md with tensors and arrays on the host."""

from __future__ import annotations

import pytest

from tests import autograd
from tests.cases import Case

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("case", autograd.CASES, ids=str)
def test_torch(case: Case) -> None:
    pytest.importorskip("torch")
    autograd.verify_torch(case, "cpu")


def test_torch_gradient_of_a_sum() -> None:
    """Its dout is one number, seen through strides of 0."""
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 1, 9, 2, 16).requires_grad_()
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = autograd.page("PyTorch")["attention"](*tensors)
    out.sum().backward()
    torch.testing.assert_close(tensors[2].grad.sum(1), torch.full((1, 2, 16), 9.0))


def test_torch_lse_alone() -> None:
    """The gradient of lse with respect to q is the mean of the keys, as probable as they are."""
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 1, 9, 2, 16)
    q.requires_grad_()
    _, lse = autograd.page("PyTorch")["attention"](q, k, v, scale=1.0)
    lse.sum().backward()
    p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q.detach(), k), -1)
    torch.testing.assert_close(q.grad, torch.einsum("bhqk,bkhd->bqhd", p, k))


def test_torch_checkpoint_and_compile() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    attention = autograd.page("PyTorch")["attention"]

    def model(q, k, v):
        return attention(q.sin(), k, v * 2, causal=True)[0].cos().sum()

    gradients = []
    tensors = torch.randn(3, 2, 9, 2, 16)
    for run in (
        model,
        lambda *x: checkpoint(model, *x, use_reentrant=False),
        torch.compile(model, backend="eager"),
    ):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        run(q, k, v).backward()
        gradients.append(torch.stack([q.grad, k.grad, v.grad]))
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_torch_sees_a_tensor_changed_in_place() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (x.clone().requires_grad_() for x in torch.randn(3, 1, 9, 2, 16))
    out, _ = autograd.page("PyTorch")["attention"](q, k, v)
    with torch.no_grad():
        v += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


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
