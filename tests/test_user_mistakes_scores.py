"""Mistakes of users in masks, in score functions, in numbers of scores and in arrays for gradients."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import rawattn
from tests.mistakes import Mistake, check, names

BACKWARD = "attention_backward(out.astype(np.float16), *half, lse, bias=bias, "

CALLS = [
    Mistake(
        "ScoreMod('score * forward', forward=1.0)",
        TypeError,
        "forward: rawattn.ScoreMod got this argument by position and by name, expected it once; capture by another name",
    ),
    Mistake(
        "ScoreMod('score * backward', backward=1.0)",
        ValueError,
        "backward: got 1.0 (float), expected None: an expression is differentiated by itself",
    ),
    Mistake(
        "rawattn.block_mask(predicate='mask[kv_idx]', mask=np.ones(5, bool), seqlen_q=5, seqlen_k=5)",
        TypeError,
        "block_mask: expected one of mask, predicate and ranges, got mask and predicate; mask= is an argument, so what "
        "the predicate reads as 'mask' is captured by another name",
    ),
    Mistake(
        "rawattn.block_mask(mask_mod=len, B=1, Q_LEN=6)",
        TypeError,
        "block_mask: expected one of mask, predicate and ranges, got none of them; mask_mod= is no argument, write "
        "predicate=; B= is no argument, write batch=; Q_LEN= is no argument, write seqlen_q=",
    ),
    Mistake(
        "ScoreMod('score + t[head]', t=np.ones(4, np.float32), wrt=[['t']])",
        TypeError,
        "wrt: got [['t']] (list), expected names of captured arrays",
    ),
    Mistake(
        "ScoreMod('score', language=np.zeros(2))",
        TypeError,
        "language: got a ndarray of shape (2,), expected 'expression' or 'cuda'",
    ),
    Mistake(
        "ScoreMod('score + t[head]', t=np.ones(4, np.uint8))",
        TypeError,
        "t: got dtype uint8; accepted are float16, ...; convert it, as by t.astype(np.int32)",
    ),
    Mistake(
        "ScoreMod('score + t[head]', t=np.ones(4, complex))",
        TypeError,
        "t: got dtype complex128; ...as by t.astype(np.float32)",
    ),
    Mistake(
        "ScoreMod('score + t', t=np.array(3.0))",
        ValueError,
        "t: got shape (), expected 1 to 4 axes; pass the number, t.item(), or t.reshape(1) and write t[0]",
    ),
    Mistake("ScoreMod('score', language=3)", TypeError, "language: got 3 (int), expected 'expr"),
    Mistake("attention(q, k, v, backend=1)", TypeError, "backend: got 1; accepted are 'cuda', "),
    Mistake(
        "attention(q, k, v, score_mod=ScoreMod('score + t[0]', t=np.ones(1)))",
        TypeError,
        "t: got dtype float64, which...as by t.astype(np.float32), in torch t.float()",
    ),
    Mistake(
        "attention(q, k, v, bias=np.float32(1))",
        TypeError,
        "bias: got np.float32(1.0)...; pass an array, as by np.full(1, bias, np.float32)",
    ),
    Mistake(
        "attention(q, k, v, mask=np.True_)",
        TypeError,
        "mask: got np.True_...; pass an array of bool, True for a key that is seen",
    ),
    Mistake(
        "block_mask(ranges=np.zeros((1, 5, 1, 2)), seqlen_k=7)",
        TypeError,
        "ranges: got dtype float64, expected int32 or int64; convert it, as by ranges.astype(np.int32)",
    ),
    Mistake(
        "block_mask(ranges=np.zeros((1, 5, 1, 2), int), seqlen_k=7, nheads=7)",
        ValueError,
        "nheads: got 7 beside ranges, which are the same for all heads, expected 1; ...pass mask= or",
    ),
    Mistake(
        "block_mask(np.ones((5, 7), bool), 'True')",
        TypeError,
        "rawattn.block_mask: got 2 arguments by position, expected 1: mask; name the others: predicate, ",
    ),
    Mistake(
        "topk_mask(np.ones((5, 7), bool), 2)",
        TypeError,
        "scores: got dtype bool, expected numbers; convert it, as by scores.astype(np.float32)",
    ),
    Mistake(
        "show_mask(np.ones((0, 2, 5, 7), bool))",
        ValueError,
        "mask: got a batch and heads of (0, 2), expected at least one of each",
    ),
    Mistake(
        "show_mask('q_idx >= kv_idx', seqlen_q=5, seqlen_k=7)",
        TypeError,
        "mask: got 'q_idx >= kv_idx' (str), ...BlockMask or None; pass a text, as in mask=rawattn.block_mask(predicate=",
    ),
    Mistake(
        "show_mask(lambda b, h, q, k: q >= k, seqlen_q=5, seqlen_k=7)",
        TypeError,
        "mask: got <function...BlockMask or None; pass a text, as in mask=rawattn.block_mask(predicate=",
    ),
    Mistake(
        "block_mask(block_mask(np.ones((5, 7), bool)))",
        TypeError,
        "mask: got <rawattn...(BlockMask), expected an array of bool; calls take a BlockMask as it is",
    ),
    Mistake(
        "show_mask(np.ones((5, 7), bool), tile=(1.5, 2))",
        TypeError,
        "tile: got 1.5 (float), expected a tuple (rows, keys) of ints >= 1",
    ),
    Mistake(
        BACKWARD + "into=Gradients(dbias=bias.astype(np.float16)))",
        TypeError,
        "into.dbias: got dtype float16, expected float32, that of bias",
    ),
    Mistake(
        BACKWARD + "want_dbias=False, into=Gradients(dbias=bias.copy()))",
        ValueError,
        "into.dbias: got an array, but the call has no such gradient...pass bias=, and no want_dbias=False",
    ),
]

TORCH = [
    Mistake(
        "combine([t.requires_grad_(), t], [lse, lse])",
        RuntimeError,
        "outs[0]: got a tensor that requires a gradient...rawattn.torch.attention alone has gradients; pass outs[0].detach()",
    ),
    Mistake(
        "ScoreMod('score + t[head]', t=torch.ones(4, dtype=torch.int16))",
        TypeError,
        "t: got dtype int16; ...as by t.to(torch.int32)",
    ),
    Mistake(
        "rawattn.torch.attention(t, t, t, align='top-left', alibi_slopes=torch.ones(4).requires_grad_())",
        RuntimeError,
        "alibi_slopes: got a tensor...score - slope[head] * abs(q_idx - kv_idx)",
    ),
]

JAX = [
    Mistake(
        "jax.jit(lambda m: rawattn.jax.attention(n, n, n, mask=block_mask(m)))(m)",
        TypeError,
        "mask: got a JAX tracer...outside of the traced function, or pass bools as mask= of rawattn.jax.attention",
    ),
    Mistake(
        "jax.jit(lambda m: topk_mask(m, 2))(m)",
        TypeError,
        "scores: got a JAX tracer...outside of the traced function",
    ),
    Mistake(
        "jax.jit(lambda t: block_mask(predicate='t[q_idx]', t=t, seqlen_q=5, seqlen_k=5))(m[0])",
        TypeError,
        "t: got a JAX tracer...outside of the traced function",
    ),
    Mistake(
        "jax.grad(lambda s: rawattn.jax.attention(n, n, n, scale=s).sum())(1.0)",
        TypeError,
        "scale: got a ...or multiply q by it and pass scale=1.0",
    ),
]


@pytest.mark.parametrize("mistake", CALLS, ids=str)
def test_calls(mistake: Mistake) -> None:
    known = names()
    half = [known[name].astype(np.float16) for name in ("q", "k", "v", "out")]
    check(mistake, {**known, "half": half, "bias": np.zeros((5, 7), np.float32)})


@pytest.mark.frameworks
@pytest.mark.parametrize("mistake", TORCH, ids=str)
def test_calls_in_torch(mistake: Mistake) -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("rawattn.torch")
    given = {"t": torch.ones(2, 5, 4, 8), "lse": torch.ones(2, 4, 5)}
    check(mistake, {**names(), "torch": torch, **given})


@pytest.mark.frameworks
@pytest.mark.parametrize("mistake", JAX, ids=str)
def test_calls_in_jax(mistake: Mistake) -> None:
    jax = pytest.importorskip("jax")
    importlib.import_module("rawattn.jax")
    given = {"n": jax.numpy.ones((2, 5, 4, 8)), "m": jax.numpy.ones((5, 5), bool)}
    check(mistake, {**names(), "jax": jax, **given})


def test_numbers_of_a_tile_are_those_of_numpy_too() -> None:
    shown = rawattn.show_mask(np.ones((5, 7), bool), tile=(np.int64(5), 7))
    assert shown.splitlines()[1:] == ["#"]
