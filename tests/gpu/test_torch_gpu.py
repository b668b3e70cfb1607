"""`rawattn.torch` with tensors on the GPU."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

from torch.autograd import forward_ad

import rawattn
import rawattn.torch
from tests import torch_calls
from tests.cases import Case
from tests.gpu import gate
from tests.landed import require
from tests.torch_calls import GRADIENT_CASES, SCORE_CASES, gradients, leaves, random, torchs_own

pytestmark = pytest.mark.frameworks

attention = rawattn.torch.attention
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _forget_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_cases(case: Case) -> None:
    torch_calls.verify_case(case, "cuda")


@pytest.mark.parametrize("case", SCORE_CASES, ids=str)
def test_scores(case: Case) -> None:
    require(case, "cuda")
    torch_calls.verify_scores(case, "cuda")


@pytest.mark.parametrize("case", [x for x in SCORE_CASES if not x.score_mod][::4], ids=str)
def test_scores_compiled(case: Case) -> None:
    require(case, "cuda")
    torch_calls.verify_scores(case, "cuda", compiled=True)


@pytest.mark.parametrize("heads_kv", [4, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_as_torchs_own(dtype: Any, causal: bool, heads_kv: int) -> None:
    torch_calls.same_as_torchs_own("cuda", dtype, causal=causal, heads_kv=heads_kv)


def test_gradcheck() -> None:
    """gradcheck passes with the step and tolerance used on the host. Sums are deterministic, as gradcheck demands."""
    q, k, v = leaves(
        *(torch.randn(2, n, h, 16, device="cuda") / 2 for n, h in ((5, 2), (7, 1), (7, 1)))
    )

    def run(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True, deterministic=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #. requires gradient and is not a double")
        assert torch.autograd.gradcheck(run, (q, k, v), eps=1e-2, atol=1e-3, rtol=1e-3)


def test_a_module_learns_as_with_torchs_own() -> None:
    ours = torch_calls.losses_of_training(attention, "cuda")
    np.testing.assert_allclose(ours, torch_calls.losses_of_training(torchs_own, "cuda"), atol=1e-4)


def test_lengths_on_the_gpu() -> None:
    q, k, v = random("cuda")
    lengths = torch.tensor([5, 33], device="cuda")
    on_device, on_host = (
        gradients(
            lambda *x, n=n: attention(*x, seqs=rawattn.SeqLayout(seqlen_q=n, seqlen_k=n), causal=True),
            q, k, v,
        )
        for n in (lengths, [5, 33])
    )  # fmt: skip
    for a, b in zip(on_device, on_host, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_on_the_gpu_that_change_before_the_backward_are_refused(packed: bool) -> None:
    q, k, v = leaves(*random("cuda"))
    if packed:
        starts = torch.tensor([0, 5, 33], device="cuda", dtype=torch.int32)
        layout = rawattn.SeqLayout(seqstart_q=starts)
        q, k, v = (x[0] for x in (q, k, v))
    else:
        starts = torch.tensor([5, 33], device="cuda", dtype=torch.int32)
        layout = rawattn.SeqLayout(seqlen_q=starts, seqlen_k=starts)
    kept, out = (attention(q, k, v, seqs=layout, causal=True) for _ in range(2))
    kept.sum().backward()
    starts[1] -= 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_deterministic() -> None:
    given = [x.bfloat16() for x in random("cuda", rows=2000)]
    first, second = (
        gradients(lambda *x: attention(*x, deterministic=True), *given) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_on_a_stream_of_its_own_waits_for_nothing() -> None:
    values = torch.randn(3, 2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)

    def run() -> list[Any]:
        tensors = [x.clone().requires_grad_() for x in values]
        out, lse = attention(*(x * 2 for x in tensors), causal=True, return_lse=True)
        (out.float().square().sum() + lse.sum()).backward()
        return [x.grad for x in tensors]

    exact = run()  # compiles the kernels that the other call uses
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with gate.closed(gate.of_torch(stream)), torch.cuda.stream(stream):
        got = run()
        assert gate.still_closed(gate.of_torch(stream))
    for name, a, b in zip(("dq", "dk", "dv"), got, exact, strict=True):
        torch.testing.assert_close(a, b, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_graph_of_forward_and_backward(dtype: Any) -> None:
    """A graph of forward and backward, captured once, can be replayed on other values in the same memory."""
    q, k, v = leaves(*(x.to(dtype) for x in random("cuda", rows=200, dim=64)))
    dout = torch.randn_like(q)

    def step() -> tuple[Any, ...]:
        out, lse = attention(q, k, v, causal=True, return_lse=True, deterministic=True)
        return (out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse))))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles, and warms up torch's memory pools
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.copy_(torch.randn_like(x))
        graph.replay()
        got = [x.detach().clone() for x in captured]
        for a, b in zip(got, step(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    """Inductor compiles the call. "reduce-overhead" puts it into CUDA graphs together with the operations around it."""

    def model(q, k, v):
        out, lse = attention(q.sin(), k, v * 2, causal=True, return_lse=True, deterministic=True)
        return out.cos(), lse * 3

    given = random("cuda", rows=200, dim=64)
    exact = gradients(model, *given)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(4):  # warm-up, capture, replays
        got = [x.clone() for x in gradients(compiled, *given)]
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "num_splits"), [(1, None), (1, 3), (700, None), (40, 4)])
def test_compiled_with_counters(rows: int, num_splits: int | None) -> None:
    """Compiled calls whose blocks use counters are right, where keys are split and where they are not. The counters outlive the
    program, so they must lie outside its CUDA graph's memory, in which nothing may stay."""

    def model(q, k, v):
        return attention(q * 2, k, v, causal=True, num_splits=num_splits) + 1

    q, k, v = (x.bfloat16() for x in random("cuda", rows=700, dim=64))
    q = q[:, -rows:]
    exact = model(q, k, v)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # warm-up, capture, replays
        torch.testing.assert_close(compiled(q, k, v), exact, rtol=2e-2, atol=2e-2)


