"""The serving calls that are measured: few new rows on many cached keys."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from rawattn._bench.counters import Visible, visible


@dataclass(frozen=True, slots=True)
class Serving:
    """A causal call with new rows of sequences on their cached keys. page_size 0: keys in rows, sequences of equal length."""

    name: str
    contexts: tuple[int, ...]  # keys of each sequence, including those of the new rows
    nheads_q: int
    nheads_kv: int
    page_size: int = 0
    rows: int = 1  # new rows of each sequence
    headdim: int = 128
    window_left: int | None = None
    sink: int = 0
    float8: bool = False  # pages hold float8
    masked: bool = False  # a mask hides the first keys of a sequence as padding, up to an eighth
    biased: bool = False  # each head has a bias, which torch's attention takes as its mask

    @property
    def batch(self) -> int:
        return len(self.contexts)

    @property
    def pages(self) -> int:
        """The number of pages of all sequences."""
        return sum(-(-keys // self.page_size) for keys in self.contexts)

    @property
    def key_bytes(self) -> int:
        """The bytes of keys and values that some row sees, in 16 bits or in float8."""
        keys = sum(times * self._visible(n).keys for n, times in Counter(self.contexts).items())
        return keys * self.nheads_kv * 2 * self.headdim * (1 if self.float8 else 2)

    @property
    def nbytes(self) -> int:
        """The least bytes to read and write: keys and values once, queries and outputs."""
        return self.key_bytes + 2 * self.batch * self.rows * self.nheads_q * self.headdim * 2

    @property
    def new_bytes(self) -> int:
        """The bytes of `append_kv`: new rows and the queries that get their rotary embedding, read and written."""
        heads = self.nheads_q + 2 * self.nheads_kv
        return 2 * self.batch * self.rows * heads * self.headdim * 2

    def _visible(self, keys: int) -> Visible:
        window = None if self.window_left is None else (self.window_left, 0)
        return visible(self.rows, keys, causal=True, window=window, sink=self.sink)

    def in_pages(self, page_size: int) -> Serving:
        """The same call, with keys in pages."""
        return replace(self, name=f"{self.name} page {page_size}", page_size=page_size)

    def in_float8(self) -> Serving:
        """The same call, with float8 pages."""
        return replace(self, name=f"{self.name} float8", float8=True)

    def under_a_mask(self) -> Serving:
        return replace(self, name=f"{self.name} mask", masked=True)

    def with_a_bias(self) -> Serving:
        return replace(self, name=f"{self.name} bias", biased=True)


def alike(batch: int, keys: int, nheads_q: int, nheads_kv: int, rows: int = 1) -> Serving:
    """A case whose sequences have equal lengths."""
    new = "" if rows == 1 else f"{rows} rows on "
    name = f"{batch} x {new}{keys} {nheads_q}/{nheads_kv}"
    return Serving(name, (keys,) * batch, nheads_q, nheads_kv, rows=rows)


# Cases that fill the GPU (BIG), and cases that do not (SMALL).
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
    # One of eight kv heads, as under tensor parallelism over eight GPUs; MQA, as in Falcon; MHA.
    alike(32, 4096, 8, 1),
    alike(11, 3593, 71, 1),
    alike(128, 192, 32, 32),
)
# Caches of a fixed size (static caches), for which torch's attention gets a padding mask; then the same with a bias.
MASKED = tuple(case.under_a_mask() for case in (SMALL[1], SMALL[2], SMALL[5]))
BIASED = tuple(case.with_a_bias() for case in (SMALL[1], SMALL[2], SMALL[5]))
# Cases that are timed both in a graph and without one.
EAGER = tuple(case.in_pages(16) for case in (SMALL[0], SMALL[2], SMALL[4]))
PAGE_SIZES = (16, 128)
MORE_PAGE_SIZES = (64, 256)  # without a bound
UNEVEN = Serving("131072 + 63 x 2048 32/8", (131072, *(2048,) * 63), 32, 8).in_pages(16)
_WINDOW, _SINK = 1024, 4
WINDOWED = Serving(
    "64 x 131072 32/8 window 1024 sink 4", (131072,) * 64, 32, 8, window_left=_WINDOW - 1, sink=_SINK
).in_pages(16)  # fmt: skip
APPENDED = alike(64, 8192, 32, 8).in_pages(16)
# A case with as many keys as a row of WINDOWED sees.
AS_WINDOWED = alike(64, _WINDOW + _SINK, 32, 8)
PREFILL = tuple(
    alike(batch, keys + rows, 32, 8, rows)
    for rows in (256, 512, 2048)
    for keys in (8192, 32768)
    for batch in (1, 8)
)
# GQA groups of 7 and 5 heads, which divide no tile, as in Qwen and Llama 4.
CHUNKS = (alike(8, 4096, 28, 4, 32), alike(8, 4096, 40, 8, 32), alike(8, 4096, 40, 8, 100))

DECODE_NAMES = tuple(
    case.name for case in (*BIG, *SMALL, *MASKED, *BIASED, UNEVEN, WINDOWED, APPENDED)
)
PREFILL_NAMES = tuple(case.name for case in (*PREFILL, *CHUNKS))
