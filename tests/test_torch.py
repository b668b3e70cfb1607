"""`rawattn.torch.attention` with tensors on the host."""

from __future__ import annotations

import doctest
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import rawattn
import rawattn.torch
from rawattn._torch import ops
from tests import torch_calls
from tests.bad_calls import BAD_CALLS, Bad, check_refused
from tests.cases import Case
from tests.frameworks import Torch
from tests.landed import require
from tests.score_cases import few
from tests.torch_calls import (
    GRADIENT_CASES,
    SCORE_CASES,
    gradients,
    leaves,
    random,
    torchs_own,
    verify_scores,
)

pytestmark = pytest.mark.frameworks

attention = rawattn.torch.attention


@pytest.fixture(autouse=True)
def _forget_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_cases(case: Case) -> None:
    torch_calls.verify_case(case, "cpu")


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
    """Float32 differs by 1e-7 of a value near 1, so a step of 1e-2 leaves 1e-5 of a derivative, and a step of 1e-2
    squared is as much again: 1e-3 is far from both, and a wrong factor or a lost term is far from it."""
    q, k, v = leaves(*(torch.randn(2, n, h, 4) / 2 for n, h in ((5, 2), (7, 1), (7, 1))))

    def run(q, k, v):
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, torch.where(lse.isfinite(), lse, 0)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #. requires gradient and is not a double")
        assert torch.autograd.gradcheck(run, (q, k, v), eps=1e-2, atol=1e-3, rtol=1e-3)


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


def test_lse_alone() -> None:
    """The gradient of lse with respect to q is the mean of the keys, as probable as they are."""
    q, k, v = leaves(*random("cpu", heads_kv=4))
    _, lse = attention(q, k, v, scale=1.0, return_lse=True)
    lse.sum().backward()
    p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k), -1)
    torch.testing.assert_close(q.grad, torch.einsum("bhqk,bkhd->bqhd", p, k))
    assert not v.grad.any()


def test_gradient_of_a_sum() -> None:
    """Its dout is one number, seen through strides of 0."""
    q, k, v = leaves(*random("cpu", heads_kv=4))
    attention(q, k, v).sum().backward()
    torch.testing.assert_close(v.grad.sum(1), torch.full((2, 4, 32), 33.0))


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
    with pytest.raises(RuntimeError, match=r"once_differentiable|double backward"):
        dq.sum().backward()


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
    """The backward works on what the hooks give back, not on what the forward had."""
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


def test_deterministic_reaches_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def backward(*given, deterministic, **options):
        seen.append(deterministic)
        return rawattn.attention_backward(*given, deterministic=deterministic, **options)

    monkeypatch.setattr(rawattn.torch, "attention_backward", backward)
    monkeypatch.setattr(ops, "attention_backward", backward)
    for run in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        for flag in (False, True):
            gradients(lambda *x, run=run, flag=flag: run(*x, deterministic=flag), *random("cpu"))
    assert seen == [False, True, False, True]


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


@pytest.mark.parametrize("case", few([x for x in SCORE_CASES if not x.score_mod]), ids=str)
def test_scores_compiled(case: Case) -> None:
    require(case, "cpu")
    verify_scores(case, "cpu", compiled=True)


def numeric(loss: Any, x: Any, count: int = 12) -> list[tuple[int, float, float]]:
    """Of some elements: its place, the slope by differences of the loss, and by autograd."""
    (slope,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    places = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))[:count]
    found = []
    for place in places.tolist():
        moved = [x.detach().clone() for _ in range(2)]
        for sign, each in zip((1, -1), moved, strict=True):
            each.view(-1)[place] += sign * 1e-2
        up, down = (loss(each).item() for each in moved)
        found.append((place, (up - down) / 2e-2, slope.reshape(-1)[place].item()))
    return found


@pytest.mark.parametrize("name", ["bias", "sink_logits", "captured", "bias-of-one-row"])
def test_gradients_are_slopes(name: str) -> None:
    """Against differences, with everything else on that a score goes through."""
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
    for place, exact, ours in slopes:
        assert abs(ours - exact) <= 2e-3 * size, (name, place, exact, ours)


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
    """Hooks give other tensors to the backward, those of a score function too."""
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


@pytest.mark.parametrize("seed", [3, -1, 2**63 + 5, 2**80])
def test_seeds_of_compiled_functions(seed: Any) -> None:
    x = random("cpu")

    def run(*qkv: Any) -> Any:
        return attention(*qkv, dropout_p=0.5, seed=seed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*x), run(*x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"score_mod": rawattn.ScoreMod("score * 2")}, "score_mod: got one in a function under"),
        ({"dropout_p": 0.5, "seed": True}, "seed: got bool, expected an int"),
        ({"dropout_p": 0.5}, "seed: got None"),
        ({"bias": torch.zeros(3, 3)}, r"bias: got shape \(3, 3\)"),
        ({"mask": torch.zeros(33, 33)}, "mask: got dtype float32, expected bool"),
        ({"sink_logits": torch.zeros(3)}, r"sink_logits: got shape \(3,\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_options_that_a_compiled_function_refuses(options: dict[str, Any], says: str) -> None:
    def run(*qkv: Any) -> Any:
        return attention(*qkv, **options)

    with pytest.raises(Exception, match=says):
        torch.compile(run, fullgraph=True, backend="aot_eager")(*random("cpu"))


@pytest.mark.parametrize("recorded", [False, True])
def test_double_precision_is_refused(recorded: bool) -> None:
    x = [t.double() for t in random("cpu")]
    with pytest.raises(
        TypeError, match="q: got dtype float64, expected float16, bfloat16 or float32"
    ):
        attention(*(leaves(*x) if recorded else x))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"q: got dtype torch.float64.* as by q.float\(\)"):
        compiled(*(leaves(*x) if recorded else x))


