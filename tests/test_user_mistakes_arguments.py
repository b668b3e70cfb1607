"""Mistakes of users: misplaced arguments, missing arguments, and values that other libraries accept there."""

from __future__ import annotations

import importlib

import pytest

import rawattn
from tests.mistakes import Mistake, check, names

PAGES = "q, np.ones((6, 4, 2, 8), np.float32), np.ones((6, 4, 2, 8), np.float32), [[0, 1], [2, 3]]"

ARGUMENTS = [
    Mistake(
        "attention(query=q, key=k, value=v)",
        TypeError,
        "query: rawattn.attention has no such argument; pass q, k and v, in this order",
    ),
    Mistake(
        "attention(q, k, v, np.ones((5, 7), bool))",
        TypeError,
        "rawattn.attention: got 4 arguments by position, expected 3: q, k, v; name the others: seqs, causal, ...mask, ",
    ),
    Mistake(
        "attention(q, k, v, alibi_slopes=np.ones((4, 2), np.float32))",
        ValueError,
        "alibi_slopes: got shape (4, 2), expected...or (batch, nheads_q) = (2, 4); pass alibi_slopes.T",
    ),
    Mistake(
        "attention(q, k, v, backend=q)",
        TypeError,
        "backend: got a ndarray of shape (2, 5, 4, 8); accepted are 'cuda', 'cpu' and None",
    ),
    Mistake(
        "paged_attention(q, k, v, np.zeros((2, 1), np.int32), seqlen_k=[3, 3], validate=q)",
        TypeError,
        "validate: got a ndarray of shape (2, 5, 4, 8), expected a bool",
    ),
    Mistake(
        "rawattn.reference.paged_attention(q, k[0, 0, 0], v, np.zeros((2, 1), np.int32), seqlen_k=[3, 3])",
        ValueError,
        "k_pages: got shape (8,), expected (num_pages, page_size, nheads_kv, D)",
    ),
    Mistake(
        "rawattn.BlockMask(np.ones((5, 7), bool))",
        TypeError,
        "BlockMask: got a call, but a mask is made by rawattn.block_mask(mask)",
    ),
    Mistake("rawattn.BlockMask(mask=None)", TypeError, "BlockMask: got a call, but a mask is made"),
    Mistake(
        "rawattn.Plan(attention, q, k, v)",
        TypeError,
        "Plan: got a call, but a plan is made by rawattn.plan(rawattn.attention, q, k, v, ...)",
    ),
    Mistake("rawattn.Plan()", TypeError, "Plan: got a call, but a plan is made by rawattn.plan("),
    Mistake(
        f"paged_attention({PAGES}, seqlen_k=[5, 7], mask=np.ones((2, 8), bool))",
        ValueError,
        "mask: got shape (2, 8)...looks like a padding mask (batch, seqlen): where padding comes last pass "
        "seqlen_k=mask.sum(1), for a mask of the keys, else mask=mask[:, None, None, :]",
    ),
    Mistake(
        "attention_vjp(query=q, key=k, value=v)",
        TypeError,
        "query: rawattn.attention_vjp has no such argument; pass q, k and v, in this order",
    ),
    Mistake(
        "attention_vjp(q, k, value=v)",
        TypeError,
        "value: rawattn.attention_vjp has no such argument; pass q, k and v, in this order",
    ),
    Mistake(
        "attention(q, k, v, return_lse=True, out=(out, lse))",
        TypeError,
        "out: got tuple; accepted are NumPy and CuPy arrays...; pass one array to write, or leave it out",
    ),
    Mistake(
        "attention(Q=q, K=k, V=v)",
        TypeError,
        "Q: rawattn.attention has no such argument; pass q, k and v, in this order",
    ),
    Mistake(
        f"append_kv(k, v, {PAGES[3:]}, seqlen_k=[7, 7], cos=q, sin=q)",
        TypeError,
        "cos: rawattn.append_kv has no such argument; call rawattn.append_kv(..., rotary=(cos, sin))",
    ),
    Mistake(
        "append_kv(key=k, value=v, seqlen_k=[7, 7])",
        TypeError,
        "key: rawattn.append_kv has no such argument; pass arrays by position, as in append_kv(k, v, k_pages, ",
    ),
    Mistake(
        "attention_backward(grad_output=out, q=q, k=k, v=v, out=out, softmax_lse=lse)",
        TypeError,
        "grad_output: rawattn.attention_backward has no such argument; write dout=",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, softmax_lse=lse)",
        TypeError,
        "softmax_lse: rawattn.attention_backward has no such argument; write lse=",
    ),
    Mistake("attention((q, k, v))", TypeError, "k: rawattn.attention got none...write *qkv"),
    Mistake(
        "rawattn.combine([(out, lse), (out, lse)])",
        TypeError,
        "lses: rawattn.combine got none, expected outs, lses; of a list of pairs (out, lse) write *zip(*parts)",
    ),
    Mistake(
        "rawattn.combine([out, out, out])",
        TypeError,
        "lses: rawattn.combine got none, expected outs, lses",
    ),
    Mistake(
        "attention(np.stack([q, q, q], 2))",
        TypeError,
        "k: rawattn.attention got none, expected q, k, v; a packed qkv is taken apart by *np.moveaxis(qkv, -3, 0)",
    ),
    Mistake("attention(q, k)", TypeError, "v: rawattn.attention got none, expected q, k, v"),
    Mistake(
        "attention_vjp(q, k, v, True)",
        TypeError,
        "rawattn.attention_vjp: got 4 arguments by position, expected 3",
    ),
    Mistake(
        "attention_vjp(q, k, v)[1](out, deterministic=True)",
        TypeError,
        "deterministic: the backward of rawattn.attention_vjp has no such argument; give it to rawattn.attention_vjp",
    ),
    Mistake(
        "attention_vjp(q, k, v)[1](out, lse=lse)",
        TypeError,
        "lse: the backward of rawattn.attention_vjp has no such argument; leave it out: it keeps what the forward returned",
    ),
    Mistake(
        "attention_vjp(q, k, v)[1](out, retain_graph=True)",
        TypeError,
        "retain_graph: the backward of rawattn.attention_vjp has no such argument; accepted are dout, ",
    ),
    Mistake(
        "attention_vjp(q, k, v)[1]()",
        TypeError,
        "dout: the backward of rawattn.attention_vjp got none, expected dout",
    ),
    Mistake(
        "attention_backward(out, q, k, v)",
        TypeError,
        "out: rawattn.attention_backward got none, expected dout, q, k, v, out, lse",
    ),
    Mistake(
        "combine([(out, lse), (out, lse)])", TypeError, "lses: rawattn.combine got none, expected"
    ),
    Mistake(
        "combine([out, out], [lse, lse], axis=0)",
        TypeError,
        "axis: rawattn.combine has no such argument; accepted are outs, lses, out, dtype",
    ),
    Mistake(
        "SeqLayout([0, 5, 10])",
        TypeError,
        "SeqLayout: got 1 by position...write rawattn.SeqLayout(seqstart_q=[0, 5, 10]), of lengths ",
    ),
    Mistake(
        "plan(q, k, v)",
        NotImplementedError,
        "fn: got a ndarray of shape (2, 5, 4, 8) where the function stands, as in plan(rawattn.attention, ",
    ),
    Mistake("plan(attention)", TypeError, "q: rawattn.attention got none, expected q, k, v"),
    Mistake(
        "rawattn.reference.attention(q, k, v, is_causal=True)",
        TypeError,
        "is_causal: rawattn.reference.attention has no such argument; write causal=True",
    ),
    Mistake(
        f"paged_attention({PAGES})",
        TypeError,
        "seqlen_k: rawattn.paged_attention got none...block_table, and seqlen_k=...",
    ),
    Mistake(
        f"paged_attention({PAGES}, cache_seqlens=[7, 8])",
        TypeError,
        "cache_seqlens: rawattn.paged_attention has no such argument; write seqlen_k=",
    ),
    Mistake(
        f"paged_attention({PAGES}, seqlen_k=[7, 8], page_size=4)",
        TypeError,
        "page_size: rawattn.paged_attention has no such argument; leave it out: the shape of k_pages",
    ),
    Mistake(
        "rawattn.flash_attn_func(q, k, v)",
        AttributeError,
        "module 'rawattn' has no attribute 'flash_attn_func'; call rawattn.attention(q, k, v)",
    ),
    Mistake(
        "attention(q.reshape(2, 5, 32), k.reshape(2, 7, 16), v.reshape(2, 7, 32))",
        ValueError,
        "q: got nheads_q = 5...; q of three axes is a packed batch...of (batch, seqlen, width) pass x.reshape(batch, ",
    ),
    Mistake("attention(q, k, v, dtype=np.float16)", TypeError, "dtype: ...leave it out: results"),
    Mistake("attention(q, k, v, device='cuda')", TypeError, "device: ...backend='cuda' or 'cpu'"),
    Mistake("attention(q, k, v, k_scale=1.0)", TypeError, "k_scale: ...rawattn.paged_attention"),
    Mistake(
        "attention(q, k, v, block_q=128)", TypeError, "block_q: ...leave it out: tiles are chosen"
    ),
    Mistake(
        "attention(q, k, v, training=False)",
        TypeError,
        "training: ...leave it out: dropout_p=0.0, the default, drops nothing",
    ),
]

