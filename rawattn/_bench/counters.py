"""The least operations and bytes of attention, counted from which keys each row sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Visible:
    """Counts of visible (row, key) pairs, of rows that see a key, and of keys that some row sees."""

    pairs: int
    rows: int
    keys: int


def visible(
    len_q: int,
    len_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    sink: int = 0,
    align: str = "bottom-right",
) -> Visible:
    """Exact counts for one sequence, from the options of `rawattn.attention`."""
    if not len_q or not len_k:
        return Visible(0, 0, 0)
    left, right = window or (None, None)
    if causal:
        right = 0
    diagonal = np.arange(len_q) + (len_k - len_q if align == "bottom-right" else 0)
    first = np.zeros(len_q, int) if left is None else np.clip(diagonal - left, 0, len_k)
    last = np.full(len_q, len_k) if right is None else np.clip(diagonal + right + 1, 0, len_k)
    band = np.maximum(last - first, 0)
    # Sink tokens before the window, but not past its right edge.
    sinks = np.minimum(sink, np.minimum(first, last))

    edges = np.zeros(len_k + 1, int)
    np.add.at(edges, first[band > 0], 1)
    np.add.at(edges, last[band > 0], -1)
    seen = np.cumsum(edges[:-1]) > 0
    seen[: sinks.max()] = True
    counts = band + sinks
    return Visible(int(counts.sum()), int(np.count_nonzero(counts)), int(np.count_nonzero(seen)))


def forward_flops(pairs: int, nheads_q: int, headdim: int, headdim_v: int) -> int:
    """The Q K^T and P V products of every visible pair: a multiplication and an addition for each element of q and of v."""
    return 2 * pairs * nheads_q * (headdim + headdim_v)


def forward_bytes(
    counts: Visible,
    rows: int,
    nheads_q: int,
    nheads_kv: int,
    headdim: int,
    headdim_v: int,
    itemsize: int,
) -> int:
    """Each row that sees a key and each key that is seen, read once; the output of all `rows`, written once."""
    read = counts.rows * nheads_q * headdim + counts.keys * nheads_kv * (headdim + headdim_v)
    return (read + rows * nheads_q * headdim_v) * itemsize


def backward_flops(pairs: int, nheads_q: int, headdim: int, headdim_v: int) -> int:
    """Five products of every visible pair: S (recomputed), dP, dV, dK and dQ.

    S, dK and dQ take D multiplications and additions each, dP and dV take Dv. For D = Dv this is 2.5 times the forward's.
    """
    return 2 * pairs * nheads_q * (3 * headdim + 2 * headdim_v)


def backward_bytes(
    counts: Visible,
    rows: int,
    keys: int,
    nheads_q: int,
    nheads_kv: int,
    headdim: int,
    headdim_v: int,
    itemsize: int,
) -> int:
    """Each row that sees a key (q, out, dout and a float32 lse) and each key that is seen, read once; all gradients written
    once.
    """
    read_rows = counts.rows * nheads_q * (headdim + 2 * headdim_v)
    read_keys = counts.keys * nheads_kv * (headdim + headdim_v)
    written = rows * nheads_q * headdim + keys * nheads_kv * (headdim + headdim_v)
    return (read_rows + read_keys + written) * itemsize + 4 * counts.rows * nheads_q
