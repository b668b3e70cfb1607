"""The shapes that the suites `forward` and `backward` measure, and the names of peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rawattn._bench.cases import Case

CUDNN, FA2, FA4, JAX = "cuDNN", "FA2", "FA4", "JAX cuDNN"
EFFICIENT, FLEX, FSA = "efficient", "FlexAttention", "flash-sparse-attn"  # for the suite scores
FA4_PAGED, FLASHINFER = "FA4 paged", "FlashInfer"  # for the suites decode and prefill
# The module that each peer is imported from.
MODULES = {
    CUDNN: "torch",
    FA2: "torch",
    FA4: "flash_attn.cute",
    JAX: "jax",
    EFFICIENT: "torch",
    FLEX: "torch",
    FSA: "flash_sparse_attn",
    FA4_PAGED: "flash_attn.cute",
    FLASHINFER: "flashinfer",
}
PEERS = tuple(MODULES)
DETERMINISTIC = "deterministic"  # ours, shown beside our default backward

_MHA, _GQA = (16, 16), (32, 8)


def forward(quick: bool = False) -> list[Case]:
    """Cases: dense, ragged, one long sequence among short ones, and a sliding window."""
    dense = []
    for case in _dense(1024, 2048, 4096, 16384):
        seqlen = case.seqlens[0]
        # JAX calls the same cuDNN as torch and compiles slowly, so it is measured at one length.
        peers = (CUDNN, FA2, FA4, JAX) if seqlen == 4096 else (CUDNN, FA2, FA4)
        dense.append(replace(case, peers=peers, priority=0 if seqlen >= 4096 else 2))
    ragged = []
    for heads in (_MHA, _GQA):
        for causal in (True, False):
            pair, base = _ragged(heads, causal)
            ragged += [replace(pair, peers=(FA4,)), base]
    return _quick([*dense, *ragged, *_straggler(), *_window()], quick)


def backward(quick: bool = False) -> list[Case]:
    """Cases: dense with seqlens 4096 and 16384, and ragged over dense, for MHA and GQA."""
    all_peers = (CUDNN, FA2, FA4)
    cases = [replace(case, peers=all_peers, deterministic=True) for case in _dense(4096, 16384)]
    for heads in (_MHA, _GQA):
        for causal in (True, False):
            # FA4 compiles each of these for seconds, so those that the figures do not need come last.
            priority = 0 if heads == _MHA else 1 if causal else 2
            pair, base = _ragged(heads, causal)
            cases += [
                replace(pair, peers=(FA2, FA4), deterministic=True, priority=priority),
                replace(base, peers=all_peers, priority=priority),
            ]
    return _quick([replace(case, backward=True) for case in cases], quick)


def _quick(cases: list[Case], quick: bool) -> list[Case]:
    def wanted(case: Case) -> bool:
        dense = case.kind == "dense" and case.headdim != 256 and case.label == "S4096"
        return dense or (case.kind.startswith("ragged") and case.nheads_kv == 16)

    return [case for case in cases if wanted(case) or not quick]


def _dense(*seqlens: int) -> list[Case]:
    """16384 tokens in sequences of equal length, with heads x D = 2048."""
    return [
        Case(
            "dense",
            f"S{seqlen}",
            (seqlen,) * (16384 // seqlen),
            nheads_q=2048 // headdim,
            nheads_kv=2048 // headdim,
            headdim=headdim,
            causal=causal,
        )
        for headdim in (64, 128, 256)
        for causal in (True, False)
        for seqlen in seqlens
    ]


def _ragged(heads: tuple[int, int], causal: bool) -> tuple[Case, Case]:
    """A packed batch of lengths uniform in 64..4096, about 33k tokens, and a dense one of about as many, in seqlens of 2048."""
    seqlens = tuple(map(int, np.random.default_rng(2).integers(64, 4097, size=16)))
    label = f"H{heads[0]}/{heads[1]}"
    dense = _d128("ragged-ref", f"{label} B16 S2048", (2048,) * 16, heads, causal)
    more: dict[str, Any] = {"packed": True, "over": dense.name}
    return _d128("ragged", label, seqlens, heads, causal, **more), dense


def _straggler() -> list[Case]:
    """One sequence of 16384 and 512 of 32. The time should be that of the long sequence alone."""
    alone = _d128("straggler-ref", "1x16384", (16384,), packed=True)
    lengths = (16384, *(32,) * 512)
    more: dict[str, Any] = {"packed": True, "over": alone.name, "by_time": True}
    return [_d128("straggler", "1x16384+512x32", lengths, **more), alone]


def _window() -> list[Case]:
    more: dict[str, Any] = {"window_left": 1024, "peers": (FA4, JAX), "priority": 1}
    return [_d128("window", "S16384 left1024", (16384,) * 2, **more)]


def _d128(
    kind: str,
    label: str,
    seqlens: tuple[int, ...],
    heads: tuple[int, int] = _MHA,
    causal: bool = True,
    **more: Any,
) -> Case:
    return Case(kind, label, seqlens, *heads, 128, causal, **more)
