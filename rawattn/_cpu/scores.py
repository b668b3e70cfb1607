"""Applies the options of a call to a tile of scores, and to their gradients.

Scores are viewed with five axes: (sequences, kv heads, query heads of a group, rows, keys). An option's values
for a tile are an array that broadcasts to these axes. A call without such options has no `Scores`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn import _philox
from rawattn._call.problem import Problem
from rawattn._cpu.tiles import Array, Floats
from rawattn._scores import numpy_eval
from rawattn._scores.numpy_eval import PartialValues
from rawattn._scores.program import ScoreText

Bools = NDArray[np.bool_]


class TilePosition(NamedTuple):
    """The position of a tile of scores. Pairs are first and last (exclusive)."""

    sequences: slice | list[int]
    kv_heads: tuple[int, int]
    rows: tuple[int, int]  # positions in the sequence
    keys: tuple[int, int]
    len_q: int  # lengths of the sequences, equal for all of them
    len_k: int
    first_query: int = 0  # positions in longer sequences, equal for all of them
    first_key: int = 0

    def view(self, tile: Array, nheads_q: int) -> Array:
        """A writable view, with five axes, of a tile (..., kv heads, rows of a group's heads, keys) without its padding.

        nheads_q: the number of query heads that share these kv heads.
        """
        rows, keys = self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]
        group_size = nheads_q // tile.shape[-3]
        scores = tile[..., : group_size * rows, :keys]
        split = scores.reshape(*tile.shape[:-2], group_size, rows, keys)
        return split if split.ndim == 5 else split[None]


class Changed(NamedTuple):
    """hidden: where keys are hidden or the tile is padding, None if nowhere. capped: the scores before `score_mod`, if the
    backward needs them, else None."""

    hidden: Bools | None
    capped: Floats | None


class Scores:
    """The options of one call, with their arrays. Threads share it, so it is read-only."""

    def __init__(self, problem: Problem, extras: Mapping[str, Any]) -> None:
        self._problem = problem
        self._softcap = problem.softcap
        self._group_size = problem.nheads_q // problem.nheads_kv
        self._bias = _four_axes(extras.get("bias"))
        self._mask = _four_axes(extras.get("mask"))
        slopes = extras.get("alibi_slopes")
        self._slopes = None
        if slopes is not None:
            self._slopes = slopes.astype(np.float32).reshape(-1, problem.nheads_q)
        sinks = extras.get("sink_logits")
        self._sinks: Floats | None = None if sinks is None else sinks.astype(np.float32)
        self._seed: int | None = None
        if problem.dropout_p > 0:
            array = extras.get("seed")
            self._seed = int(extras["seed_value"] if array is None else array.reshape(-1)[0])
        # The factor of probabilities that dropout keeps.
        self.kept_factor = 1 / (1 - problem.dropout_p)
        self.score_mod: ScoreText | None = None
        if isinstance(problem.score_mod, ScoreText):
            self.score_mod = problem.score_mod
            self._captured = {
                name: extras[f"captured{n}"] for n, (name, *_) in enumerate(self.score_mod.arrays)
            }
        # Whether an option can give a score of -inf, which hides the key.
        shifts = (self._bias, self._slopes, self.score_mod)
        self._infinite = any(x is not None for x in shifts)
        # Whether the backward needs the scores before `score_mod`.
        self._needs_scores_in_backward = self._softcap is not None or self.score_mod is not None

    def nheads_q(self, where: TilePosition) -> int:
        first, last = where.kv_heads
        return (last - first) * self._group_size

    def apply(
        self, tile: Floats, where: TilePosition, masked: Bools | None, *, keep: bool
    ) -> Changed:
        """Turns scale * q . k of a tile into scores in place, -inf where a key is hidden.

        masked: from `tiles.masked_pairs`. keep: whether to keep what the backward needs.
        """
        scores = where.view(tile, self.nheads_q(where))
        if self._softcap is not None:
            scores /= self._softcap
            np.tanh(scores, out=scores)
            scores *= self._softcap
        capped = scores.copy() if keep and self._needs_scores_in_backward else None
        if self.score_mod is not None:
            scores[...] = numpy_eval.evaluate(*self._arguments(self.score_mod, scores, where))
        bias = None
        if self._bias is not None:
            bias = self.of_heads(self._bias, where).astype(np.float32, copy=False)
            scores += bias
        if self._slopes is not None:
            scores -= self._slopes_of(where) * self._distances(where)
        hidden = masked
        if self._infinite or self._mask is not None:
            hidden = tile == -np.inf
            if masked is not None:
                hidden |= masked
            inner = where.view(hidden, self.nheads_q(where))
            if bias is not None:  # a bias of -inf hides a key whose score is NaN too
                inner |= bias == -np.inf
            if self._mask is not None:
                inner |= ~self.of_heads(self._mask, where)
        if hidden is not None:
            np.copyto(tile, -np.inf, where=hidden)
        return Changed(hidden, capped)

    def differentiate(self, ds: Floats, where: TilePosition, changed: Changed) -> None:
        """Turns the gradient with respect to the scores into that with respect to scale * q . k, in place."""
        capped = changed.capped
        if capped is None:
            return
        inner = where.view(ds, self.nheads_q(where))
        if self.score_mod is not None:
            inner *= numpy_eval.derivative(*self._arguments(self.score_mod, capped, where))
        if self._softcap is not None:
            slope = capped / self._softcap
            slope *= slope
            np.subtract(1, slope, out=slope)
            inner *= slope
        if changed.hidden is not None:
            # The score of a hidden key, and so its derivative, may be NaN.
            np.copyto(ds, 0, where=changed.hidden)

    def partials(self, where: TilePosition, changed: Changed) -> list[PartialValues]:
        """Derivatives of scores with respect to captured arrays; undefined where a key is hidden."""
        assert self.score_mod is not None and changed.capped is not None
        return numpy_eval.partials(*self._arguments(self.score_mod, changed.capped, where))

    def kept(self, where: TilePosition) -> Bools | None:
        """Which probabilities dropout keeps, with five axes; None without dropout."""
        if self._seed is None:
            return None
        positions = self._positions(where)
        batch, head = (positions[name][..., 0, 0] for name in ("batch", "head"))
        rows, keys = range(*where.rows), range(*where.keys)
        return _philox.kept(self._seed, self._problem.dropout_p, batch, head, rows, keys)

    def drop(self, tile: Floats, where: TilePosition, kept: Bools | None) -> None:
        """Zeroes the elements that are not kept. The caller must multiply the kept ones by `kept_factor`."""
        if kept is not None:
            scores = where.view(tile, self.nheads_q(where))
            scores *= kept

    def sinks(self, where: TilePosition, rows: int) -> Floats | None:
        """The sink logits of a tile's rows, (kv heads, rows, 1); -inf for rows that only fill up the tile."""
        if self._sinks is None:
            return None
        by_row = np.full((where.kv_heads[1] - where.kv_heads[0], rows, 1), -np.inf, np.float32)
        length = where.rows[1] - where.rows[0]
        of_group = by_row[:, : self._group_size * length].reshape(
            len(by_row), self._group_size, length
        )
        first, last = (head * self._group_size for head in where.kv_heads)
        of_group[...] = self._sinks[first:last].reshape(len(by_row), self._group_size, 1)
        return by_row

    def of_heads(self, array: Array, where: TilePosition) -> Array:
        """The part of an array (1 or batch, heads, 1 or rows, 1 or keys) that belongs to a tile, with five axes."""
        part = array[self.index(array.shape, where)]
        count, heads, rows, keys = part.shape
        if array.shape[1] == 1:
            split = (1, 1)
        else:
            nheads_kv = where.kv_heads[1] - where.kv_heads[0]
            split = (nheads_kv, heads // nheads_kv)
        found: Array = part.reshape(count, *split, rows, keys)
        return found

    def index(self, shape: tuple[int, ...], where: TilePosition) -> tuple[Any, ...]:
        """The index of a tile's part in an array of four axes with this shape. An axis of 1 is broadcast."""
        per_kv_head = shape[1] // self._problem.nheads_kv
        of_axes = (
            where.sequences,
            slice(*(head * per_kv_head for head in where.kv_heads)),
            slice(*where.rows),
            slice(*where.keys),
        )
        return tuple(
            slice(0, 1) if n == 1 else index for n, index in zip(shape, of_axes, strict=True)
        )

    def _arguments(self, text: ScoreText, scores: Floats, where: TilePosition) -> tuple[Any, ...]:
        """The arguments of the functions of `numpy_eval`."""
        positions = (*self._positions(where).values(), where.len_q, where.len_k)
        return text, scores, *positions, self._captured, self._problem.score_scalars

    def _slopes_of(self, where: TilePosition) -> Floats:
        assert self._slopes is not None
        return self.of_heads(self._slopes[:, :, None, None], where)

    def _positions(self, where: TilePosition) -> dict[str, Array]:
        """The positions of a tile's scores by name. Each array broadcasts to the five axes."""
        of = where.sequences
        batch = np.arange(of.start, of.stop) if isinstance(of, slice) else np.array(of)
        kv_head = np.arange(*where.kv_heads)[:, None]
        head = self._group_size * kv_head + np.arange(self._group_size)
        return {
            "batch": batch[:, None, None, None, None],
            "head": head[:, :, None, None],
            "kv_head": kv_head[:, :, None, None],
            "q_idx": where.first_query + np.arange(*where.rows)[:, None],
            "kv_idx": where.first_key + np.arange(*where.keys),
        }

    def _distances(self, where: TilePosition) -> Floats:
        """The distances of keys from the rows' diagonals, (rows, keys)."""
        offset = self._problem.offset(where.len_q, where.len_k, where.first_query, where.first_key)
        diagonals = np.arange(*where.rows)[:, None] + offset
        distances: Floats = np.abs(diagonals - np.arange(*where.keys)).astype(np.float32)
        return distances


def scores_of(problem: Problem, extras: Mapping[str, Any]) -> Scores | None:
    """The options that change scores; None for a call without such options."""
    if not extras and problem.softcap is None and problem.score_mod is None:
        return None
    return Scores(problem, extras)


def _four_axes(array: Array | None) -> Array | None:
    return None if array is None else array.reshape((1,) * (4 - array.ndim) + array.shape)
