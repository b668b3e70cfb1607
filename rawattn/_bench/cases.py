"""The shapes that are measured."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from rawattn._bench import counters

CUDNN, FA2, FA4, JAX = "cuDNN", "FA2", "FA4", "JAX cuDNN"
PEERS = (CUDNN, FA2, FA4, JAX)


@dataclass(frozen=True)
class Case:
    """One attention call. Self-attention: every sequence has as many keys as queries."""

    kind: str  # dense, ragged, ...: rows that belong together
    label: str
    seqlens: tuple[int, ...]
    nheads_q: int
    nheads_kv: int
    headdim: int
    causal: bool
    packed: bool = False  # group mode; else batch mode, all seqlens the same
    window_left: int | None = None
    peers: tuple[str, ...] = ()
    # The case of the same suite that this one is divided by, and whether by FLOP/s or by time.
    over: str | None = None
    by_time: bool = False
    # A spent budget costs the cases of the highest number.
    priority: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} D{self.headdim} {self.label} {'causal' if self.causal else 'full'}"

    @property
    def tokens(self) -> int:
        return sum(self.seqlens)

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        return None if self.window_left is None else (self.window_left, None)

    @functools.cached_property
    def visible(self) -> counters.Visible:
        total = np.zeros(3, int)
        for length, times in Counter(self.seqlens).items():
            one = counters.visible(length, length, causal=self.causal, window=self.window)
            total += times * np.array(astuple(one))
        return counters.Visible(*total.tolist())

    @property
    def flops(self) -> int:
        return counters.forward_flops(self.visible.pairs, self.nheads_q, self.headdim, self.headdim)

    def nbytes(self, itemsize: int) -> int:
        heads = (self.nheads_q, self.nheads_kv, self.headdim, self.headdim)
        return counters.forward_bytes(self.visible, self.tokens, *heads, itemsize)


def select(cases: list[Case], words: str) -> list[Case]:
    """Cases whose name has all these words, and the cases that those are divided by."""
    wanted = {case.name for case in cases if set(words.split()) <= set(case.name.split())}
    wanted |= {case.over for case in cases if case.name in wanted and case.over}
    return [case for case in cases if case.name in wanted]


def forward(quick: bool = False) -> list[Case]:
    """Dense, ragged, one long sequence among short ones, a window."""
    cases = [*_dense(), *_ragged(), *_straggler(), *_window()]
    return [case for case in cases if not quick or _is_quick(case)]


def _is_quick(case: Case) -> bool:
    dense = case.kind == "dense" and case.headdim != 256 and case.label == "S4096"
    return dense or (case.kind.startswith("ragged") and case.nheads_kv == 16)


def _dense() -> list[Case]:
    """16384 tokens in sequences of one length, heads x D = 2048."""
    return [
        Case(
            "dense",
            f"S{seqlen}",
            (seqlen,) * (16384 // seqlen),
            nheads_q=2048 // headdim,
            nheads_kv=2048 // headdim,
            headdim=headdim,
            causal=causal,
            # JAX's cuDNN is torch's behind another door, and slow to compile: one length tells.
            peers=PEERS if seqlen == 4096 else (CUDNN, FA2, FA4),
            priority=0 if seqlen >= 4096 else 2,
        )
        for headdim in (64, 128, 256)
        for causal in (True, False)
        for seqlen in (1024, 2048, 4096, 16384)
    ]


def _ragged() -> list[Case]:
    """Lengths uniform in 64..4096, about 33k tokens, and about as many in sequences of 2048."""
    seqlens = tuple(map(int, np.random.default_rng(2).integers(64, 4097, size=16)))
    cases = []
    for heads in ((16, 16), (32, 8)):
        for causal in (True, False):
            label = f"H{heads[0]}/{heads[1]}"
            dense = _d128("ragged-ref", f"{label} B16 S2048", (2048,) * 16, heads, causal)
            more: dict[str, Any] = {"packed": True, "peers": (FA4,), "over": dense.name}
            cases += [_d128("ragged", label, seqlens, heads, causal, **more), dense]
    return cases


def _straggler() -> list[Case]:
    """One sequence of 16384 beside 512 of 32: the time should be that of the long one."""
    alone = _d128("straggler-ref", "1x16384", (16384,), packed=True)
    crowd = (16384, *(32,) * 512)
    more: dict[str, Any] = {"packed": True, "over": alone.name, "by_time": True}
    return [_d128("straggler", "1x16384+512x32", crowd, **more), alone]


def _window() -> list[Case]:
    more: dict[str, Any] = {"window_left": 1024, "peers": (FA4, JAX), "priority": 1}
    return [_d128("window", "S16384 left1024", (16384,) * 2, **more)]


def _d128(
    kind: str,
    label: str,
    seqlens: tuple[int, ...],
    heads: tuple[int, int] = (16, 16),
    causal: bool = True,
    **more: Any,
) -> Case:
    return Case(kind, label, seqlens, *heads, 128, causal, **more)
