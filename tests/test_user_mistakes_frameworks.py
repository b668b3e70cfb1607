"""Mistakes of users of torch and JAX."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.mistakes import Mistake, check, names

TORCH = [
    Mistake(
        "attention(t.requires_grad_(), t, t)",
        RuntimeError,
        "q: got a tensor that requires a gradient...rawattn.torch.attention alone has gradients; pass q.detach()",
    ),
    Mistake(
        "attention(t.double(), t.double(), t.double())",
        TypeError,
        "q: got dtype float64, expected float16, bfloat16 or float32; convert it, as by q.float()",
    ),
    Mistake(
        "attention(t.half(), t, t)",
        TypeError,
        "k: got dtype float32, expected float16, that of q; convert it, as by k.half()",
    ),
    Mistake(
        "attention(t, t, t, sink_logits=torch.zeros(4).double())",
        TypeError,
        "sink_logits: got dtype float64, expected float32, ...as by sink_logits.float()",
    ),
    Mistake(
        "attention(t, t, t, score_mod=ScoreMod('score + slope[head]', slope=torch.zeros(4, requires_grad=True)))",
        RuntimeError,
        "slope: got a tensor that requires a gradient",
    ),
    Mistake("attention(t, t, t, attn_mask=None)", TypeError, "attn_mask: ...write mask="),
    Mistake(
        "attention(nested, nested, nested)",
        TypeError,
        "q: got ...NestedTensor...q.values() of a jagged one, with seqs=SeqLayout(seqstart_q=q.offsets())",
    ),
    Mistake("attention(t.to_sparse(), t, t)", TypeError, "q: got torch.Tensor...pass q.to_dense()"),
    Mistake("attention(t.to('meta'), t, t)", TypeError, "q: got torch.Tensor...meta"),
    Mistake(
        "attention(t.transpose(1, 2), torch.ones(2, 4, 9, 8), torch.ones(2, 4, 9, 8))",
        ValueError,
        "q: got nheads_q = 5...these look like (batch, heads, seqlen, D): pass x.transpose(1, 2)",
    ),
    Mistake(
        "rawattn.torch.attention(t, t, t, is_causal=True)",
        TypeError,
        "is_causal: rawattn.torch.attention has no such argument; write causal=True",
    ),
    Mistake(
        "rawattn.torch.attention(t[0], t[0], t[0], seqs=torch.tensor([0, 2, 5]))",
        TypeError,
        "seqs: got Tensor, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=cu_seqlens), of lengths",
    ),
    Mistake(
        "rawattn.torch.attention(q, q, q)",
        TypeError,
        "q: got ndarray, expected a torch.Tensor; rawattn.attention takes arrays of every library",
    ),
    Mistake(
        "rawattn.torch.attention(t.requires_grad_(), t, t, out=torch.empty(2, 5, 4, 8))",
        ValueError,
        "out: got a tensor in a call that autograd records...under torch.no_grad()",
    ),
]

JAX = [
    Mistake(
        "jax.jit(attention)(n, n, n)",
        TypeError,
        "q: got a JAX tracer; call rawattn.jax.attention, the one function that works inside jit, grad, vmap and scan",
    ),
    Mistake(
        "jax.grad(lambda k: attention(n, k, n).sum())(n)",
        TypeError,
        "k: got a JAX tracer; call rawattn.jax.attention",
    ),
    Mistake(
        "jax.vmap(lambda v: attention(n, n, v))(n[None])",
        TypeError,
        "v: got a JAX tracer; call rawattn.jax.attention",
    ),
    Mistake(
        "jax.jit(lambda q: attention_vjp(q, n, n)[0])(n)",
        TypeError,
        "q: got ...Tracer...call rawattn.jax.attention",
    ),
    Mistake(
        "attention(n.astype('int8'), n, n)",
        TypeError,
        "q: got dtype int8, expected float16, bfloat16 or float32; convert it, as by q.astype(jnp.float32)",
    ),
    Mistake(
        "rawattn.jax.attention(n, n.astype('int8'), n)",
        TypeError,
        "k: got dtype int8, expected float16, bfloat16 or float32; convert it, as by k.astype(jnp.float32)",
    ),
    Mistake(
        "rawattn.jax.attention(n[0], n[0], n[0], seqs=[0, 2, 5])",
        TypeError,
        "seqs: got list, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=[0, 2, 5]), of lengths",
    ),
    Mistake(
        "rawattn.jax.attention(n, n, n, is_causal=True)",
        TypeError,
        "is_causal: rawattn.jax.attention has no such argument; write causal=True",
    ),
    Mistake(
        "rawattn.jax.attention(n, n, n, backend='cpu')",
        TypeError,
        "backend: rawattn.jax.attention has no such argument; leave it out: a call runs where its program runs",
    ),
    Mistake(
        "attention(donated, n, n)",
        TypeError,
        "q: got jaxlib...pass an array that JAX has not deleted: what q was donated to, as by donate_argnums",
    ),
    Mistake(
        "attention(n, n, n, bias=donated)",
        TypeError,
        "bias: got jaxlib...pass an array that JAX has not deleted: what bias was donated to",
    ),
    Mistake(
        "attention(n, n, n, out=n)",
        ValueError,
        "out: got an array of jax, which never changes; pass one of NumPy, CuPy or torch",
    ),
    Mistake(
        "attention(n, n, n, precision='high')", TypeError, "precision: ...leave it out: float32 has"
    ),
    Mistake(
        "rawattn.jax.attention(t, n, n)",
        TypeError,
        "q: got ...list; accepted are JAX arrays, traced or not, and NumPy arrays",
    ),
]


@pytest.mark.frameworks
@pytest.mark.parametrize("mistake", TORCH, ids=str)
def test_calls_in_torch(mistake: Mistake) -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("rawattn.torch")

    documents = [torch.ones(3, 2, 8), torch.ones(5, 2, 8)]
    nested = torch.nested.nested_tensor(documents, layout=torch.jagged)
    check(mistake, {**names(), "torch": torch, "t": torch.ones(2, 5, 4, 8), "nested": nested})


@pytest.mark.frameworks
@pytest.mark.parametrize("mistake", JAX, ids=str)
def test_calls_in_jax(mistake: Mistake) -> None:
    jax = pytest.importorskip("jax")
    importlib.import_module("rawattn.jax")

    n = jax.device_put(np.ones((2, 5, 4, 8), np.float32), jax.devices("cpu")[0])
    donated = n + 1
    donated.delete()
    check(mistake, {**names(), "jax": jax, "n": n, "t": [1.0], "donated": donated})
