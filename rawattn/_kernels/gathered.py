"""Calls whose rows all share a list of keys: K and V of those keys are gathered, and attention to them alone follows.

The kernels between are those of another family, on arrays that are the gathered ones. Which of them each row sees is a mask
of bits again: of a list that is not full, and of rows that do not see all keys before the list hides any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rawattn._call.layout import Lengths
from rawattn._call.problem import Problem
from rawattn._call.scores import ArrayForm
from rawattn._call.seq_layout import bind
from rawattn._call.structure import Structure, structure
from rawattn._kernels import features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import kept_rows, mask_packing
from rawattn._kernels.portable.kept_rows import KeptRows
from rawattn._kernels.steps import Lists, Step, Steps
from rawattn._kernels.target import Target
from rawattn._masks import layout
from rawattn._masks.layout import Shape

# A gathered key has another place, which these would take for its own; and a list belongs to sequences of one length.
FEATURES = features.names() - {
    "ragged",
    "packed",
    "bias",
    "bias_pairs",
    "alibi",
    "one_sided",
    "score_mod",
    "mod_line",
    "dropout",
}

# Gathered rows are read, written and read again: from so many keys for each kept one on that pays for few queries too.
WORTH = 2

# Farther apart than any row and key.
_FAR = 1 << 40

# Memory of the kept keys, by what it stands for.
_MASK = {"mask_bits": "kept_bits", "mask_map": "kept_map", "mask_keys": "kept_keys"}
_INPUTS = {"k": "kept_k", "v": "kept_v"}
_GRADIENTS = {"dk": "kept_dk", "dv": "kept_dv"}


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not gathered, else None."""
    mask = problem.mask
    if mask is None or not mask.kept:
        return "it has no list of keys that all rows share"
    if mask.shape[1] not in (1, problem.nheads_kv):
        return "query heads that share keys do not share the list"
    if mask.shape[3] != problem.rows_k:
        return "the mask has one key for all"
    if min(problem.batch, problem.rows_q) == 0:
        return "an array is empty"
    if WORTH * mask.kept > problem.rows_k:
        return "most keys are kept"
    return None


@dataclass(frozen=True, slots=True)
class Gathered:
    """A call's attention to its kept keys alone: what the family between is asked for."""

    outer: Problem
    problem: Problem
    structure: Structure
    operands: Operands
    _lengths: Lengths
    _rows: Mapping[str, KeptRows]

    def around(self, inner: Steps, target: Target) -> Steps:
        """The steps of that family, with those that gather before them, and behind a backward those that scatter."""
        names = {**_MASK, **{name: rows.copy for name, rows in self._rows.items()}}
        shape = self.problem.mask.shape
        before = [self._rows[name].gather(target.wave) for name in _INPUTS]
        masks = [mask_packing.kept_step(shape, _limits(self.outer)), mask_packing.keys_step(shape)]
        before += [_renamed(step, _MASK) for step in masks if step is not None]
        between = [
            replace(_renamed(step, names), blocks=self._blocks(step)) for step in inner.launches
        ]
        after = [
            rows.scatter(target.wave) for name, rows in self._rows.items() if name in _GRADIENTS
        ]
        scratch = {rows.copy: rows.nbytes for rows in self._rows.values()}
        scratch |= {
            "kept_bits": layout.bits_bytes(shape),
            "kept_map": layout.map_bytes(shape),
            "kept_keys": layout.keys_bytes(shape),
        }
        if masks[1] is not None:
            scratch["mask_bands"] = mask_packing.band_bytes(shape)
        return replace(
            inner,
            launches=(*before, *between, *after),
            scratch={**inner.scratch, **scratch},
            lists=Lists(),  # of words that each run packs
        )

    def _blocks(self, step: Step) -> int:
        """The call's own lengths are those of all keys."""
        return step.blocks if isinstance(step.blocks, int) else step.blocks.blocks(self._lengths)


def gathered(problem: Problem, operands: Operands) -> Gathered:
    """Of a call that is supported."""
    found = {
        name: KeptRows(problem, operands, name, copy)
        for name, copy in {**_INPUTS, **_GRADIENTS}.items()
        if name in operands.strides
    }
    count = problem.mask.kept
    limited = problem.window_left is not None or problem.window_right is not None
    shape: Shape = (*problem.mask.shape[:2], problem.rows_q if limited else 1, count)
    inner = replace(
        problem,
        rows_k=count,
        max_seqlen_k=count,
        window_left=None,
        window_right=None,
        sink=0,
        mask=ArrayForm("bits", shape, shape),
    )
    lengths = bind(None, batch=problem.batch, rows_q=problem.rows_q, rows_k=count)
    strides = {**operands.strides, **{name: rows.strides for name, rows in found.items()}}
    return Gathered(
        outer=problem,
        problem=inner,
        structure=structure(lengths),
        operands=replace(operands, strides=strides),
        _lengths=lengths,
        _rows=found,
    )


def _limits(problem: Problem) -> dict[str, Any]:
    """Of the keys that each row sees but for the list, fields of `helper_params.KEPT_MASK`."""
    offset = 0 if problem.top_left else problem.rows_k - problem.rows_q
    left, right = problem.window_left, problem.window_right
    return {
        **kept_rows.kept(problem),
        "first": -_FAR if left is None else offset - left,
        "last": _FAR if right is None else offset + right,
        "sink": problem.sink,
    }


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    return replace(
        step,
        patches=tuple((at, names.get(name, name)) for at, name in step.patches),
        maps=tuple((names.get(name, name), geometry) for name, geometry in step.maps),
    )
