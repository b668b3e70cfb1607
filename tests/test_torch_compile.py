"""`rawattn.torch.attention` under `torch.compile` on the host: values, seeds, lengths that change, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
# ruff: noqa: E402

import torch._dynamo.testing  # noqa: F811  (torch does not load it before it compiles)

import rawattn
import rawattn.torch
from rawattn._call import integers
from rawattn._call.given import ARRAYS
from rawattn._call.options import Options
from rawattn._handles import find
from rawattn._interop.integers import TensorIntegers
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
        ({"score_mod": "score * 2"}, "score_mod: got str, expected a rawattn.ScoreMod"),
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


def test_numbers_of_numpy_in_a_compiled_function() -> None:
    """NumPy numbers, which are arrays to torch.compile, are accepted as options. Other values may compile anew."""
    x, two = random("cpu"), np.int64(2)
    options = {"softcap": np.float64(3), "num_splits": two, "sink": two, "window": (two, None)}

    def run(q: Any, k: Any, v: Any, p: Any) -> Any:
        scale = 1 / np.sqrt(q.shape[-1])
        return attention(q, k, v, scale=scale, dropout_p=p, seed=two, **options)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for p in (np.float64(0.5), np.float64(0.25)):
        assert torch.equal(compiled(*x, p), run(*x, p))


def test_masks_and_score_functions_of_compiled_functions() -> None:
    """A compiled function uses the mask and the score function of each call, and gives the gradient of a captured tensor."""
    q, k, v = random("cpu")
    tables = [torch.randn(4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    table, constant, other = (x.requires_grad_() if n == 0 else x for n, x in enumerate(tables))
    text = "score + table[head] * rate + constant[head] * kv_idx * beside[head]"
    beside = np.linspace(0, 1, 4, dtype=np.float32)
    mods = [
        rawattn.ScoreMod(text, wrt="table", table=table, constant=x, beside=beside, rate=0.5)
        for x in (constant, other)
    ]
    shape = {"seqlen_q": q.shape[1], "seqlen_k": k.shape[1]}
    masks = [rawattn.block_mask(predicate=f"kv_idx % 3 != {n}", **shape) for n in (1, 2)]

    def run(mask, mod):
        out, lse = attention(q, k, v, mask=mask, score_mod=mod, return_lse=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = [x.requires_grad_() for x in (q, k, v)] + [table]
    for mask, mod in ((masks[0], mods[0]), (masks[1], mods[0]), (masks[0], mods[1])):
        exact = torch.autograd.grad(run(mask, mod), inputs)
        got = torch.autograd.grad(compiled(mask, mod), inputs)
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    with torch.no_grad():
        table += 1  # read anew at every call
        torch.testing.assert_close(compiled(masks[0], mods[0]), run(masks[0], mods[0]))


def test_what_a_compiled_program_was_made_with_is_kept_by_the_caller() -> None:
    mask = rawattn.block_mask(predicate="kv_idx > 0", seqlen_q=3, seqlen_k=3)
    assert find(mask.handle) is mask
    handle = mask.handle
    del mask
    with pytest.raises(RuntimeError, match="keep it as long as the program"):
        find(handle)


def test_equal_score_functions_are_compiled_once() -> None:
    """Score functions that differ in their tensors alone, as in the layers of a model, share a program. Each gets its own
    gradient."""
    x, counter = random("cpu"), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def run(mod: Any) -> Any:
        return attention(*x, score_mod=mod).square().sum()

    def made(n: int, wrt: str = "a") -> Any:
        tables = {name: torch.rand(4) + n for name in "ab"}
        tables[wrt].requires_grad_()
        return rawattn.ScoreMod("score * a[head] + b[head] * rate", wrt=wrt, rate=0.5, **tables)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for n in range(3):
        mod = made(n)
        exact, got = (torch.autograd.grad(f(mod), mod.arrays["a"]) for f in (run, compiled))
        torch.testing.assert_close(got, exact)
    assert counter.frame_count == 1
    kept, gone = made(0, "b"), made(1, "b")
    assert kept.handle == gone.handle != mod.handle
    del gone
    compiled(kept).backward()
    assert counter.frame_count == 2
    others = [np.ones(4, np.float32), torch.ones(4, dtype=torch.float16), torch.ones(1, 4)]
    mods = [rawattn.ScoreMod("score * a[head]", a=x) for x in others[:2]]
    mods.append(rawattn.ScoreMod("score * a[0, head]", a=others[2]))
    mods += [rawattn.ScoreMod("score * a[head]", a=others[0]), rawattn.ScoreMod("score * a", a=2.0)]
    mods += [rawattn.ScoreMod("score * a", a=3.0), rawattn.ScoreMod("score * a", a=3)]
    assert len({x.handle for x in mods}) == len(mods)


def test_a_captured_array_that_is_no_tensor_has_no_gradient_in_a_program() -> None:
    x, table = random("cpu"), torch.rand(4, requires_grad=True)
    beside = np.linspace(0, 1, 4, dtype=np.float32)
    text = "score * table[head] + beside[head] * kv_idx"
    mod = rawattn.ScoreMod(text, wrt=("beside", "table"), beside=beside, table=table)

    def run(*qkv: Any) -> Any:
        return attention(*qkv, score_mod=mod).square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    exact, got = (torch.autograd.grad(f(*x), table) for f in (run, compiled))
    torch.testing.assert_close(got, exact)


def test_compiled_by_inductor() -> None:
    """Inductor compiles the operations around the call together with it, forward and backward."""

    def model(q, k, v):
        out, lse = attention(q.sin(), k, v * 2, window=(5, None), causal=True, return_lse=True)
        return out.cos(), lse * 3

    exact = gradients(model, *random("cpu"))
    got = gradients(torch.compile(model, fullgraph=True), *random("cpu"))
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_for_other_lengths() -> None:
    """Shapes and lengths that change do not compile a program each."""
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


def test_lengths_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths in GPU tensors are inputs of the program, without a copy to the host."""

    def of_torch(x: Any) -> TensorIntegers:
        return TensorIntegers(1 << 44, len(x), np.dtype(np.int64), 0, x)

    lengths = torch.tensor([3, 5])
    q, k, v = random("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(integers, "of_torch", of_torch)
        seqs = rawattn.SeqLayout(seqlen_q=lengths, seqlen_k=lengths)
    host = rawattn.SeqLayout(seqlen_q=[3, 5], seqlen_k=[3, 5])

    def run(q: Any) -> Any:
        return attention(q * 1, k, v, seqs=seqs) + 1

    found = torch.compile(run, fullgraph=True, backend="eager")(q)
    torch.testing.assert_close(found, attention(q, k, v, seqs=host) + 1)


def test_the_operator_takes_what_layouts_have() -> None:
    assert ops.Layout._fields == (*ARRAYS, "max_seqlen_q", "max_seqlen_k")


def test_the_operator_is_what_torch_expects() -> None:
    """The operator's schema, fake kernel and autograd formula pass torch's own consistency checks."""
    for layout, options in (
        (ops.Layout(), Options(causal=True)),
        (
            ops.Layout(seqlen_k=torch.tensor([3, 30])),
            Options(window=(4, None), sink=1, scale=0.5),
        ),
    ):
        arguments = ops.arguments_of(options, False, None)
        given = (*leaves(*random("cpu")), *layout, *arguments)
        torch.library.opcheck(ops._attention, given, atol=1e-4, rtol=1e-4)
