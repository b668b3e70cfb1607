"""Calls that type checkers must accept or reject. mypy reads this file; nothing runs it.

mypy reports an unused `ignore` as an error, so each `ignore` marks a mistake that mypy has to find.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import rawattn
import rawattn.jax
import rawattn.torch
from rawattn import Gradients, SeqLayout

Half = NDArray[np.float16]


class Tensor:
    """A tensor of a framework whose types rawattn does not know."""


def results_are_of_the_type_of_q(x: Half, t: Tensor, wanted: bool) -> None:
    assert_type(rawattn.attention(x, x, x), Half)
    assert_type(rawattn.attention(t, x, x, causal=True), Tensor)
    assert_type(rawattn.attention(x, x, x, return_lse=False), Half)
    assert_type(rawattn.attention(t, t, t, return_lse=True), tuple[Tensor, Any])
    assert_type(rawattn.attention(t, t, t, return_lse=wanted), Tensor | tuple[Tensor, Any])


def every_option(x: Half) -> None:
    seqs = SeqLayout(seqlen_k=[3], max_seqlen_k=4)
    rawattn.attention(
        x, x, x, seqs=seqs, causal=True, align="top-left", window=(3, None), sink=1, scale=0.5, bias=x, mask=x,
        alibi_slopes=x, softcap=3.0, score_mod=None, sink_logits=x, dropout_p=0.1, seed=np.array([1]), num_splits=1,
        out=x, backend="cpu",
    )  # fmt: skip


def mistakes_of_a_call(x: Half) -> None:
    rawattn.attention(x, x, x, is_causal=True)  # type: ignore[call-overload]
    rawattn.attention(x, x, x, align="middle")  # type: ignore[call-overload]
    rawattn.attention(x, x, x, window=(1,))  # type: ignore[arg-type]
    rawattn.attention(x, x, x, backend="tpu")  # type: ignore[call-overload]
    rawattn.attention(x, x, x, seqs=[0, 3])  # type: ignore[call-overload]
    rawattn.attention(x, x)  # type: ignore[call-overload]


def pages(t: Tensor, x: Half, wanted: bool) -> None:
    assert_type(rawattn.paged_attention(t, t, t, t, seqlen_k=[3]), Tensor)
    given = rawattn.paged_attention(x, x, x, ([0, 1], [2]), seqlen_k=t, return_lse=True, sink=1)
    assert_type(given, tuple[Half, Any])
    either = rawattn.paged_attention(t, t, t, t, seqlen_k=t, return_lse=wanted, validate=True)
    assert_type(either, Tensor | tuple[Tensor, Any])
    rawattn.paged_attention(x, x, x, x)  # type: ignore[call-overload]
    rawattn.paged_attention(x, x, x, x, seqlen_k=x, page_size=16)  # type: ignore[call-overload]


def names(x: Half) -> None:
    rawattn.atention(x, x, x)  # type: ignore[attr-defined]
    rawattn.torch.attention_vjp(x, x, x)  # type: ignore[attr-defined]
    rawattn.jax.flash_attention(x, x, x)  # type: ignore[attr-defined]
    rawattn.reference.attention_vjp(x, x, x)  # type: ignore[attr-defined]


def modules(t: Tensor, x: Half, wanted: bool) -> None:
    """`rawattn.attention` of a framework, and the reference."""
    assert_type(rawattn.torch.attention(t, t, t, deterministic=True, window=(1, 0)), Tensor)
    assert_type(rawattn.torch.attention(t, t, t, return_lse=True), tuple[Tensor, Any])
    either = rawattn.torch.attention(t, t, t, return_lse=wanted, backend="cpu", out=t)
    assert_type(either, Tensor | tuple[Tensor, Any])
    rawattn.torch.attention(t, t, t, is_causal=True)  # type: ignore[call-overload]
    assert_type(rawattn.jax.attention(t, t, t, deterministic=True, window=(1, 0)), Tensor)
    assert_type(rawattn.jax.attention(t, t, t, return_lse=True), tuple[Tensor, Any])
    assert_type(rawattn.jax.attention(t, t, t, return_lse=wanted), Tensor | tuple[Tensor, Any])
    rawattn.jax.attention(t, t, t, out=t)  # type: ignore[call-overload]
    out, lse = rawattn.reference.attention(x, x, x, return_lse=True, causal=True)
    assert_type(out, NDArray[Any])
    assert_type(lse, NDArray[np.float64])
    assert_type(rawattn.reference.attention(x, x, x, out=x), NDArray[Any])
    rawattn.reference.attention(x, x, x, is_causal=True)  # type: ignore[call-overload]


def a_layout() -> None:
    SeqLayout(cu_seqlens_q=[0, 3])  # type: ignore[call-arg]


def the_backward(x: Half) -> None:
    assert_type(rawattn.attention_backward(x, x, x, x, x, x, causal=True), Gradients)
    rawattn.attention_backward(x, x, x, x, x, x, softmax_scale=1.0)  # type: ignore[call-arg]
    rawattn.attention_backward(x, x, x, x, x, x, into=(x, x, x))  # type: ignore[arg-type]


def a_vjp(t: Tensor, wanted: bool) -> None:
    out, backward = rawattn.attention_vjp(t, t, t, causal=True, deterministic=True)
    assert_type(out, Tensor)
    assert_type(backward(t, dlse=t, into=Gradients(dq=t)), Gradients)
    assert_type(rawattn.attention_vjp(t, t, t, return_lse=True)[0], tuple[Tensor, Any])
    assert_type(rawattn.attention_vjp(t, t, t, return_lse=wanted)[0], Tensor | tuple[Tensor, Any])
    assert_type(rawattn.attention_vjp(t, t, t, num_splits=2, out=t)[0], Tensor)
    rawattn.attention_vjp(t, t, t, softmax_scale=1.0)  # type: ignore[call-overload]
    rawattn.attention_vjp(t, t, t, causal="yes")  # type: ignore[call-overload]
    backward(t, deterministic=True)  # type: ignore[call-arg]