VALUES = [
    Mistake(
        "ScoreMod()", TypeError, "forward: rawattn.ScoreMod got none, expected forward, backward"
    ),
    Mistake(
        "topk_mask(np.ones((2, 4, 5, 7), np.float32))",
        TypeError,
        "k: rawattn.topk_mask got none, expected scores, k",
    ),
    Mistake(
        "show_mask(5, 7, causal=True)",
        TypeError,
        "rawattn.show_mask: got 2 arguments by position, expected 1: mask; name the others: ",
    ),
    Mistake(
        "rawattn.unpack_pages(q)",
        TypeError,
        "v_cache: rawattn.unpack_pages got none, expected k_cache, v_cache",
    ),
    Mistake(
        "attention(q, k, v, mask='causal')",
        TypeError,
        "mask: got 'causal' (str), expected an array of bool, a rawattn.BlockMask or None; write causal=True",
    ),
    Mistake(
        "attention(q, k, v, mask=lambda b, h, q, k: q >= k)",
        TypeError,
        "mask: got <function...pass a text, as in mask=rawattn.block_mask(predicate='q_idx >= kv_idx', ",
    ),
    Mistake(
        "attention(q, k, v, mask=ScoreMod('score'))", TypeError, "mask: got ...write score_mod="
    ),
    Mistake(
        "attention(q, k, v, mask=np.ones((5, 7), int))",
        TypeError,
        "mask: got dtype int64, expected bool...of a mask of 1 and 0 pass mask != 0",
    ),
    Mistake(
        "attention(q, k, v, bias=np.ones((5, 7), bool))",
        TypeError,
        "bias: got dtype bool, expected numbers that are added to scores; write mask= (True = keep)",
    ),
    Mistake(
        "attention(q, k, v, score_mod='score * 2')",
        TypeError,
        "score_mod: got 'score * 2' (str), expected a rawattn.ScoreMod or None; write score_mod=rawattn.ScoreMod(",
    ),
    Mistake(
        "attention(q, k, v, score_mod=lambda score, b, h, i, j: score)",
        TypeError,
        "score_mod: got <function...write what it returns as a text, as in rawattn.ScoreMod('",
    ),
    Mistake(
        "attention(q, k, v, alibi_slopes=[0.5, 0.25, 0.1, 0.1])",
        TypeError,
        "alibi_slopes: got [0.5, ...expected an array or None; pass np.asarray(alibi_slopes, np.float32)",
    ),
    Mistake(
        "attention(q, k, v, alibi_slopes=True)",
        TypeError,
        "alibi_slopes: got True (bool), expected an array or None; pass the slopes",
    ),
    Mistake(
        "attention(q, k, v, dropout_p=0.1, seed=np.random.default_rng(0))",
        TypeError,
        "seed: got Generator...as by int(seed.integers(2**31))",
    ),
    Mistake(
        "attention(q, k, v, scale=np.ones(()))",
        TypeError,
        "scale: got a ndarray of shape (), expected a finite number...as by scale.item()",
    ),
    Mistake(
        "attention(q, k, v, score_mod=[ScoreMod('score * 2')])",
        TypeError,
        "score_mod: got [ScoreMod...expected a rawattn.ScoreMod or None; a call has one",
    ),
    Mistake(
        "attention(q, k, v, bias=1.0)",
        TypeError,
        "bias: got 1.0 (float), expected an array or None; pass an array, as by np.full(1, bias, np.float32)",
    ),
    Mistake(
        "attention(q, k, v, bias='alibi')",
        TypeError,
        "bias: got 'alibi' (str), expected an array or None; pass the numbers...alibi_slopes=",
    ),
    Mistake(
        "attention(q, k, v, bias=block_mask(np.ones((5, 7), bool)))",
        TypeError,
        "bias: got <...(BlockMask), expected an array or None; write mask=",
    ),
    Mistake(
        "attention(q, k, v, mask=True)",
        TypeError,
        "mask: got True (bool), expected an array of bool, a rawattn.BlockMask or None; pass an array of bool",
    ),
    Mistake(
        "attention(q, k, v, alibi_slopes=np.ones((4, 1, 1), np.float32))",
        ValueError,
        "alibi_slopes: got shape (4, 1, 1), expected...; pass alibi_slopes.reshape(4,)",
    ),
    Mistake(
        "attention(q, k, v, alibi_slopes=np.ones(2, np.float32))",
        ValueError,
        "alibi_slopes: got shape (2,), expected...; pass a slope for each query head",
    ),
    Mistake(
        "attention(q, k, v, dropout_p=0.1, seed=np.array([1], np.uint32))",
        TypeError,
        "seed: got dtype uint32, expected int32 or int64, or an int; convert it, as by seed.astype(np.int64)",
    ),
    Mistake(
        "rawattn.reference.attention(q, k, v, bias=1.0)",
        TypeError,
        "bias: got 1.0 (float), expected an array or None; pass an array",
    ),
    Mistake(
        "rawattn.reference.attention(q, k, v, mask='causal')",
        TypeError,
        "mask: got 'causal' (str), expected an array of bool, a rawattn.BlockMask or None; write causal=True",
    ),
    Mistake(
        "rawattn.reference.attention(q, k, v, score_mod='score * 2')",
        TypeError,
        "score_mod: got 'score * 2' (str), expected a rawattn.ScoreMod or None; write score_mod=",
    ),
    Mistake(
        "rawattn.reference.attention(q, k, v, mask=np.ones((5, 7)))",
        TypeError,
        "mask: got dtype float64, expected bool, where True keeps a key; what is added",
    ),
    Mistake(
        "block_mask('q_idx >= kv_idx', seqlen_q=5, seqlen_k=7)",
        TypeError,
        "mask: got 'q_idx >= kv_idx' (str), expected an array of bool; write predicate=",
    ),
    Mistake(
        "block_mask(lambda b, h, q, k: q >= k, seqlen_q=5, seqlen_k=7)",
        TypeError,
        "mask: got <function...write its text, predicate='q_idx >= kv_idx'",
    ),
    Mistake(
        "block_mask(predicate=lambda b, h, q, k: q >= k, seqlen_q=5, seqlen_k=7)",
        TypeError,
        "predicate: got <function...expected a text, as in 'q_idx >= kv_idx'",
    ),
    Mistake(
        "block_mask(predicate='q_idx >= kv_idx', Q_LEN=5, KV_LEN=7)",
        TypeError,
        "Q_LEN: rawattn.block_mask has no such argument; write seqlen_q=",
    ),
    Mistake(
        "block_mask(predicate='q >= kv_idx', seqlen_q=5, seqlen_k=7)",
        ValueError,
        "predicate: got `q`, which is unknown; known are ...; write `q_idx`",
    ),
    Mistake(
        "ScoreMod(\"where(q_idx > kv_idx, score, float('-inf'))\")",
        ValueError,
        "score_mod: got `'-inf'`, str; accepted are numbers, True and False; write `inf`",
    ),
]

