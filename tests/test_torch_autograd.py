"""`rawattn.torch.attention` under autograd on the host: its gradients, the tensors saved for them, changes to those tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import rawattn
import rawattn.torch
from rawattn._call.options import DEFAULTS
from rawattn._torch import eager, ops
from tests.torch_calls import gradients, leaves, random, torchs_own

pytestmark = pytest.mark.frameworks

attention = rawattn.torch.attention


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (3, 1), "sink": 1},
        {"align": "top-left", "causal": True, "scale": 0.7},
        {"seqs": rawattn.SeqLayout(seqlen_q=[5, 2], seqlen_k=[3, 7])},
    ],
    ids=str,
)
def test_gradcheck(options: dict[str, Any]) -> None:
    """gradcheck passes with a step of 1e-2 and a tolerance of 1e-3. Float32 rounds values near 1 by 1e-7, which is 1e-5 of a
    derivative at this step, and the term of second order adds about as much. A wrong factor or lost term is far above 1e-3."""
    q, k, v = leaves(*(torch.randn(2, n, h, 4) / 2 for n, h in ((5, 2), (7, 1), (7, 1))))

    def run(q, k, v):
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, torch.where(lse.isfinite(), lse, 0)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #. requires gradient and is not a double")
        assert torch.autograd.gradcheck(run, (q, k, v), eps=1e-2, atol=1e-3, rtol=1e-3)


def test_lse_alone() -> None:
    """The gradient of lse with respect to q is the mean of the keys, weighted by their probabilities."""
    q, k, v = leaves(*random("cpu", heads_kv=4))
    _, lse = attention(q, k, v, scale=1.0, return_lse=True)
    lse.sum().backward()
    p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k), -1)
    torch.testing.assert_close(q.grad, torch.einsum("bhqk,bkhd->bqhd", p, k))
    assert not v.grad.any()


def test_gradient_of_a_sum() -> None:
    """The gradient of a sum is right: its dout is one number, expanded with strides of 0."""
    q, k, v = leaves(*random("cpu", heads_kv=4))
    attention(q, k, v).sum().backward()
    torch.testing.assert_close(v.grad.sum(1), torch.full((2, 4, 32), 33.0))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "qkv"])
@pytest.mark.parametrize("compiled", [False, True])
def test_those_that_require_grad_get_one(wanted: str, compiled: bool) -> None:
    given = random("cpu")
    exact = dict(zip("qkv", gradients(attention, *given), strict=True))
    run = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    x = {
        name: t.clone().requires_grad_(name in wanted) for name, t in zip("qkv", given, strict=True)
    }
    run(*x.values()).square().sum().backward()
    for name, tensor in x.items():
        assert (tensor.grad is not None) == (name in wanted)
        if name in wanted:
            torch.testing.assert_close(tensor.grad, exact[name])


def test_one_tensor_for_all_three() -> None:
    (x,) = leaves(random("cpu", heads_kv=4)[0])
    apart = gradients(attention, x, x, x)
    attention(x, x, x).square().sum().backward()
    torch.testing.assert_close(x.grad, sum(apart))


def test_a_graph_is_gone_through_twice() -> None:
    q, k, v = leaves(*random("cpu"))
    loss = attention(q, k, v, causal=True).square().sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    second = torch.autograd.grad(loss, (q, k, v))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (q, k, v))


@pytest.mark.parametrize("compiled", [False, True])
def test_first_derivatives_alone(compiled: bool) -> None:
    run = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    q, k, v = leaves(*random("cpu"))
    (dq,) = torch.autograd.grad(run(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"first derivatives alone|double backward"):
        dq.sum().backward()


_TWICE: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda q, out: out.sum(),
    "square": lambda q, out: out.square().sum(),
}


@pytest.mark.parametrize("loss", _TWICE)
@pytest.mark.parametrize("wanted", ["q", "earlier", "bias", "v"])
def test_second_derivatives_are_no_zeros(loss: str, wanted: str) -> None:
    """A second derivative is refused, not zero, on whichever path it runs: also that of a gradient penalty with respect to a
    tensor before the call."""
    q, k, v = random("cpu", rows=9, heads_kv=4)
    earlier, bias = torch.eye(32), torch.zeros(9, 9)
    given = {"q": q, "earlier": earlier, "bias": bias, "v": v}
    given[wanted].requires_grad_()
    q.requires_grad_()
    out = attention(q @ earlier, k, v, bias=bias)
    (dq,) = torch.autograd.grad(_TWICE[loss](q, out), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad((dq.norm() - 1) ** 2, given[wanted])


@pytest.mark.parametrize("name", ["hvp", "hessian", "vhp", "jvp"])
def test_functional_second_derivatives(name: str) -> None:
    q, k, v = random("cpu", rows=3, heads_kv=4, dim=8)

    def loss(q: Any) -> Any:
        return attention(q, k, v).sum()

    vectors = () if name == "hessian" else (q.clone(),)
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        getattr(torch.autograd.functional, name)(loss, q, *vectors)


def test_what_is_recorded_again_is_the_same() -> None:
    exact = gradients(attention, *random("cpu"))
    x = leaves(*random("cpu"))
    loss = attention(*x).square().sum()
    for got, same in zip(torch.autograd.grad(loss, x, create_graph=True), exact, strict=True):
        assert got.requires_grad and torch.equal(got, same)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_nothing_is_recorded(mode: Any) -> None:
    q, k, v = leaves(*random("cpu"))
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        with mode():
            out = attention(q, k, v, causal=True)
        assert not out.requires_grad
        assert not attention(*(x.detach() for x in (q, k, v))).requires_grad
        assert kept == []
        assert attention(q, k, v, causal=True).requires_grad
    assert len(kept) == 5  # q, k, v, out, lse
    torch.testing.assert_close(out, torchs_own(q, k, v, is_causal=True))


def test_saved_tensors_may_be_kept_elsewhere() -> None:
    """The backward uses the tensors that saved-tensor hooks return, not those of the forward."""
    exact = gradients(attention, *random("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.numpy(force=True).copy(), torch.from_numpy
    ):
        got = gradients(attention, *random("cpu"))
    for a, b in zip(got, exact, strict=True):
        assert torch.equal(a, b)


def test_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    def model(q, k, v):
        return attention(q.sin(), k, v * 2, causal=True).cos()

    exact = gradients(model, *random("cpu"))
    got = gradients(lambda *x: checkpoint(model, *x, use_reentrant=False), *random("cpu"))
    for a, b in zip(got, exact, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("changed", ["v", "out"])
def test_a_tensor_changed_in_place_is_seen(changed: str) -> None:
    q, k, v = leaves(*random("cpu"))
    out = attention(q, k, v)
    with torch.no_grad():
        {"v": v, "out": out}[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("changed", ["seqlen_k", "position_q"])
def test_an_array_of_lengths_changed_in_place_is_seen(changed: str) -> None:
    """Where the call is compiled."""
    q, k, v = leaves(*random("cpu"))
    arrays = {name: torch.tensor([3, 5]) for name in ("seqlen_k", "position_q", "position_k")}

    def run(q: Any, **arrays: Any) -> Any:
        return attention(q, k, v, causal=True, seqs=rawattn.SeqLayout(**arrays))

    out = torch.compile(run, fullgraph=True, backend="eager")(q, **arrays)
    arrays[changed].sub_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_deterministic_reaches_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def backward(*given, deterministic=False, **options):
        seen.append(deterministic)
        return rawattn.attention_backward(*given, deterministic=deterministic, **options)

    monkeypatch.setattr(eager, "attention_backward", backward)
    monkeypatch.setattr(ops, "attention_backward", backward)
    for run in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        for flag in (False, True):
            gradients(lambda *x, run=run, flag=flag: run(*x, deterministic=flag), *random("cpu"))
    assert seen == [False, True, False, True]


@pytest.mark.parametrize("way", ["eager", "operator", "compiled"])
def test_the_plain_call_sees_nothing_that_is_recorded(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain call gets no tensors that autograd records: it would refuse them, because its result has no gradient."""
    made = []

    def watched(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            assert not (torch.is_grad_enabled() and any(x.requires_grad for x in given))
            made.append(function)
            return function(*given, **options)

        return call

    for module in (eager, ops):
        monkeypatch.setattr(module, "attention", watched(rawattn.attention))
        monkeypatch.setattr(module, "attention_backward", watched(rawattn.attention_backward))
    no_options = ops.arguments_of(DEFAULTS, False, None)
    run = {
        "eager": attention,
        "operator": lambda *x: ops.run(*x, ops.Layout(), no_options)[0],
        "compiled": torch.compile(attention, fullgraph=True, backend="aot_eager"),
    }[way]
    for create_graph in (False, way != "compiled"):  # compiled, torch refuses it as the second
        q, k, v = leaves(*random("cpu"))
        torch.autograd.grad(run(q, k, v).square().sum(), q, create_graph=create_graph)
        run(q.detach(), k.detach(), v.detach())
        with torch.no_grad():
            run(q, k, v)
    assert len(made) == 8
