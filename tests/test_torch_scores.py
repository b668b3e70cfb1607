"""`rawattn.torch.attention` on the host with options of scores and dropout, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import rawattn
import rawattn.torch
from tests.cases import Case
from tests.landed import require
from tests.score_cases import few
from tests.torch_calls import SCORE_CASES, leaves, random, verify_scores

pytestmark = pytest.mark.frameworks

attention = rawattn.torch.attention


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_bias_and_sink_logits_get_their_gradients(compiled: bool) -> None:
    run = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    q, k, v = random("cpu", rows=9)
    bias, sinks = torch.randn(1, 4, 9, 9), torch.randn(4)
    for wanted in ((True, True), (True, False), (False, True)):
        x = leaves(q, k, v)
        b, s = (t.clone().requires_grad_(on) for t, on in zip((bias, sinks), wanted, strict=True))
        run(*x, bias=b, sink_logits=s).square().sum().backward()

        y = leaves(q, k, v, bias, sinks)
        scores = torch.einsum("bqhd,bkhd->bhqk", y[0], y[1].repeat_interleave(2, 2)) / 32**0.5
        sink = y[4][None, :, None, None].expand(2, 4, 9, 1)
        p = torch.softmax(torch.cat([scores + y[3], sink], -1), -1)[..., :-1]
        exact = torch.einsum("bhqk,bkhd->bqhd", p, y[2].repeat_interleave(2, 2))
        exact.square().sum().backward()
        for got, want in zip(x, y[:3], strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)
        for got, want, on in zip((b, s), y[3:], wanted, strict=True):
            assert (got.grad is not None) == on
            if on:
                torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", few(SCORE_CASES), ids=str)
def test_scores(case: Case) -> None:
    require(case, "cpu")
    verify_scores(case, "cpu")


@pytest.mark.parametrize("case", few(SCORE_CASES), ids=str)
def test_scores_compiled(case: Case) -> None:
    require(case, "cpu")
    verify_scores(case, "cpu", compiled=True)


def numeric(loss: Any, x: Any, count: int = 12) -> list[tuple[int, float, float]]:
    """For some elements of x: the index, the slope by differences of the loss, and the slope by autograd."""
    (slope,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    indices = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))[:count]
    found = []
    for index in indices.tolist():
        moved = [x.detach().clone() for _ in range(2)]
        for sign, each in zip((1, -1), moved, strict=True):
            each.view(-1)[index] += sign * 1e-2
        up, down = (loss(each).item() for each in moved)
        found.append((index, (up - down) / 2e-2, slope.reshape(-1)[index].item()))
    return found


@pytest.mark.parametrize("name", ["bias", "sink_logits", "captured", "bias-of-one-row"])
def test_gradients_are_slopes(name: str) -> None:
    """Gradients match differences of the loss, with soft cap, causal mask and dropout switched on too."""
    q, k, v = random("cpu", rows=9, dim=8)
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "bias": (2, 4, 9, 9),
        "sink_logits": (4,),
        "captured": (4,),
        "bias-of-one-row": (1, 2, 1, 9),
    }
    weight = torch.randn(q.shape, generator=generator)
    given = torch.randn(shapes[name], generator=generator)

    def loss(x: Any) -> Any:
        options: dict[str, Any] = {"softcap": 3.0, "causal": True, "dropout_p": 0.25, "seed": 5}
        if name == "captured":
            text = "score + table[head] * sin(0.3 * kv_idx) * score"
            options["score_mod"] = rawattn.ScoreMod(text, wrt="table", table=x)
        else:
            options[name.partition("-")[0]] = x
        out, lse = attention(q, k, v, return_lse=True, **options)
        return (out * weight).sum(dtype=torch.float64) + lse.square().sum(dtype=torch.float64)

    slopes = numeric(loss, given)
    size = max(abs(exact) for _, exact, _ in slopes)
    assert size > 0
    for index, exact, ours in slopes:
        assert abs(ours - exact) <= 2e-3 * size, (name, index, exact, ours)


@pytest.mark.parametrize("wanted", ["q", "bias", "sink_logits", "table", "bias sink_logits"])
def test_any_of_the_inputs_may_require_a_gradient(wanted: str) -> None:
    q, k, v = random("cpu")
    bias, logits, table = torch.randn(33, 33), torch.randn(4), torch.randn(4)
    given = {"q": q, "k": k, "v": v, "bias": bias, "sink_logits": logits, "table": table}

    def loss(x: dict[str, Any]) -> Any:
        mod = rawattn.ScoreMod("score * table[head]", wrt="table", table=x["table"])
        rest = {name: x[name] for name in ("bias", "sink_logits")}
        return attention(x["q"], x["k"], x["v"], score_mod=mod, **rest).square().sum()

    every = {name: x.clone().requires_grad_() for name, x in given.items()}
    loss(every).backward()
    some = {name: x.clone().requires_grad_(name in wanted.split()) for name, x in given.items()}
    loss(some).backward()
    for name, x in some.items():
        if name in wanted.split():
            torch.testing.assert_close(x.grad, every[name].grad)
        else:
            assert x.grad is None


def test_gradients_that_would_be_lost_are_refused() -> None:
    x, slopes = random("cpu"), torch.ones(4, requires_grad=True)
    for given in (x, leaves(*x)):
        with pytest.raises(RuntimeError, match=r"^alibi_slopes: .*alibi_slopes\.detach\(\), or"):
            attention(*given, alibi_slopes=slopes)
        with pytest.raises(RuntimeError, match=r"^score_mod: captured slope .*wrt=\('slope',\)"):
            attention(*given, score_mod=rawattn.ScoreMod("score * slope[head]", slope=slopes))
        with torch.no_grad():
            attention(*given, alibi_slopes=slopes)


@pytest.mark.parametrize("name", ["mask", "alibi_slopes", "seed", "table", "bias"])
def test_what_is_changed_before_the_backward_is_found_out(name: str) -> None:
    q, k, v = random("cpu")
    given = {
        "mask": torch.ones(33, 33, dtype=torch.bool),
        "alibi_slopes": torch.ones(4),
        "seed": torch.tensor([3]),
        "table": torch.ones(4),
        "bias": torch.zeros(33, 33),
    }
    options = {x: given[x] for x in ("mask", "alibi_slopes", "seed", "bias")}
    mod = rawattn.ScoreMod("score * table[head]", wrt="table", table=given["table"])
    out = attention(q.requires_grad_(), k, v, dropout_p=0.5, score_mod=mod, **options)
    given[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensors_may_move() -> None:
    """Saved-tensor hooks may give other tensors to the backward, also in place of a score function's."""
    x, table = leaves(*random("cpu")), torch.randn(4, requires_grad=True)

    def gradients() -> list[Any]:
        mod = rawattn.ScoreMod("score * table[head] + a * n", wrt="table", table=table, a=0.5, n=3)
        out = attention(*x, score_mod=mod, alibi_slopes=torch.ones(4))
        return list(torch.autograd.grad(out.square().sum(), [*x, table]))

    exact = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        moved = gradients()
    for a, b in zip(exact, moved, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_draws_the_same_again() -> None:
    x, seed = leaves(*random("cpu")), torch.tensor([7])

    def run(*qkv: Any) -> Any:
        return attention(*qkv, dropout_p=0.5, seed=seed)

    exact = torch.autograd.grad(run(*x).square().sum(), x)
    again = torch.utils.checkpoint.checkpoint(run, *x, use_reentrant=False)
    for a, b in zip(exact, torch.autograd.grad(again.square().sum(), x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