TORCH = [
    Mistake(
        "rawattn.torch.attention(t, t, t, None, 0.0, True)",
        TypeError,
        "rawattn.torch.attention: got 6 arguments by position, expected 3: q, k, v; name the others",
    ),
    Mistake(
        "rawattn.torch.attention(query=t, key=t, value=t)",
        TypeError,
        "query: rawattn.torch.attention has no such argument; pass q, k and v",
    ),
    Mistake(
        "attention(torch.stack([t, t, t], 2))",
        TypeError,
        "k: rawattn.attention got none...in torch by *qkv.unbind(-3)",
    ),
    Mistake(
        "rawattn.torch.attention(t, t, t, dropout_p=0.1, seed=torch.Generator())",
        TypeError,
        "seed: got ...as by int(torch.randint(2**31, (), generator=seed))",
    ),
    Mistake(
        "rawattn.torch.attention(t, t, t, scale=torch.tensor(0.3))",
        TypeError,
        "scale: got a Tensor of shape (), expected...as by scale.item()",
    ),
    Mistake(
        "torch.func.vmap(lambda x: rawattn.torch.attention(x, x, x))(t[None])",
        TypeError,
        "q: got torch.Tensor...torch.func's transformations cannot see...put what vmap maps into the batch axis",
    ),
    *(
        Mistake(
            f"torch.func.grad(lambda x: rawattn.torch.attention(x, x, x{options}).sum())(t)",
            NotImplementedError,
            "rawattn.torch.attention: got a call in a function that torch.func.grad...torch.autograd.grad",
        )
        for options in ("", ", bias=torch.zeros(4, 4)")
    ),
    Mistake(
        "rawattn.torch.scaled_dot_product_attention(t, t, t)",
        AttributeError,
        "module 'rawattn.torch' has no attribute 'scaled_dot_product_attention'; call rawattn.attention(q, k, v)",
    ),
    Mistake(
        "rawattn.torch.attention_vjp(t, t, t)",
        AttributeError,
        "module 'rawattn.torch' has no attribute 'attention_vjp'; it is rawattn.attention_vjp",
    ),
]

