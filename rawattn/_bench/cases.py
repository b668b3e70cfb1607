"""A case: one attention call that is measured."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import astuple, dataclass

import numpy as np

from rawattn._bench import counters
from rawattn._bench.report import Bound
from rawattn._bench.score_features import PLAIN, Feature


@dataclass(frozen=True)
class Case:
    """One attention call, or its backward. Every sequence has as many keys as queries unless `seqlen_k` is given."""

    kind: str  # dense, ragged, ...: groups the rows of a report
    label: str
    seqlens: tuple[int, ...]
    nheads_q: int
    nheads_kv: int
    headdim: int
    causal: bool
    packed: bool = False  # group mode; else batch mode, with equal seqlens
    window_left: int | None = None
    backward: bool = False  # measure the backward alone
    peers: tuple[str, ...] = ()
    deterministic: bool = False  # measure the deterministic backward too
    # The case of the same suite over which this one's ratio is taken, and whether that is of times or of FLOP/s.
    over: str | None = None
    by_time: bool = False
    # Cases run in this order, so those with the highest number lose their peers first when the budget is spent.
    priority: int = 0
    seqlen_k: int | None = None  # keys of every sequence
    feature: Feature = PLAIN
    bounds: tuple[Bound, ...] = ()
    panel: str = ""  # of the plot

    @property
    def name(self) -> str:
        return f"{self.kind} D{self.headdim} {self.label} {'causal' if self.causal else 'full'}"

    @property
    def tokens(self) -> int:
        return sum(self.seqlens)

    @property
    def batch(self) -> int:
        return len(self.seqlens)

    @property
    def rows(self) -> int:
        """Queries of a sequence, if all have as many."""
        return self.seqlens[0]

    @property
    def keys(self) -> int:
        """Keys of a sequence, if all have as many."""
        return self.rows if self.seqlen_k is None else self.seqlen_k

    @property
    def tokens_k(self) -> int:
        return self.tokens if self.seqlen_k is None else self.batch * self.seqlen_k

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, k and v, and for a backward of dout."""
        q = (self.tokens,) if self.packed else (self.batch, self.rows)
        k = (self.tokens_k,) if self.packed else (self.batch, self.keys)
        q, k = (*q, self.nheads_q, self.headdim), (*k, self.nheads_kv, self.headdim)
        return (q, k, k, q) if self.backward else (q, k, k)

    @property
    def ngradients(self) -> int:
        """The number of gradients: of q, k, v and of the feature's arrays."""
        return 3 + len(self.feature.gradients)

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        return None if self.window_left is None else (self.window_left, None)

    @functools.cached_property
    def visible(self) -> counters.Visible:
        total = np.zeros(3, int)
        for length, times in Counter(self.seqlens).items():
            keys = length if self.seqlen_k is None else self.seqlen_k
            one = self.feature.visible(length, keys, self.causal)
            if one is None:
                one = counters.visible(length, keys, causal=self.causal, window=self.window)
            total += times * np.array(astuple(one))
        return counters.Visible(*total.tolist())

    @property
    def flops(self) -> int:
        count = counters.backward_flops if self.backward else counters.forward_flops
        return count(self.visible.pairs, self.nheads_q, self.headdim, self.headdim)

    def nbytes(self, itemsize: int) -> int:
        heads = (self.nheads_q, self.nheads_kv, self.headdim, self.headdim)
        if self.backward:
            nbytes = counters.backward_bytes(
                self.visible, self.tokens, self.tokens_k, *heads, itemsize
            )
        else:
            nbytes = counters.forward_bytes(self.visible, self.tokens, *heads, itemsize)
        # The feature's array is read once; in a backward its gradient is written once.
        return nbytes + self.feature.elements * itemsize * (2 if self.backward else 1)


def select(cases: list[Case], words: str) -> list[Case]:
    """The cases whose names have all these words, and the cases named in their `over`."""
    wanted = {case.name for case in cases if set(words.split()) <= set(case.name.split())}
    wanted |= {case.over for case in cases if case.name in wanted and case.over}
    return [case for case in cases if case.name in wanted]