def test_memory_is_not_kept_where_nothing_is_recorded() -> None:
    q, k, v = leaves(*(x.bfloat16() for x in random("cuda", rows=4096, dim=128)))
    with torch.no_grad():
        attention(q, k, v)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = attention(q, k, v)
        assert torch.cuda.memory_allocated() - before <= out.nbytes + 4096


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_models_train_as_with_torchs_own(name: str, side: str | None) -> None:
    pytest.importorskip("transformers")
    from tests.transformers_models import losses, model_of, padding, tokens

    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512}
    ids, mask = tokens("cuda", 130), padding(side, "cuda", 130)
    got, exact = (
        losses(model_of(name, which, "cuda", **sizes), mask, ids=ids)
        for which in ("rawattn", "sdpa")
    )
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-3)
    assert got[-1] < got[0]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_models_generate_as_with_torchs_own(name: str, side: str | None, cache: str) -> None:
    """Models generate the same as with torch's own attention, also where generate compiles the decoding
    step, as it does with a static cache."""
    pytest.importorskip("transformers")
    from tests.transformers_models import generated, model_of, padding

    mask = padding(side, "cuda")
    got, exact = (
        generated(model_of(name, which, "cuda"), mask, cache) for which in ("rawattn", "sdpa")
    )
    assert torch.equal(got, exact)


def test_a_plan_of_the_backward_refuses_tangents() -> None:
    q, k, v = random("cuda")
    out, lse = rawattn.attention(q, k, v, return_lse=True)
    given = (q, k, v, out, lse)
    plan = rawattn.plan(rawattn.attention_backward, out, *given)
    plan(out, *given)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(out, torch.ones_like(out))
        plan(out, *given)
        for _ in range(2):  # the second one might have a fast path
            with pytest.raises(RuntimeError, match="dout: got a tensor with a tangent, which"):
                plan(dual, *given)
            with pytest.raises(RuntimeError, match="dout: got a tensor with a tangent, which"):
                plan(dout=dual)