JAX = [
    Mistake(
        "rawattn.jax.dot_product_attention(n, n, n)",
        AttributeError,
        "module 'rawattn.jax' has no attribute 'dot_product_attention'; call rawattn.attention(q, k, v)",
    ),
    Mistake(
        "rawattn.jax.attention(n, n, n, None)",
        TypeError,
        "rawattn.jax.attention: got 4 arguments by position, expected 3",
    ),
    Mistake(
        "jax.jit(rawattn.jax.attention)(n, n, n, causal=True)",
        TypeError,
        "causal: got ...expected a bool...name it in static_argnames='causal' of jax.jit",
    ),
    Mistake(
        "jax.jit(lambda q, w: rawattn.jax.attention(q, q, q, window=(w, 0)))(n, 3)",
        TypeError,
        "window: got (DynamicJaxprTracer)...static_argnames='window'",
    ),
    Mistake(
        "rawattn.jax.attention(n, n, n, dropout_p=0.1, seed=jax.random.key(0))",
        TypeError,
        "seed: got ...of a JAX key pass jax.random.randint(key, (), 0, 2**31 - 1)",
    ),
    Mistake(
        "rawattn.jax.attention(n, n, n, dropout_p=0.1, seed=jax.random.PRNGKey(0))",
        TypeError,
        "seed: got dtype uint32, ...of a JAX key pass jax.random.randint(key, ",
    ),
    Mistake(
        "jax.jit(lambda x: rawattn.jax.attention(n, n, n, dropout_p=0.1, seed=x))(jax.random.key(0))",
        TypeError,
        "seed: got dtype key<fry>, expected numbers; of a JAX key pass jax.random.randint(key, (), 0, 2**31 - 1)",
    ),
    Mistake(
        "jax.jit(lambda x: rawattn.jax.attention(n, n, n, bias=x))(jax.random.key(0))",
        TypeError,
        "bias: got dtype key<fry>, expected numbers",
    ),
    Mistake(
        "rawattn.jax.attention(n, n, n, return_lse=1)",
        TypeError,
        "return_lse: got 1 (int), expected a bool: True or False",
    ),
]


