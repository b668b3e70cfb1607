"""`rawattn.torch.attention` under `torch.compile` on the host: values, seeds, lengths that change, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import torch._dynamo.testing  # noqa: F811  (torch does not load it before it compiles)

import rawattn
import rawattn.torch
from rawattn._torch import ops
from tests.torch_calls import gradients, leaves, random

pytestmark = pytest.mark.frameworks

attention = rawattn.torch.attention


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


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
