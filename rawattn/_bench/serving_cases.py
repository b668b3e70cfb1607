"""Calls of serving that are measured: few new rows on many cached keys, each with its bound."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from rawattn._bench.counters import Visible, visible


@dataclass(frozen=True, slots=True)
class Serving:
    """New rows of sequences on what their caches hold, causal. page_size 0: keys lie in rows, all sequences alike."""

    name: str
    contexts: tuple[int, ...]  # keys of each sequence, the new rows' own among them
    nheads_q: int
    nheads_kv: int
    page_size: int = 0
    rows: int = 1  # new ones of each sequence
    headdim: int = 128
    window_left: int | None = None
    sink: int = 0
    float8: bool = False  # what pages hold
    masked: bool = False  # the first keys of a sequence are padding, up to an eighth of them
    biased: bool = False  # each head has numbers to add, as torch's attention takes them for a mask

    @property
    def batch(self) -> int:
        return len(self.contexts)

    @property
    def pages(self) -> int:
        """Of all sequences together."""
        return sum(-(-keys // self.page_size) for keys in self.contexts)

    @property
    def key_bytes(self) -> int:
        """Of keys and values that some row sees, in 16 bits or in 8."""
        keys = sum(times * self._visible(n).keys for n, times in Counter(self.contexts).items())
        return keys * self.nheads_kv * 2 * self.headdim * (1 if self.float8 else 2)

    @property
    def nbytes(self) -> int:
        """What must be read and written: keys and values once, queries and outputs."""
        return self.key_bytes + 2 * self.batch * self.rows * self.nheads_q * self.headdim * 2

    @property
    def new_bytes(self) -> int:
        """Of new rows on their way into pages, and of queries that turn beside them: read and written."""
        heads = self.nheads_q + 2 * self.nheads_kv
        return 2 * self.batch * self.rows * heads * self.headdim * 2

    def _visible(self, keys: int) -> Visible:
        window = None if self.window_left is None else (self.window_left, 0)
        return visible(self.rows, keys, causal=True, window=window, sink=self.sink)

    def in_pages(self, page_size: int) -> Serving:
        """The same, with keys in pages."""
        return replace(self, name=f"{self.name} page {page_size}", page_size=page_size)

    def in_float8(self) -> Serving:
        """The same, with pages that hold 8 bits."""
        return replace(self, name=f"{self.name} float8", float8=True)

    def under_a_mask(self) -> Serving:
        return replace(self, name=f"{self.name} mask", masked=True)

    def with_a_bias(self) -> Serving:
        return replace(self, name=f"{self.name} bias", biased=True)


def alike(batch: int, keys: int, nheads_q: int, nheads_kv: int, rows: int = 1) -> Serving:
    """Sequences of one length."""
    new = "" if rows == 1 else f"{rows} rows on "
    name = f"{batch} x {new}{keys} {nheads_q}/{nheads_kv}"
    return Serving(name, (keys,) * batch, nheads_q, nheads_kv, rows=rows)


# What fills the GPU, and what does not.
BIG = (
    alike(64, 8192, 32, 8),
    alike(16, 4096, 32, 32),
    alike(8, 32768, 64, 8),
    alike(1, 131072, 32, 8),
)
SMALL = (
    alike(1, 2048, 32, 8),
    alike(1, 8192, 32, 8),
    alike(8, 4096, 32, 8),
    alike(32, 2048, 32, 8),
    alike(128, 1024, 32, 8),
    alike(1, 32768, 64, 8),
    # What is left of eight kv heads on each of eight GPUs; one kv head for all, as in Falcon; none shared.
    alike(32, 4096, 8, 1),
    alike(11, 3593, 71, 1),
    alike(128, 192, 32, 32),
)
# As of caches of a fixed size, to which torch's attention is given a mask of padding.
MASKED = tuple(case.under_a_mask() for case in (SMALL[1], SMALL[2], SMALL[5]))
BIASED = tuple(case.with_a_bias() for case in (SMALL[1], SMALL[2], SMALL[5]))
# Timed in a graph and without one.
EAGER = tuple(case.in_pages(16) for case in (SMALL[0], SMALL[2], SMALL[4]))
PAGE_SIZES = (16, 128)
MORE_PAGE_SIZES = (64, 256)  # without a bound
UNEVEN = Serving("131072 + 63 x 2048 32/8", (131072, *(2048,) * 63), 32, 8).in_pages(16)
_WINDOW, _SINK = 1024, 4
WINDOWED = Serving(
    "64 x 131072 32/8 window 1024 sink 4", (131072,) * 64, 32, 8, window_left=_WINDOW - 1, sink=_SINK
).in_pages(16)  # fmt: skip
APPENDED = alike(64, 8192, 32, 8).in_pages(16)
# As many keys as a row of WINDOWED sees.
AS_WINDOWED = alike(64, _WINDOW + _SINK, 32, 8)
PREFILL = tuple(
    alike(batch, keys + rows, 32, 8, rows)
    for rows in (256, 512, 2048)
    for keys in (8192, 32768)
    for batch in (1, 8)
)
# Heads that no tile divides, as in Qwen and Llama 4.
CHUNKS = (alike(8, 4096, 28, 4, 32), alike(8, 4096, 40, 8, 32), alike(8, 4096, 40, 8, 100))
