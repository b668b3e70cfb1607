"""Turns scores and dout . v of a tile into probabilities and gradients of scores: without options, and with them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rawattn._cpu.score_gradients import Part, Totals
from rawattn._cpu.scores import Scores, TilePosition
from rawattn._cpu.tiles import Array, Floats


class Options(NamedTuple):
    """The options of a call that change scores, and the sums of their gradients. Both are None for a call without options.

    totals: None also if no gradient of an option's array is wanted.
    """

    scores: Scores | None
    totals: Totals | None

    def part(self, where: TilePosition) -> Part | None:
        return None if self.totals is None else Part(self.totals, where)


PLAIN = Options(None, None)


def softmax_gradient(
    p: Floats, ds: Floats, normaliser: Floats, delta: Floats, masked: Array | None
) -> None:
    """In place: p from scores to probabilities, ds from dout . v to the gradients of scores. Both are 0 where masked."""
    p -= normaliser
    np.exp(p, out=p)
    ds -= delta
    ds *= p
    if masked is not None:
        np.copyto(p, 0, where=masked)
        np.copyto(ds, 0, where=masked)


def score_gradient(
    scores: Scores,
    p: Floats,
    ds: Floats,
    normaliser: Floats,
    delta: Floats,
    masked: Array | None,
    where: TilePosition,
    part: Part | None,
) -> Array | None:
    """The same with options: p begins as scale * q . k, and ds ends as the gradient with respect to that. p includes dropout.

    Returns the mask of all hidden keys, those hidden by options included.
    """
    changed = scores.apply(p, where, masked, keep=True)
    kept = scores.kept(where)
    scores.drop(ds, where, kept)
    if kept is not None:
        ds *= scores.kept_factor
    softmax_gradient(p, ds, normaliser, delta, changed.hidden)
    scores.drop(p, where, kept)
    if kept is not None:
        p *= scores.kept_factor
    if part is not None:
        part.add_scores(ds, where, changed)
    scores.differentiate(ds, where, changed)
    return changed.hidden
