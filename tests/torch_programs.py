"""Checks of torch.compile programs on every device: layouts made inside a program, and code that cannot be traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import rawattn
import rawattn.torch
from rawattn import SeqLayout

ROWS = 10
_LENGTHS = [3, 7]  # lengths of two sequences, which fill the packed rows
_HOST = np.array(_LENGTHS)

Layout = Callable[[Any], SeqLayout]

PACKED: dict[str, Layout] = {
    "starts": lambda n: SeqLayout(
        seqstart_q=torch.cat([n.new_zeros(1), n.cumsum(0)]), max_seqlen_q=7, max_seqlen_k=7
    ),
    "starts-of-a-list": lambda n: SeqLayout(seqstart_q=[0, 3, 10]),
    "from-lengths": SeqLayout.from_lengths,
    "from-lengths-of-both": lambda n: SeqLayout.from_lengths(n, lengths_k=n, max_seqlen_q=ROWS),
    "positions-packed": lambda n: SeqLayout(seqstart_q=[0, 3, 10], position_q=n, position_k=[0, 9]),
    "from-lengths-of-a-list": lambda n: SeqLayout.from_lengths(_LENGTHS),
}
PADDED: dict[str, Layout] = {
    "lengths": lambda n: SeqLayout(seqlen_q=n, seqlen_k=n),
    "lengths-int32": lambda n: SeqLayout(seqlen_q=n.int(), seqlen_k=n.int(), max_seqlen_k=7),
    "lengths-of-lists": lambda n: SeqLayout(seqlen_q=_LENGTHS, seqlen_k=_LENGTHS),
    "lengths-of-numpy": lambda n: SeqLayout(seqlen_q=_HOST, seqlen_k=_HOST),
    "from-padding-mask": lambda n: SeqLayout.from_padding_mask(
        torch.arange(ROWS, device=n.device) < n[:, None]
    ),
    "positions": lambda n: SeqLayout(position_q=n, position_k=n.new_zeros(2)),
    "cumulative": lambda n: SeqLayout(
        cu_seqlen_q=torch.cat([n.new_zeros(1), n.cumsum(0)]), seqlen_k=n
    ),
}
LAYOUTS = {**PACKED, **PADDED}


def _arrays(packed: bool, device: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(2, ROWS, 4, 16, device=device)
    return x[0] if packed else x, torch.tensor(_LENGTHS, device=device)


def _gradient(run: Callable[..., Any], x: Any, *others: Any) -> tuple[Any, Any]:
    x = x.clone().requires_grad_()
    out = run(x, *others)
    out.square().sum().backward()
    return out.detach(), x.grad


def verify_made_inside(name: str, device: str, *, fullgraph: bool, dynamic: bool) -> None:
    """Check forward and backward of a program that makes its own layout against the same code without torch.compile."""
    make = LAYOUTS[name]
    x, lengths = _arrays(name in PACKED, device)

    def run(x: Any, lengths: Any) -> Any:
        return rawattn.torch.attention(x, x.cos(), x, seqs=make(lengths), causal=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=fullgraph, dynamic=dynamic)
    for got, exact in zip(_gradient(compiled, x, lengths), _gradient(run, x, lengths), strict=True):
        torch.testing.assert_close(got, exact)


def verify_exported(name: str, device: str, *, strict: bool) -> None:
    make = LAYOUTS[name]
    x, lengths = _arrays(name in PACKED, device)

    class Model(torch.nn.Module):
        def forward(self, x: Any, lengths: Any) -> Any:
            return rawattn.torch.attention(x, x.cos(), x, seqs=make(lengths), causal=True)

    program = torch.export.export(Model(), (x, lengths), strict=strict).module()
    torch.testing.assert_close(program(x * 2, lengths), Model()(x * 2, lengths))


def verify_modes(device: str) -> None:
    """Check that dispatch modes see the operator, forward and backward, and that fake tensors get shapes."""
    x, _ = _arrays(False, device)

    def run(x: Any) -> Any:
        return rawattn.torch.attention(x, x.cos(), x, causal=True)

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(run, tracing_mode=mode)(x)
        torch.testing.assert_close(graph(x * 2), run(x * 2))
    with FakeTensorMode():
        fake = torch.randn(2, ROWS, 4, 16, device=device, requires_grad=True)
        out = run(fake)
        out.sum().backward()
        assert out.shape == fake.grad.shape == x.shape and fake.grad.device == x.device
    with FlopCounterMode(display=False):
        for got, exact in zip(_gradient(run, x), _gradient(run, x), strict=True):
            torch.testing.assert_close(got, exact)
        out = rawattn.torch.attention(x, x, x, out=(into := torch.empty_like(x)))
    assert out is into


def verify_given(device: str) -> None:
    """Check that a program compiles once for layouts of tensors that were made outside it."""
    x, lengths = _arrays(False, device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def run(x: Any, seqs: SeqLayout) -> Any:
        return rawattn.torch.attention(x, x.cos(), x, seqs=seqs)

    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for n in (lengths, lengths + 2, lengths - 3):
        seqs = SeqLayout(seqlen_q=n, seqlen_k=n)
        for got, exact in zip(_gradient(compiled, x, seqs), _gradient(run, x, seqs), strict=True):
            torch.testing.assert_close(got, exact)
    assert counter.frame_count == 1


REFUSED: dict[str, tuple[Layout, str]] = {
    "bool": (
        lambda n: SeqLayout.from_lengths(n > 3),
        r"lengths_q: got bool; accepted are int32 and int64 .* lengths_q\.to\(torch\.int32\)",
    ),
    "int16": (lambda n: SeqLayout.from_lengths(n, n.short()), "lengths_k: got int16; accepted"),
    "axes": (lambda n: SeqLayout.from_lengths(n[None]), r"lengths_q: got shape \(1, 2\), expected"),
    "mask-int64": (
        lambda n: SeqLayout.from_padding_mask(n[:, None] * 2),
        "mask_q: got dtype int64, expected bool, True for a real token; pass mask_q != 0 where",
    ),
    "mask-axes": (lambda n: SeqLayout.from_padding_mask(n > 3), r"mask_q: got shape \(2,\)"),
    "mask-of-lists": (
        lambda n: SeqLayout.from_padding_mask([[True] * ROWS] * 2),
        r"mask_q: got list; expected an array of bool \(batch, seqlen\)",
    ),
}


def verify_refused(name: str, device: str) -> None:
    """Check that a program refuses wrong dtypes and shapes with the same message as eager mode."""
    make, words = REFUSED[name]
    x, lengths = _arrays(False, device)

    def run(x: Any, lengths: Any) -> Any:
        return rawattn.torch.attention(x, x, x, seqs=make(lengths))

    for call in (run, torch.compile(run, backend="eager", fullgraph=True)):
        with pytest.raises(Exception, match=words):
            call(x, lengths)


def verify_taken_outside(device: str) -> None:
    """Check that a layout returned by the program that made it is like any other."""
    x, lengths = _arrays(False, device)

    def run(x: Any, lengths: Any) -> tuple[Any, SeqLayout]:
        seqs = SeqLayout(seqlen_q=lengths, seqlen_k=lengths, max_seqlen_k=ROWS)
        return rawattn.torch.attention(x, x, x, seqs=seqs), seqs

    out, seqs = torch.compile(run, backend="eager", fullgraph=True)(x, lengths)
    exact = SeqLayout(seqlen_q=lengths, seqlen_k=lengths, max_seqlen_k=ROWS)
    for made in (seqs, copy.deepcopy(seqs)):
        assert repr(made) == repr(exact)
        assert (made.batch, made.packed, made.max_seqlen_q, made.max_seqlen_k) == (
            2,
            False,
            None,
            ROWS,
        )
        torch.testing.assert_close(rawattn.attention(x, x, x, seqs=made), out)
    with pytest.raises(AttributeError, match="no attribute 'lengths'"):
        getattr(seqs, "lengths")  # noqa: B009


def verify_read_inside(device: str) -> None:
    """Check the attributes that a program may read of a layout that it has made."""
    x, lengths = _arrays(False, device)

    def run(x: Any, lengths: Any) -> Any:
        seqs = SeqLayout(seqlen_q=lengths, seqlen_k=lengths, max_seqlen_q=ROWS)
        assert seqs.seqstart_q is None and not seqs.packed and seqs.max_seqlen_k is None
        return x * seqs.batch + seqs.max_seqlen_q + seqs.seqlen_q.sum()

    torch.testing.assert_close(
        torch.compile(run, backend="eager", fullgraph=True)(x, lengths),
        x * 2 + ROWS + lengths.sum(),
    )


def _paged(x: Any, lengths: Any) -> Any:
    pages = x.new_ones(6, 16, 4, 16)
    table = torch.tensor([[0, 1], [2, 3]], device=x.device)
    rawattn.append_kv(x[:, :1], x[:, :1], pages, pages * 2, table, seqlen_k=lengths)
    return rawattn.paged_attention(x, pages, pages, table, seqlen_k=lengths)


def _planned(x: Any, lengths: Any) -> Any:
    plan = rawattn.plan(rawattn.attention, x, x, x)
    return plan(x, x, x) + plan(q=x, k=x, v=x)


def _captured(x: Any, lengths: Any) -> Any:
    mod = rawattn.ScoreMod("score * factor[head]", factor=x.new_ones(4) * 2)
    return rawattn.torch.attention(x, x, x, score_mod=mod)


UNTRACED: dict[str, Callable[[Any, Any], Any]] = {
    "attention": lambda x, n: rawattn.attention(x, x, x, causal=True),
    "lse": lambda x, n: rawattn.attention(x, x, x, return_lse=True)[1],
    "layout": lambda x, n: rawattn.attention(
        x, x, x, seqs=SeqLayout(seqlen_q=n, seqlen_k=n), window=(3, 1)
    ),
    "mask": lambda x, n: rawattn.attention(x, x, x, mask=torch.ones(10, 10, device=x.device) > 0),
    "backward": lambda x, n: (
        rawattn.attention_backward(x, x, x, x, *rawattn.attention(x, x, x, return_lse=True)).dq
    ),
    "vjp": lambda x, n: rawattn.attention_vjp(x, x, x)[1](x).dk,
    "paged": _paged,
    "combine": lambda x, n: rawattn.combine([x, x], [x.new_ones(2, 4, 10)] * 2)[0],
    "plan": _planned,
    "score-mod": _captured,
    "block-mask": lambda x, n: rawattn.torch.attention(
        x, x, x, mask=rawattn.block_mask(predicate="q_idx > kv_idx - 2", seqlen_q=10, seqlen_k=10)
    ),
    "topk-mask": lambda x, n: rawattn.torch.attention(
        x, x, x, mask=rawattn.topk_mask(x[0, 0, 0, :10].expand(1, 1, 1, 10), 3)
    ),
}


def verify_untraced(name: str, device: str) -> None:
    """Check that a program has a graph break at untraceable code, and that fullgraph=True raises an error naming the remedy."""
    run = UNTRACED[name]
    x, lengths = _arrays(False, device)

    def whole(x: Any, lengths: Any) -> Any:
        return run(x.sin(), lengths).cos()

    exact = whole(x, lengths)
    broken = torch.compile(whole, backend="eager")
    for _ in range(3):  # repeated calls take other paths
        torch.testing.assert_close(broken(x, lengths), exact)
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"call rawattn\.torch\.attention, with"
    ):
        torch.compile(whole, backend="eager", fullgraph=True)(x, lengths)
