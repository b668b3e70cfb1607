"""Mistakes of users, and the message that each gets: the argument, what was got, what is accepted, how to fix it.

Of a message the pieces between the ellipses are told, in their order; it begins with the first.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import rawattn
from rawattn import cli


class Mistake(NamedTuple):
    code: str  # what the user wrote
    error: type[Exception]
    says: str

    def __str__(self) -> str:
        return self.code


def names() -> dict[str, Any]:
    """What the code of a mistake can name."""
    shapes = {
        "q": (2, 5, 4, 8),
        "k": (2, 7, 2, 8),
        "v": (2, 7, 2, 16),
        "heads_first": (2, 8, 128, 64),
        "keys_heads_first": (2, 8, 100, 64),
        "packed": (10, 4, 8),
        "longer": (14, 4, 8),
        "packed_heads_first": (4, 10, 8),
        "longer_heads_first": (4, 14, 8),
    }
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    out, lse = rawattn.attention(arrays["q"], arrays["k"], arrays["v"], return_lse=True)
    public = {name: getattr(rawattn, name) for name in rawattn.__all__}
    return {**public, **arrays, "out": out, "lse": lse, "np": np, "rawattn": rawattn}


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
        "deterministic: ...attention_backward takes deterministic=True",
    ),
    Mistake("attention(q, k, v, cuasal=True)", TypeError, "cuasal: ...did you mean causal="),
    Mistake(
        "attention(q, k, v, fancy=True)",
        TypeError,
        "fancy: ...accepted are q, k, v, seqs, causal, ",
    ),
    Mistake("attention(q, k)", TypeError, "attention() missing 1 required ...'v'"),
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
        "attention_vjp(q, k, v, out=out)",
        TypeError,
        "out: rawattn.attention_vjp does not take it...expected an option that the backward has",
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
    Mistake("plan(attention, q, k)", TypeError, "missing a required argument: 'v'"),
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
        "attention(q, q, q, out=q)", ValueError, "out: shares memory with q, expected...pass a copy"
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
        "attention(q, k, v, window=256)",
        TypeError,
        "window: got 256 (int), expected a tuple (left, ",
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
        "attention(q, k, v, return_lse='x')", TypeError, "return_lse: got str, expected a bool"
    ),
    Mistake(
        "attention_vjp(q, k, v, return_lse=1)", TypeError, "return_lse: got int, expected a bool"
    ),
    Mistake(
        "attention_vjp(q, k, v, deterministic=None)",
        TypeError,
        "deterministic: got NoneType, expected a bool",
    ),
    Mistake("plan(attention, q, k, v, return_lse=1)", TypeError, "return_lse: got int, expected"),
    Mistake(
        "attention_backward(out, q, k, v, out, lse, want_dbias=True)",
        ValueError,
        "want_dbias: got True, but bias is None; pass the bias or drop want_dbias",
    ),
    Mistake(
        "attention(q, k, v, mask=np.ones((2, 7), bool))",
        NotImplementedError,
        "mask: got a ndarray of shape (2, 7)...looks like a padding mask...SeqLayout.from_padding_mask(mask)",
    ),
    Mistake(
        "attention(q, k, v, mask=[True])", TypeError, "mask: got [True] (list), expected an array"
    ),
]

LENGTHS = [
    Mistake(
        "attention(q, k, v, seqs=[0, 5, 10])",
        TypeError,
        "seqs: got list, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=[0, 5, 10]), of lengths "
        "rawattn.SeqLayout.from_lengths(",
    ),
    Mistake(
        "attention(packed, packed, packed, seqs=np.array([0, 5, 10]))",
        TypeError,
        "seqs: got ndarray, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=cu_seqlens), of lengths "
        "rawattn.SeqLayout.from_lengths(",
    ),
    Mistake(
        "attention_vjp(packed, longer, longer, seqs=(np.array([0, 10]), np.array([0, 14])))",
        TypeError,
        "seqs: got tuple, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=..., seqstart_k=...)",
    ),
    Mistake(
        "attention_backward(packed, packed, packed, packed, packed, lse, seqs=list(range(100)))",
        TypeError,
        "seqs: got list, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=...), of lengths",
    ),
    Mistake(
        "attention(q, k, v, seqs={'seqlen_k': [3, 7]})",
        TypeError,
        "seqs: got dict, expected a SeqLayout or None; write rawattn.SeqLayout(**seqs)",
    ),
    Mistake(
        "plan(attention, q, k, v, seqs=np.ones((2, 7), bool))",
        TypeError,
        "seqs: got ndarray, expected a SeqLayout...rawattn.SeqLayout.from_padding_mask(mask)",
    ),
    Mistake(
        "attention(q, k, v, seqs=7)",
        TypeError,
        "seqs: got int, expected a SeqLayout or None; dense sequences of equal lengths need none",
    ),
    Mistake(
        "rawattn.reference.attention(packed, packed, packed, seqs=[0, 5, 10])",
        TypeError,
        "seqs: got list, expected a SeqLayout...write rawattn.SeqLayout(seqstart_q=[0, 5, 10])",
    ),
    Mistake(
        "attention(q, k, v, seqs=SeqLayout(seqstart_q=[0, 5, 10]))",
        ValueError,
        "seqs: got seqstart_q, which is for a packed q...expected lengths alone: seqlen_*",
    ),
    Mistake(
        "attention(packed, longer, longer, seqs=SeqLayout(seqstart_q=[0, 5, 10]))",
        ValueError,
        "seqstart_k: got None...q has 10 rows and k has 14; pass seqstart_k",
    ),
    Mistake(
        "attention(packed, packed, packed, seqs=SeqLayout(seqstart_q=[0, 5, 11]))",
        ValueError,
        "seqstart_q: got an end of 11, expected at most 10, the rows of q",
    ),
    Mistake(
        "attention(q, k, v, seqs=SeqLayout(seqlen_k=[7, 7, 7]))",
        ValueError,
        "seqs: got lengths of 3 sequences, expected 2, the batch of q",
    ),
    Mistake(
        "attention(q, k, v, seqs=SeqLayout(seqlen_k=[7, 8]))",
        ValueError,
        "seqlen_k: got length 8 for sequence 1, expected at most 7, the rows of k",
    ),
    Mistake(
        "SeqLayout(cu_seqlens_q=[0, 5, 10])",
        TypeError,
        "cu_seqlens_q: SeqLayout has no such argument; write seqstart_q=",
    ),
    Mistake(
        "SeqLayout(lengths=[5, 5])",
        TypeError,
        "lengths: SeqLayout has no such argument; write seqlen_q= and seqlen_k=, or SeqLayout.from_lengths(",
    ),
    Mistake(
        "SeqLayout(seqlens_kk=[5, 5])",
        TypeError,
        "seqlens_kk: SeqLayout has no such argument; did you mean seqlen_k=",
    ),
    Mistake("SeqLayout(seqlen_k=7)", TypeError, "seqlen_k: got the int 7, expected...[7] * batch"),
    Mistake(
        "SeqLayout(seqstart_q=10)", TypeError, "seqstart_q: got the int 10, expected...[0, 10]"
    ),
    Mistake(
        "SeqLayout(seqlen_q=[5.0, 5.0])",
        TypeError,
        "seqlen_q: got float64; accepted are int32 and int64 arrays and lists of int",
    ),
    Mistake(
        "SeqLayout(seqlen_q=[5, -1])", ValueError, "seqlen_q: got -1 (index 1), expected lengths"
    ),
    Mistake(
        "SeqLayout(seqstart_q=[0, 10, 5])",
        ValueError,
        "seqstart_q: got 5 after 10 (index 2), expected offsets that do not decrease",
    ),
    Mistake(
        "SeqLayout(seqstart_k=[0, 5])",
        ValueError,
        "seqstart_k: got it without seqstart_q, expected both",
    ),
    Mistake(
        "SeqLayout(seqstart_q=[0, 5, 10], max_seqlen_q=4)",
        ValueError,
        "max_seqlen_q: got 4, expected at least 5, the longest",
    ),
    Mistake(
        "SeqLayout.from_padding_mask(np.array([[1, 1, 0]]))",
        TypeError,
        "mask_q: got dtype int64, expected bool...pass mask_q != 0",
    ),
    Mistake(
        "SeqLayout.from_padding_mask(np.array([[False, True]]))",
        ValueError,
        "mask_q: got row 0 with padding at position 0...expected padding after...pad on the right",
    ),
]

TORCH = [
    Mistake(
        "attention(t.requires_grad_(), t, t)",
        RuntimeError,
        "q: got a tensor that requires a gradient...rawattn.torch.attention, or pass q.detach()",
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
        "q: got a JAX tracer; call rawattn.jax.attention, which works inside jit, grad, vmap and scan",
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
        "backend: rawattn.jax.attention has no such argument; accepted are q, k, v, ",
    ),
    Mistake("attention(n, n, n, out=n)", ValueError, "out: got a read-only array; pass a writable"),
    Mistake(
        "attention(n, n, n, precision='high')", TypeError, "precision: ...accepted are q, k, v"
    ),
    Mistake(
        "rawattn.jax.attention(t, n, n)",
        TypeError,
        "q: got ...list; accepted are JAX arrays, traced or not, and NumPy arrays",
    ),
]

COMMANDS = [
    ("inof", "argument COMMAND: invalid choice: 'inof' ...info"),
    ("check --backend gpu", "argument --backend: invalid choice: 'gpu' ...cuda...cpu"),
    ("demo --pairs x", "argument --pairs: got x, expected a whole number, at least 1"),
    ("demo --pairs 0", "argument --pairs: got 0, expected a whole number, at least 1"),
    (
        "demo --text no/such",
        "--text no/such: No such file...expected a file of UTF-8 text, or - for",
    ),
    ("compile --jobs two", "argument --jobs: got two, expected a whole number, at least 1"),
    ("compile --arch sm_12", "--arch: got sm_12, expected one of sm_80, ...sm_90a"),
    ("bench --suite fast", "argument --suite: invalid choice: 'fast' ...forward"),
    ("bench --peers FA9", "argument --peers: got FA9; accepted are cuDNN, "),
    ("bench --repeats 1.5", "argument --repeats: got 1.5, expected a whole number, at least 1"),
    ("bench --burst long", "argument --burst: got long, expected seconds, above 0 and up to 10"),
    ("bench --budget none", "argument --budget: got none, expected a number of seconds"),
    ("bench --list --filter zebra", "--filter: no case has the words 'zebra'; --list without it"),
    ("bench --from no/such.json", "--from no/such.json: No such file...that --json has written"),
]


def pattern(says: str) -> str:
    return "^" + ".*".join(map(re.escape, says.split("...")))


def check(mistake: Mistake, names: dict[str, Any]) -> None:
    with pytest.raises(mistake.error) as caught:
        eval(mistake.code, names)
    message = str(caught.value)
    assert re.search(pattern(mistake.says), message)
    assert "\n" not in message
    assert len(message) < 450


@pytest.mark.parametrize("mistake", [*KEYWORDS, *ARRAYS, *OPTIONS, *LENGTHS], ids=str)
def test_calls(mistake: Mistake) -> None:
    check(mistake, names())


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
    check(mistake, {**names(), "jax": jax, "n": n, "t": [1.0]})


@pytest.mark.parametrize(("command", "says"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands(
    command: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(tmp_path))
    try:
        status = cli.main(command.split())
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr()
    assert status != 0
    assert shown.out == ""
    message = shown.err.strip().splitlines()[-1]
    assert re.match(r"rawattn( \w+)?: (error: )?", message)
    assert re.search(pattern(says).removeprefix("^"), message)


def test_there_are_sixty() -> None:
    listed = [*KEYWORDS, *ARRAYS, *OPTIONS, *LENGTHS, *TORCH, *JAX]
    assert len({mistake.code for mistake in listed} | {command for command, _ in COMMANDS}) >= 60


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
