"""The contract's rules, evaluated pair by pair, and arrays for tests of the reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from rawattn import ScoreMod, SeqLayout

Options = dict[str, Any]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def visible_by_rule(
    seqlen_q: int,
    seqlen_k: int,
    *,
    left: int | None = None,
    right: int | None = None,
    sink: int = 0,
    align: str = "bottom-right",
) -> np.ndarray:
    """Apply the contract's visibility rule to one (row, key) pair at a time."""
    offset = seqlen_k - seqlen_q if align == "bottom-right" else 0
    seen = np.zeros((seqlen_q, seqlen_k), bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            past_right = right is not None and j > i + offset + right
            before_left = left is not None and j < i + offset - left
            seen[i, j] = not past_right and (not before_left or j < sink)
    return seen


def by_definition(q, k, v, s_of, keep=None) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one sequence by definition; q is (rows, nheads_q, D).

    `s_of(s, h, i, j)` returns the score, or None where the key is hidden.
    """
    nheads_q, group = q.shape[1], q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], nheads_q, v.shape[2]))
    lse = np.full((nheads_q, q.shape[0]), -np.inf)
    for h, i in itertools.product(range(nheads_q), range(q.shape[0])):
        scores = {
            j: s
            for j in range(k.shape[0])
            if (s := s_of(float(q[i, h] @ k[j, h // group]), h, i, j)) is not None
        }
        if scores:
            total = math.fsum(math.exp(s) for s in scores.values())
            lse[h, i] = math.log(total)
            for j, s in scores.items():
                factor = 1.0 if keep is None else keep(h, i, j)
                out[i, h] += math.exp(s) / total * factor * v[j, h // group]
    return out, lse


TILTED = ScoreMod("score * (1 + 0.1 * head) + 0.01 * q_idx * kv_idx")
# The derivative depends on the score, and key 1 is hidden from row 2.
SQUARED = ScoreMod(
    "where(q_idx == 2 and kv_idx == 1, -inf, score + 0.25 * score * score + 0.1 * batch)"
)
LENS_Q, LENS_K = (3, 0, 5, 2), (4, 6, 0, 7)
GROUPED = SeqLayout(
    seqstart_q=[1, 5, 7, 12, 14],
    seqstart_k=[2, 6, 13, 15, 24],
    seqlen_q=LENS_Q,
    cu_seqlen_k=np.cumsum([3, *LENS_K]),
)
PADDED = SeqLayout(seqlen_q=LENS_Q, seqlen_k=LENS_K)


def spots(seqs: SeqLayout, side: str) -> list[Any]:
    """Return an index for each sequence that selects its rows in an array (..., rows, heads[, dim])."""
    lens = LENS_Q if side == "q" else LENS_K
    if seqs is PADDED:
        return [np.s_[b, :n] for b, n in enumerate(lens)]
    starts = (1, 5, 7, 12) if side == "q" else (2, 6, 13, 15)
    return [np.s_[start : start + n] for start, n in zip(starts, lens, strict=True)]


def scattered(seqs: SeqLayout, side: str, pieces: list[np.ndarray]) -> np.ndarray:
    """Put each sequence's piece (rows, ...) into an array that is NaN elsewhere."""
    rooms = ((4, 6) if side == "q" else (4, 8)) if seqs is PADDED else (16 if side == "q" else 25,)
    array = np.full((*rooms, *pieces[0].shape[1:]), np.nan)
    for spot, piece in zip(spots(seqs, side), pieces, strict=True):
        array[spot] = piece
    return array


def outside(seqs: SeqLayout, side: str, array: np.ndarray) -> np.ndarray:
    """Return the padding rows."""
    rows = np.ones(array.shape[: 2 if seqs is PADDED else 1], bool)
    for spot in spots(seqs, side):
        rows[spot] = False
    return array[rows]


def by_row(lse: np.ndarray) -> np.ndarray:
    """(..., heads, rows) <-> (..., rows, heads)"""
    return lse.swapaxes(-1, -2)


def arrays_of(
    batch: int = 2, rows: int = 5, keys: int = 7, nheads_q: int = 4, nheads_kv: int = 2
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        draw(batch, rows, nheads_q, 3),
        draw(batch, keys, nheads_kv, 3, seed=1),
        draw(batch, keys, nheads_kv, 6, seed=2),
    )