def test_others_than_tensors_are_refused() -> None:
    q, k, v = random("cpu")
    with pytest.raises(
        TypeError, match=r"k: got ndarray, expected a torch\.Tensor; rawattn\.attention"
    ):
        attention(q, k.numpy(), v)


def test_mistakes_are_told() -> None:
    q, k, v = leaves(*random("cpu"))
    with pytest.raises(ValueError, match="v: got seqlen_k = 32"):
        attention(q, k, v[:, 1:])
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="v: got seqlen_k = 32"):
        compiled(q, k, v[:, 1:])
    with pytest.raises(Exception, match=r"window: got 5, expected a tuple"):
        compiled(q, k, v, window=5)
    with pytest.raises(ValueError, match="window: got -2"):
        compiled(q, k, v, window=(-2, None))


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


def test_compiled_by_inductor() -> None:
    """What lies around the call is compiled with it, forward and backward."""

    def model(q, k, v):
        out, lse = attention(q.sin(), k, v * 2, window=(5, None), causal=True, return_lse=True)
        return out.cos(), lse * 3

    exact = gradients(model, *random("cpu"))
    got = gradients(torch.compile(model, fullgraph=True), *random("cpu"))
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_for_other_lengths() -> None:
    """Shapes and lengths that change are no reason to compile for each of them."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def model(q, k, v, seqs):
        return attention(q, k, v, seqs=seqs, causal=True)

    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n, lengths in ((20, [3, 20]), (31, [31, 7]), (17, [0, 5]), (29, [1, 2])):
        x = [t[:, :n].contiguous() for t in random("cpu")]
        seqs = rawattn.SeqLayout(seqlen_q=lengths, seqlen_k=lengths)
        got = gradients(lambda *t, seqs=seqs: compiled(*t, seqs), *x)
        exact = gradients(lambda *t, seqs=seqs: model(*t, seqs), *x)
        for a, b in zip(got, exact, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2


def test_the_operator_is_what_torch_expects() -> None:
    """Its schema, fake, and autograd are consistent by torch's own checks."""
    for layout, options in (
        (ops.Layout(), ops.Options(causal=True)),
        (ops.Layout(seqlen_k=torch.tensor([3, 30])), ops.Options(window_left=4, sink=1, scale=0.5)),
    ):
        given = (*leaves(*random("cpu")), *layout, *options)
        torch.library.opcheck(ops._attention, given, atol=1e-4, rtol=1e-4)


def test_examples() -> None:
    results = doctest.testmod(rawattn.torch)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("n", range(5))
def test_documentation(n: int) -> None:
    """Each block after those before it."""
    blocks = torch_calls.documentation()
    assert len(blocks) == 5
    if "transformers" in blocks[n]:
        pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    for block in (blocks[0], blocks[n]) if n else blocks[:1]:
        exec(compile(block, "frameworks.md", "exec"), names)


@pytest.mark.parametrize("way", ["eager", "operator", "compiled"])
def test_the_plain_call_sees_nothing_that_is_recorded(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would refuse: its result has no gradient."""
    made = []

    def watched(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            assert not (torch.is_grad_enabled() and any(x.requires_grad for x in given))
            made.append(function)
            return function(*given, **options)

        return call

    for module, name in ((rawattn.torch, "_attention"), (ops, "attention")):
        monkeypatch.setattr(module, name, watched(rawattn.attention))
        monkeypatch.setattr(module, "attention_backward", watched(rawattn.attention_backward))
    run = {
        "eager": attention,
        "operator": lambda *x: ops.run(*x, ops.Layout(), ops.Options())[0],
        "compiled": torch.compile(attention, fullgraph=True, backend="aot_eager"),
    }[way]
    for create_graph in (False, way != "compiled"):  # torch refuses it after the other one there
        q, k, v = leaves(*random("cpu"))
        torch.autograd.grad(run(q, k, v).square().sum(), q, create_graph=create_graph)
        run(q.detach(), k.detach(), v.detach())
        with torch.no_grad():
            run(q, k, v)
    assert len(made) == 8


RECORDED_BAD_CALLS = [bad for bad in BAD_CALLS if not bad.change.keys() & {"out", "backend"}]


@pytest.mark.parametrize("bad", RECORDED_BAD_CALLS, ids=str)
def test_bad_calls(bad: Bad) -> None:
    """Refused as by the plain call, also where autograd records."""

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        x = (
            t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for t in (q, k, v)
        )
        return attention(*x, **options)

    check_refused(bad, Torch(), call)