@pytest.mark.parametrize("mistake", [*ARGUMENTS, *VALUES], ids=str)
def test_calls(mistake: Mistake) -> None:
    check(mistake, names())


@pytest.mark.frameworks
@pytest.mark.parametrize("mistake", TORCH, ids=str)
def test_calls_in_torch(mistake: Mistake) -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("rawattn.torch")
    check(mistake, {**names(), "torch": torch, "t": torch.ones(2, 5, 4, 8)})


@pytest.mark.frameworks
@pytest.mark.parametrize("mistake", JAX, ids=str)
def test_calls_in_jax(mistake: Mistake) -> None:
    jax = pytest.importorskip("jax")
    importlib.import_module("rawattn.jax")
    check(mistake, {**names(), "jax": jax, "n": jax.numpy.ones((2, 5, 4, 8))})


def test_what_is_named_exists() -> None:
    from rawattn._call.keywords import FUNCTIONS, IN_PAGES, KEYWORDS

    for advice in FUNCTIONS.values():
        for word in advice.replace("(", " ").replace(",", " ").split():
            name = word.removeprefix("rawattn.")
            assert name in (word, "torch.attention", "torch.register_transformers") or hasattr(
                rawattn, name
            ), word
    assert not [name for name in FUNCTIONS if hasattr(rawattn, name)]
    assert not {"seqlen_k", "block_table", "k_pages", "v_pages"} & IN_PAGES.keys()
    assert KEYWORDS["page_size"] != IN_PAGES["page_size"]
