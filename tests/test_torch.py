"""`rawattn.torch.attention` with tensors on the host: values, layouts, dtypes, `out`, the examples of the documentation."""

from __future__ import annotations

import doctest
import functools
import importlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import rawattn
import rawattn.torch
from tests import exhaustive, torch_calls
from tests.cases import Case
from tests.torch_calls import GRADIENT_CASES, gradients, leaves, random, torchs_own

pytestmark = pytest.mark.frameworks

attention = rawattn.torch.attention


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("case", exhaustive.thin(GRADIENT_CASES, 2), ids=str)
def test_cases(case: Case) -> None:
    torch_calls.verify_case(case, "cpu")


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_same_as_torchs_own(causal: bool, heads_kv: int) -> None:
    torch_calls.same_as_torchs_own("cpu", causal=causal, heads_kv=heads_kv)


def test_causal_of_torch_is_top_left() -> None:
    q, k, v = random("cpu")
    ours = attention(q[:, :20], k, v, causal=True, align="top-left")
    torch.testing.assert_close(ours, torchs_own(q[:, :20], k, v, is_causal=True))


def test_a_module_learns_as_with_torchs_own() -> None:
    ours = torch_calls.losses_of_training(attention, "cpu")
    np.testing.assert_allclose(ours, torch_calls.losses_of_training(torchs_own, "cpu"), atol=1e-5)
    assert ours[-1] < 0.9 * ours[0]


def test_any_strides() -> None:
    given = random("cpu")
    exact = gradients(lambda *x: attention(*x, causal=True), *given)

    def from_other_layouts(q, k, v):
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        k = torch.cat([k, k], -1)[..., :32]
        v = v.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not (q.is_contiguous() or k.is_contiguous() or v.is_contiguous())
        return attention(q, k, v, causal=True)

    for got, want in zip(gradients(from_other_layouts, *given), exact, strict=True):
        torch.testing.assert_close(got, want)


def test_autocast_leaves_dtypes_alone() -> None:
    q, k, v = leaves(*random("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
        assert (q[0, 0] @ q[0, 0].T).dtype == torch.bfloat16
    assert out.dtype == torch.float32
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_out() -> None:
    q, k, v = random("cpu")
    out = torch.empty_like(q)
    assert attention(q, k, v, out=out) is out
    torch.testing.assert_close(out, attention(q, k, v))
    recorded = leaves(q, k, v)
    with torch.no_grad():
        assert attention(*recorded, out=out) is out
    with pytest.raises(ValueError, match="out: got a tensor in a call that autograd records"):
        attention(*recorded, out=out)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="out: got a tensor in a function under torch"):
        compiled(q, k, v, out=out)


@pytest.mark.parametrize("name", ["rawattn.torch", "rawattn._torch.attention"])
def test_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("n", range(5))
def test_documentation(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the documentation run one after the other. torch.compile traces without inductor here: test_torch_compile
    covers that."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    blocks = torch_calls.documentation()
    assert len(blocks) == 5
    if "transformers" in blocks[n]:
        pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    for block in (blocks[0], blocks[n]) if n else blocks[:1]:
        exec(compile(block, "frameworks.md", "exec"), names)
