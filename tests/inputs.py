"""The arrays of a `Case`. Everything that a call must not read is NaN: padding, gaps between rows, and surrounding memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tests.cases import Case
from tests.memory import CANARY, DTYPES, Strided, strided
from tests.score_arrays import arrays_of, captured_arrays, score_mod_of, seed_of


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays and keywords of a call.

    options: the keywords, with NumPy arrays. `arrays` and `captured` hold the memory layout of those arrays.
    """

    q: Strided
    k: Strided
    v: Strided
    out: Strided | None
    integers: dict[str, np.ndarray]  # keywords of SeqLayout
    maxima: dict[str, int]  # more keywords of SeqLayout
    rows: np.ndarray  # True for the logical rows of q: (batch, rows) or (total,)
    options: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Strided] = field(default_factory=dict)
    captured: dict[str, Strided] = field(default_factory=dict)

    @cached_property
    def logical_out(self) -> np.ndarray:
        """True for the elements of `out.buffer` to which the call writes results."""
        assert self.out is not None
        inside = replace(self.out, buffer=np.zeros(self.out.buffer.shape, bool))
        inside.view()[self.rows] = True
        return inside.buffer


def materialise(case: Case, *, drawn: bool = True) -> Inputs:
    """drawn: whether q, k and v get values, which takes most of the time."""
    rng = np.random.default_rng([case.seed, *case.name.encode()])
    headdim_v = case.headdim if case.headdim_v is None else case.headdim_v
    rows_q = _logical_rows(case, *case.side_q)
    rows_k = _logical_rows(case, *case.side_k)

    def values(rows: np.ndarray, nheads: int, headdim: int, what: str) -> Strided:
        array = strided((*rows.shape, nheads, headdim), DTYPES[case.dtype], case.layout)
        if not drawn:
            return array
        x = rng.standard_normal((np.count_nonzero(rows), nheads, headdim))
        if case.values == "uniform":
            x = rng.random(x.shape)
        elif case.values == "negative":
            x = rng.random(x.shape) * {"q": 4, "k": -1, "v": 1}[what]
            if what == "k":
                x *= np.linspace(4, 1, len(x))[:, None, None]
        elif case.values == "large" and what == "q":
            x *= 30
        elif case.values == "constant" and what == "v":
            x[:] = rng.standard_normal((nheads, headdim))
        array.view()[rows] = x.astype(array.buffer.dtype)
        return array

    q = values(rows_q, case.nheads_q, case.headdim, "q")
    k = values(rows_k, case.nheads_kv, case.headdim, "k")
    v = values(rows_k, case.nheads_kv, headdim_v, "v")
    out = None
    if case.give_out:
        layout = "dense" if case.layout in ("steps", "shared-heads") else case.layout
        out = strided((*rows_q.shape, case.nheads_q, headdim_v), q.buffer.dtype, layout)
        out.buffer.view(np.uint8)[:] = CANARY

    integers: dict[str, np.ndarray] = {}
    maxima: dict[str, int] = {}
    for side, by, (lens, rooms) in (("q", case.by_q, case.side_q), ("k", case.by_k, case.side_k)):
        if case.packed and not (side == "k" and case.share_starts):
            integers[f"seqstart_{side}"] = case.lead + _cumulative(rooms)
        if by == "both":
            # cu_seqlen takes precedence: these lengths are wrong but accepted.
            integers[f"seqlen_{side}"] = np.zeros(case.batch, np.int64)
        elif by == "seqlen":
            integers[f"seqlen_{side}"] = np.array(lens, np.int64)
        if by in ("cu_seqlen", "both"):
            # Only differences of cu_seqlen matter, so its first entry need not be 0.
            integers[f"cu_seqlen_{side}"] = case.lead + _cumulative(lens)
        if case.max_seqlen:
            maxima[f"max_seqlen_{side}"] = max(lens, default=0)
    for side, positions in (("q", case.positions_q), ("k", case.positions_k)):
        if positions:
            integers[f"position_{side}"] = np.array(positions, np.int64)
    if case.integers != "list":
        integers = {name: x.astype(case.integers) for name, x in integers.items()}

    defaults = Case()
    options = {
        name: getattr(case, name)
        for name in ("causal", "align", "window", "sink", "scale", "softcap", "dropout_p")
        if getattr(case, name) != getattr(defaults, name)
    }
    if not case.score_options:
        return Inputs(q, k, v, out, integers, maxima, rows_q, options)
    arrays, captured = arrays_of(case), captured_arrays(case)
    if case.dropout_p:
        options["seed"] = seed_of(case)
    options |= {name: array.view() for name, array in arrays.items()}
    if case.score_mod:
        views = {name: array.view() for name, array in captured.items()}
        options["score_mod"] = score_mod_of(case, views)
    return Inputs(q, k, v, out, integers, maxima, rows_q, options, arrays, captured)


def _cumulative(lens: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens, dtype=np.int64)]).astype(np.int64)


def _logical_rows(case: Case, lens: tuple[int, ...], rooms: tuple[int, ...]) -> np.ndarray:
    if not case.packed:
        return np.arange(max(rooms, default=0)) < np.reshape(lens, (-1, 1))
    pieces = [np.arange(room) < n for n, room in zip(lens, rooms, strict=True)]
    outside = [np.zeros(case.lead, bool)], [np.zeros(case.tail, bool)]
    return np.concatenate([*outside[0], *pieces, *outside[1]])
