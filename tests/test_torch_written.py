"""Tensors that a call writes: torch counts each write, so autograd notices it; those that require a gradient are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import rawattn
import rawattn.torch
from rawattn import Gradients

pytestmark = pytest.mark.frameworks

SHAPE = (2, 4, 2, 16)


def random(*shape: int) -> Any:
    return torch.randn(shape or SHAPE)


def test_a_gradient_of_what_was_written_over_is_refused() -> None:
    p, k, v = random().requires_grad_(), random(), random()
    out = rawattn.torch.attention(p, k, v)
    with torch.no_grad():
        rawattn.torch.attention(random(), k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad((out * 1).sum(), p)


def results(n: int) -> list[Any]:
    return [rawattn.attention(random(), random(), random(), return_lse=True) for _ in range(n)]


def written_by_attention() -> list[Any]:
    return [rawattn.attention(random(), random(), random(), out=random())]


def written_by_its_backward() -> list[Any]:
    q, k, v, bias = random(), random(), random(), random(2, 4, 4)
    out, lse = rawattn.attention(q, k, v, bias=bias, return_lse=True)
    into = Gradients(dq=random(), dv=random(), dbias=random(2, 4, 4))
    found = rawattn.attention_backward(out, q, k, v, out, lse, bias=bias, into=into)
    assert found.dq is into.dq
    return [into.dq, into.dv, into.dbias]


def written_by_combine() -> list[Any]:
    return [rawattn.combine(*zip(*results(2), strict=True), out=random())[0]]


def written_by_paged_attention() -> list[Any]:
    pages, table = random(3, 4, 2, 16), torch.tensor([[0], [1]])
    return [rawattn.paged_attention(random(), pages, pages, table, seqlen_k=[4, 4], out=random())]


def written_by_append_kv() -> list[Any]:
    table, angles = torch.tensor([[0], [1]]), random(8, 8)
    pages = random(3, 4, 2, 16), random(3, 4, 2, 16)
    given: dict[str, Any] = {"seqlen_k": [4, 4], "rotary": (angles, angles), "out": random()}
    out = rawattn.append_kv(random(), random(), *pages, table, q=random(), **given)
    return [*pages, out]


def written_by_plans() -> list[Any]:
    q, k, v = random(), random(), random()
    parts = [list(x) for x in zip(*results(2), strict=True)]
    return [
        rawattn.plan(rawattn.attention, q, k, v)(q, k, v, out=random()),
        rawattn.plan(rawattn.combine, *parts)(*parts, out=random())[0],
    ]


@pytest.mark.parametrize(
    "write",
    [
        written_by_attention,
        written_by_its_backward,
        written_by_combine,
        written_by_paged_attention,
        written_by_append_kv,
        written_by_plans,
    ],
)
def test_every_write_is_counted(write: Callable[[], list[Any]]) -> None:
    assert all(x._version > 0 for x in write())


def test_a_tensor_of_inference_mode_is_written() -> None:
    with torch.inference_mode():
        out = random()
    q, k, v = random(), random(), random()
    assert rawattn.attention(q, k, v, out=out) is out
    torch.testing.assert_close(out.clone(), rawattn.attention(q, k, v))


@pytest.mark.parametrize("leaf", [True, False])
def test_a_tensor_to_write_that_requires_a_gradient_is_refused(leaf: bool) -> None:
    q, k, v = random(), random(), random()
    own = random().requires_grad_() if leaf else random().requires_grad_() * 1
    before = own.detach().clone()
    out, lse = rawattn.attention(q, k, v, return_lse=True)
    parts = [out, out], [lse, lse]
    pages, table = random(3, 4, 2, 16), torch.tensor([[0], [1]])
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: rawattn.attention(q, k, v, out=own),
        "torch": lambda: rawattn.torch.attention(q, k, v, out=own),
        "vjp": lambda: rawattn.attention_vjp(q, k, v, out=own),
        "combine": lambda: rawattn.combine(*parts, out=own),
        "paged": lambda: rawattn.paged_attention(
            q, pages, pages, table, seqlen_k=[4, 4], out=own
        ),
        "plan": lambda: rawattn.plan(rawattn.attention, q, k, v)(q, k, v, out=own),
    }  # fmt: skip
    for call in calls.values():
        with pytest.raises(RuntimeError, match=r"^out: got a tensor to write that requires a grad"):
            call()
    with pytest.raises(RuntimeError, match=r"^into\.dk: got a tensor to write .*into\.dk\.detach"):
        rawattn.attention_backward(out, q, k, v, out, lse, into=Gradients(dk=own))
    assert torch.equal(own, before)
    with torch.no_grad():
        for call in calls.values():
            call()
