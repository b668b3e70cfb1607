"""Mistakes in calls of `rawattn.torch.attention` on the host, also where autograd records or torch compiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

from torch.autograd import forward_ad

import rawattn
import rawattn.torch
from tests.bad_calls import BAD_CALLS, Bad, check_refused
from tests.frameworks import Torch
from tests.torch_calls import leaves, random

pytestmark = pytest.mark.frameworks

attention = rawattn.torch.attention


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


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


@pytest.mark.parametrize("run", [attention, rawattn.attention])
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_trace_would_keep_the_result_as_a_constant(run: Any) -> None:
    x = tuple(random("cpu"))
    with pytest.raises(RuntimeError, match=r"use torch\.export or torch\.compile"):
        torch.jit.trace(lambda *qkv: run(*qkv) * 1, x, check_trace=False)
    run(*x)


@pytest.mark.parametrize("run", [attention, rawattn.attention])
def test_tangents_would_be_lost(run: Any) -> None:
    """A forward-mode tangent of any argument is refused, also beside one that requires a gradient. Calls without tangents work
    in the same dual level."""
    (q, k, v), one = random("cpu"), torch.ones(1)

    def table(x: Any) -> Any:
        return rawattn.ScoreMod("score + table[0]", table=x)

    def loss(x: Any) -> Any:
        return run(x, k, v)

    with forward_ad.dual_level():
        dual_q, dual = (forward_ad.make_dual(x, torch.ones_like(x)) for x in (q, one))
        run(q, k, v, bias=one)
        for name, call in {
            "q": lambda: run(dual_q, k, v),
            "v": lambda: run(q, k, dual_q[:, :, :2]),
            "bias": lambda: run(q, k, v, bias=dual),
            "sink_logits": lambda: run(q, k, v, sink_logits=dual.expand(q.shape[2])),
            "table": lambda: run(q, k, v, score_mod=table(dual)),
            "out": lambda: run(q, k, v, out=dual_q),
        }.items():
            with pytest.raises(RuntimeError, match=rf"{name}: got a tensor with a tangent, which"):
                call()
        if run is attention:
            out = attention(*leaves(q, k, v))
            with pytest.raises(RuntimeError, match=r"^bias: got a tensor with a tangent"):
                attention(*leaves(q, k, v), bias=dual)
            with pytest.raises(RuntimeError, match="dout: got a tensor with a tangent"):
                out.backward(dual_q)
            compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
            with pytest.raises(RuntimeError, match=r"call of a program in .*dual_level"):
                compiled(dual_q, k, v)
    with pytest.raises(RuntimeError, match="q: got a tensor with a tangent"):
        torch.autograd.functional.jacobian(loss, q, vectorize=True, strategy="forward-mode")


@pytest.mark.parametrize("fullgraph", [False, True])
def test_tangents_of_a_program_of_its_own(fullgraph: bool) -> None:
    """A compiled function that opens a forward-mode level itself is refused while torch traces it."""
    q, k, v = random("cpu")

    def call(x: Any) -> Any:
        return attention(x, k, v).sin()

    def dual(x: Any) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, x))).tangent

    for function in (
        lambda x: torch.func.jvp(call, (x,), (x,))[1],
        torch.func.jacfwd(call),
        dual,
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"call of a program in .*dual_level"):
            torch.compile(function, fullgraph=fullgraph, backend="aot_eager")(q)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), call(q))


def test_gradients_come_one_at_a_time() -> None:
    q, k, v = leaves(*random("cpu"))
    out = attention(q, k, v)
    with pytest.raises(TypeError, match=r"dout: .*leave out is_grads_batched=True"):
        torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)


def test_tensors_without_values_are_refused() -> None:
    for run in (attention, rawattn.attention):
        with pytest.raises(TypeError, match="under FakeTensorMode for shapes alone"):
            run(*(x.to("meta") for x in random("cpu")))


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


RECORDED_BAD_CALLS = [bad for bad in BAD_CALLS if not bad.change.keys() & {"out", "backend"}]


@pytest.mark.parametrize("bad", RECORDED_BAD_CALLS, ids=str)
def test_bad_calls(bad: Bad) -> None:
    """Bad calls are refused as by the plain call, also where autograd records."""

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        x = (
            t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for t in (q, k, v)
        )
        return attention(*x, **options)

    check_refused(bad, Torch(), call)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["causal", "align", "sink", "dropout_p"])
def test_none_where_it_is_not_the_default(name: str, recorded: bool) -> None:
    x = random("cpu")
    if recorded:
        x = leaves(*x)
    for more in ({}, {"deterministic": True}):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: got None"):
            attention(*x, **more, **{name: None})


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("value", ["x", 1, None])
@pytest.mark.parametrize("name", ["return_lse", "deterministic"])
def test_what_is_no_bool(name: str, value: Any, recorded: bool) -> None:
    """The call itself refuses values that are no bools, not its backward."""
    x = leaves(*random("cpu")) if recorded else random("cpu")
    for more in ({}, {"alibi_slopes": torch.ones(x[0].shape[2])}):
        with pytest.raises(TypeError, match=rf"^{name}: got .*expected a bool"):
            attention(*x, **more, **{name: value})
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=name):
        compiled(*x, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("bias", [1.0], "bias: got list, expected a tensor or None"),
        ("mask", [True], "mask: got list, expected a tensor or None"),
        ("sink", 1.5, "sink: got 1.5, expected an int"),
        ("window", (1.5, 1), "window: got 1.5, expected a tuple"),
        ("seqs", 5, "seqs: got int, expected a SeqLayout"),
        ("scale", True, "scale: got True, expected a finite number"),
        ("scale", "1", "scale: got 1, expected a finite number"),
        ("scale", np.float32(0.5), r"scale: got ndarray, .*; pass scale\.item\(\), made outside"),
        ("softcap", True, "softcap: got True, expected a number above 0, or None"),
        ("softcap", torch.tensor(0.5), r"softcap: got Tensor, .*; pass softcap\.item\(\), made"),
        ("dropout_p", None, "dropout_p: got NoneType, expected a probability"),
        ("num_splits", True, "num_splits: got True, expected an int from 1 to 256"),
        ("num_splits", 1.5, "num_splits: got 1.5, expected an int from 1 to 256"),
        ("align", None, "align: got None, expected 'bottom-right' or 'top-left'"),
        ("backend", 1, "backend: got 1, expected 'cuda', 'cpu' or None"),
        ("causal", np.True_, r"causal: expected True or False; .*pass bool\(causal\)"),
        ("foo", 3, "foo: rawattn.torch.attention has no such argument"),
    ],
)
def test_mistakes_that_torch_would_tell_in_its_own_words(name: str, value: Any, says: str) -> None:
    """Mistakes are refused before they reach the operator, whose schema cannot say what an argument is for."""
    compiled = torch.compile(
        lambda *x: attention(*x, **{name: value}), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match=says):
        compiled(*random("cpu"))
