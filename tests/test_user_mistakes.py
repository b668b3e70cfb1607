"""Mistakes of users in keywords, arrays and options of a call, and the message that each gets."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rawattn
from tests.mistakes import Mistake, check, names

KEYWORDS = [
    Mistake(
        "attention(q, k, v, is_causal=True)",
        TypeError,
        "is_causal: ...attention has no such argument; write causal=True, align='top-left'",
    ),
    Mistake("attention(q, k, v, softmax_scale=0.1)", TypeError, "softmax_scale: ...write scale="),
    Mistake(
        "attention(q, k, v, attn_mask=np.ones((5, 7), bool))",
        TypeError,
        "attn_mask: ...write mask= for bool (True = keep) or bias=",
    ),
    Mistake(
        "attention(q, k, v, cu_seqlens_q=[0, 5, 10])",
        TypeError,
        "cu_seqlens_q: ...write seqs=SeqLayout(seqstart_q=",
    ),
    Mistake(
        "attention(q, k, v, max_seqlen_k=7)",
        TypeError,
        "max_seqlen_k: ...write seqs=SeqLayout(..., max_seqlen_q=",
    ),
    Mistake(
        "attention(q, k, v, window_size=(-1, -1))",
        TypeError,
        "window_size: ...write window=(left, right)...None (not -1)",
    ),
    Mistake(
        "attention(q, k, v, dropout=0.1)",
        TypeError,
        "dropout: ...write dropout_p= ...integer seed=",
    ),
    Mistake("attention(q, k, v, enable_gqa=True)", TypeError, "enable_gqa: ...leave it out"),
    Mistake(
        "attention(q, k, v, key_padding_mask=np.zeros((2, 7), bool))",
        TypeError,
        "key_padding_mask: ...write seqs=SeqLayout(seqlen_k=(~key_padding_mask).sum(1))",
    ),
    Mistake(
        "attention(q, k, v, deterministic=True)",
        TypeError,
        "deterministic: ...attention_backward takes it",
    ),
    Mistake("attention(q, k, v, cuasal=True)", TypeError, "cuasal: ...did you mean causal="),
    Mistake(
        "attention(q, k, v, fancy=True)",
        TypeError,
        "fancy: ...accepted are q, k, v, seqs, causal, ",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, lse, sm_scale=0.1)",
        TypeError,
        "sm_scale: rawattn.attention_backward has no such argument; write scale=",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, lse, num_splits=1)",
        TypeError,
        "num_splits: ...give it to the forward call",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, lse, determinstic=True)",
        TypeError,
        "determinstic: ...did you mean deterministic=",
    ),
    Mistake(
        "attention_vjp(q, k, v, logits_soft_cap=30.0)",
        TypeError,
        "logits_soft_cap: rawattn.attention_vjp has no such argument; write softcap=",
    ),
    Mistake(
        "attention_vjp(q, k, v, want_dbias=False)",
        TypeError,
        "want_dbias: rawattn.attention_vjp has no such argument; give it to ...the function that attention_vjp gives back",
    ),
    Mistake(
        "plan(attention, q, k, v, is_causal=True)",
        TypeError,
        "is_causal: rawattn.attention has no such argument; write causal=True",
    ),
    Mistake(
        "plan(attention_backward, out, q, k, v, out, lse, scaling=0.1)",
        TypeError,
        "scaling: rawattn.attention_backward has no such argument; write scale=",
    ),
    Mistake("plan(attention, q, k)", TypeError, "v: rawattn.attention got none, expected q, k, v"),
    Mistake(
        "rawattn.parallel.Group()",
        AttributeError,
        "rawattn.parallel: one sequence over several GPUs is no part",
    ),
    Mistake(
        "__import__('rawattn.parallel')",
        ModuleNotFoundError,
        "rawattn.parallel: one sequence over...split the batch or the heads",
    ),
    Mistake(
        "plan(np.matmul, q, k)", NotImplementedError, "fn: got matmul...rawattn.attention_backward"
    ),
    Mistake(
        "plan(attention, q, k, v)(q, k, v, scale=0.5)",
        TypeError,
        "scale: ...takes q, k, v...that of planning time",
    ),
    Mistake("plan(attention, q, k, v)(into=Gradients())", TypeError, "into: ...results to out="),
]

ARRAYS = [
    Mistake(
        "attention(heads_first, keys_heads_first, keys_heads_first)",
        ValueError,
        "q: got nheads_q = 128...expected a multiple of nheads_kv = 100...these look like (batch, heads, seqlen, D)"
        "...x.swapaxes(1, 2)",
    ),
    Mistake(
        "attention(packed_heads_first, longer_heads_first, longer_heads_first, seqs=SeqLayout(seqstart_q=[0, 4]))",
        ValueError,
        "q: got nheads_q = 10...these look like (heads, total, D)...x.swapaxes(0, 1)",
    ),
    Mistake(
        "attention(packed, packed, packed)",
        ValueError,
        "seqs: got None...expected SeqLayout(seqstart_q=...or give q four axes",
    ),
    Mistake("attention(q, k[0], v[0])", ValueError, "k: got shape (7, 2, 8), expected (batch, "),
    Mistake("attention(q, k, v[:, :6])", ValueError, "v: got seqlen_k = 6...expected 7, that of k"),
    Mistake(
        "attention(q[:, :, :3], k, v)",
        ValueError,
        "q: got nheads_q = 3...expected a multiple of nheads_kv = 2",
    ),
    Mistake(
        "attention(*(x.astype(np.float64) for x in (q, k, v)))",
        TypeError,
        "q: got dtype float64, expected float16, bfloat16 or float32; convert it, as by q.astype(np.float32)",
    ),
    Mistake(
        "attention(q.astype(np.float16), k, v)",
        TypeError,
        "k: got dtype float32, expected float16, that of q; convert it, as by k.astype(np.float16)",
    ),
    Mistake("attention(q.astype('>f4'), k, v)", TypeError, "q: got dtype >f4...newbyteorder('=')"),
    Mistake(
        "attention(q.tolist(), k, v)",
        TypeError,
        "q: got list; accepted are ...pass numpy.asarray(q)",
    ),
    Mistake(
        "attention([packed, longer], k, v)",
        TypeError,
        "q: got list...pass one packed array...seqs=SeqLayout.from_lengths([len(item) for item in q])",
    ),
    Mistake(
        "attention(np.ma.masked_array(q, q > 2), k, v)",
        TypeError,
        "q: got a masked array...pass q.filled(0)...SeqLayout.from_padding_mask(",
    ),
    Mistake(
        "attention(None, k, v)", TypeError, "q: got NoneType; accepted are NumPy and CuPy arrays"
    ),
    Mistake("attention(q, 'k', v)", TypeError, "k: got str; accepted are NumPy and CuPy arrays"),
    Mistake(
        "attention(q, k, v, out=q)",
        ValueError,
        "out: got shape (2, 5, 4, 8), expected (2, 5, 4, 16)",
    ),
    Mistake(
        "attention(q, q, q, out=q)",
        ValueError,
        "out: shares memory with q, expected...pass another array",
    ),
    Mistake(
        "attention(q, k, v, out=np.broadcast_to(out, out.shape))",
        ValueError,
        "out: got a read-only array; pass a writable one",
    ),
    Mistake(
        "attention(q, k, v, out=out.astype(np.float16))",
        TypeError,
        "out: got dtype float16, expected float32, that of q",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, out)",
        ValueError,
        "lse: got shape (2, 5, 4, 16), expected (2, 4, 5), that of the forward's lse",
    ),
    Mistake(
        "attention_backward(out[:, :3], q, k, v, out, lse)",
        ValueError,
        "dout: got shape (2, 3, 4, 16), expected (2, 5, 4, 16)",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, lse, into=(q, k, v))",
        TypeError,
        "into: got tuple, expected rawattn.Gradients(dq=",
    ),
    Mistake(
        "attention(q, k, v, bias=np.zeros((5, 7)))",
        TypeError,
        "bias: got dtype float64, expected float32; convert it, as by bias.astype(np.float32)",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, lse.astype(float))",
        TypeError,
        "lse: got dtype float64, expected float32...as by lse.astype(np.float32)",
    ),
    Mistake(
        "attention(q, k, v, score_mod=ScoreMod('score + slope[head]', slope=np.ones(4, '>f4')))",
        TypeError,
        "slope: got dtype >f4, which is not in this machine's byte order",
    ),
    Mistake(
        "paged_attention(q, k, v, [[0, 1], [0]], seqlen_k=[2, 2])",
        TypeError,
        "block_table: got a list of rows of 2 and 1 page ids, expected rows of one length;...pass a tuple (indptr, page_ids)",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, lse, into=Gradients(captured=[q]))",
        TypeError,
        "into.captured: got list, expected a dict of arrays",
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, lse, into=Gradients(captured={'slope': q}))",
        ValueError,
        "into.captured: got an array for 'slope', expected names that score_mod has in wrt: none",
    ),
]

OPTIONS = [
    Mistake(
        "attention(q, k, v, causal='yes')", TypeError, "causal: got 'yes' (str), expected a bool"
    ),
    Mistake(
        "attention(q, k, v, align='top_left')",
        ValueError,
        "align: got 'top_left' (str), expected 'bottom-right' or 'top-left'",
    ),
    Mistake(
        "attention(q, k, v, window=(-1, -1))",
        ValueError,
        "window: got -1, expected a tuple (left, right)...window=(None, None)",
    ),
    Mistake(
        "attention(q, k, v, window=-1)",
        TypeError,
        "window: got -1 (int), expected a tuple (left, ...; where -1 meant unbounded write window=None",
    ),
    Mistake(
        "attention(q, k, v, sink=np.zeros(4, np.float32))",
        TypeError,
        "sink: got a ndarray of shape (4,), expected an int >= 0; logits of the heads ...are sink_logits=",
    ),
    Mistake(
        "attention(q, k, v, window=256)",
        TypeError,
        "window: got 256 (int), expected a tuple (left, ...; 256 keys on each side are window=(256, 256), those before a",
    ),
    Mistake(
        "attention(q, k, v, scale=float('nan'))",
        ValueError,
        "scale: got nan (float), expected a finite",
    ),
    Mistake(
        "attention(q, k, v, softcap=0)", ValueError, "softcap: got 0 (int), expected...or None"
    ),
    Mistake(
        "attention(q, k, v, dropout_p=0.1)",
        ValueError,
        "seed: got None, expected an integer, since",
    ),
    Mistake(
        "attention(q, k, v, dropout_p=10, seed=1)",
        ValueError,
        "dropout_p: got 10 (int), expected a probability in [0, 1)",
    ),
    Mistake(
        "attention(q, k, v, backend='gpu')",
        ValueError,
        "backend: got 'gpu'; accepted are 'cuda', 'cpu' and None",
    ),
    Mistake(
        "attention(q, k, v, return_lse='x')",
        TypeError,
        "return_lse: got 'x' (str), expected a bool",
    ),
    Mistake(
        "attention_vjp(q, k, v, return_lse=1)",
        TypeError,
        "return_lse: got 1 (int), expected a bool",
    ),
    Mistake(
        "attention_vjp(q, k, v, deterministic=None)",
        TypeError,
        "deterministic: got None (NoneType), expected a bool",
    ),
    Mistake(
        "plan(attention, q, k, v, return_lse=1)", TypeError, "return_lse: got 1 (int), expected"
    ),
    Mistake(
        "attention_backward(out, q, k, v, out, lse, want_dbias=True)",
        ValueError,
        "want_dbias: got True, but bias is None; pass the bias or drop want_dbias",
    ),
    Mistake(
        "attention(q, k, v, mask=np.ones((2, 7), bool))",
        ValueError,
        "mask: got shape (2, 7), expected ...looks like a padding mask...SeqLayout.from_padding_mask(mask)",
    ),
    Mistake(
        "attention(q, k, v, mask=[True])", TypeError, "mask: got [True] (list), expected an array"
    ),
]


@pytest.mark.parametrize("mistake", [*KEYWORDS, *ARRAYS, *OPTIONS], ids=str)
def test_calls(mistake: Mistake) -> None:
    check(mistake, names())


def test_help_says_how_heads_come_first_and_shows_what_is_accepted() -> None:
    assert "x.transpose(1, 2)" in str(inspect.getdoc(rawattn.attention))
    for function in (rawattn.attention, rawattn.attention_backward, rawattn.SeqLayout):
        kinds = {x.kind for x in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.slow
def test_types_are_checked_strictly() -> None:
    pytest.importorskip("mypy")
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]
    done = subprocess.run(
        [*command, "tests/typing_cases.py"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_long_values_are_cut() -> None:
    """A message tells what is accepted, however much was passed."""
    given = names()
    nested = np.ones((8, 8, 8, 8)).tolist()
    with pytest.raises(
        TypeError, match=r"mask: got \[\[\[\[1.0, .*\.\.\. \(list\), expected"
    ) as refused:
        rawattn.attention(given["q"], given["k"], given["v"], mask=nested)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_framework_that_is_not_installed(framework: str) -> None:
    code = f"import sys; sys.modules[{framework!r}] = None; import rawattn.{framework}"
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert f"ImportError: rawattn.{framework} is for " in result.stderr
    assert "pip install" in result.stderr
