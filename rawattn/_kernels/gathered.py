"""Calls whose rows all share a list of keys: K and V of those keys are gathered, and attention to them alone follows.

The kernels between are those of another family, on arrays that are the gathered ones. Lists need not be full, and rows may see
fewer keys than the list. Where rows see all of it, and a kernel of decoding takes the call, a list that is not full is a
sequence with fewer keys. Else which keys each row sees is a mask of bits again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rawattn._call.binding import bind
from rawattn._call.layout import Lengths
from rawattn._call.options import ArrayForm
from rawattn._call.problem import Problem
from rawattn._call.structure import Structure, structure
from rawattn._kernels import features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import kept_setup
from rawattn._kernels.portable.kept_setup import KeptRows, Mask
from rawattn._kernels.steps import Lists, Step, Steps
from rawattn._kernels.target import Target
from rawattn._masks import layout
from rawattn._strides import Strides

# A gathered key has another position, which these would take for its own; and a list belongs to sequences of one length.
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

# Memory of the kept keys, by what it stands for.
_INPUTS = {"k": "kept_k", "v": "kept_v"}
_GRADIENTS = {"dk": "kept_dk", "dv": "kept_dv"}
_OTHERS = {"mask_bits": "kept_bits", "mask_keys": "kept_keys", "length_k": "kept_lengths"}


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

    problem: Problem
    structure: Structure
    operands: Operands
    _lengths: Lengths
    _rows: Mapping[str, KeptRows]

    def around(self, inner: Steps, target: Target) -> Steps:
        """The steps of that family, with the one that gathers before them, and behind a backward the one that scatters."""
        names = {**_OTHERS, **{name: rows.copy for name, rows in self._rows.items()}}
        keys, values = (self._rows[name] for name in _INPUTS)
        scratch = {rows.copy: rows.nbytes for rows in self._rows.values()}
        mask = self.problem.mask
        if mask is None:
            # Heads that have lists of their own are sequences.
            lists = self.problem.batch // keys.problem.batch
            before = kept_setup.by_lengths(keys, values, lists, target)
            scratch["kept_lengths"] = 4 * self.problem.batch
        else:
            before = kept_setup.by_mask(keys, values, Mask(mask.shape, inner.lists.parts), target)
            scratch["kept_bits"] = layout.bits_bytes(mask.shape)
            scratch["kept_keys"] = layout.keys_bytes(mask.shape)
        between = [
            replace(_renamed(step, names), blocks=self._blocks(step)) for step in inner.launches
        ]
        after = []
        if _GRADIENTS.keys() <= self._rows.keys():
            of_keys, of_values = (self._rows[name] for name in _GRADIENTS)
            after.append(kept_setup.scatter(of_keys, of_values, target.wave))
        return replace(
            inner,
            launches=(before, *between, *after),
            scratch={**inner.scratch, **scratch},
            lists=Lists(),  # of keys that each run gathers
        )

    def _blocks(self, step: Step) -> int:
        """The call's own lengths are those of all keys."""
        return step.blocks if isinstance(step.blocks, int) else step.blocks.blocks(self._lengths)


def by_mask(problem: Problem, operands: Operands) -> Gathered:
    """Of a call that is supported, in any family."""
    found = _rows(problem, operands)
    count = problem.mask.kept
    rows = 1 if kept_setup.limits(problem) is None else problem.rows_q
    shape = (*problem.mask.shape[:2], rows, count)
    inner = replace(_unlimited(problem), mask=ArrayForm("kept", shape, shape))
    lengths = bind(None, batch=problem.batch, rows_q=problem.rows_q, rows_k=count)
    strides = {**operands.strides, **{name: rows.strides for name, rows in found.items()}}
    operands = replace(operands, strides=strides)
    return Gathered(inner, structure(lengths), operands, lengths, found)


def by_lengths(problem: Problem, operands: Operands) -> Gathered | None:
    """Of a call that is supported, in a family that needs no order of sequences. None where rows do not all see their list."""
    if kept_setup.limits(problem) is not None:
        return None
    found = _rows(problem, operands)
    strides = {**operands.strides, **{name: rows.strides for name, rows in found.items()}}
    inner = replace(_unlimited(problem), mask=None, ragged=True)
    heads = problem.mask.shape[1]
    if heads > 1:
        group = problem.nheads_q // heads
        of_heads = _of_heads(strides, heads, group, problem.batch)
        # A number for each head would be one for those of a sequence.
        if of_heads is None or problem.sink_logits is not None:
            return None
        strides = of_heads
        inner = replace(inner, batch=problem.batch * heads, nheads_q=group, nheads_kv=1)
    lengths = bind(None, batch=inner.batch, rows_q=inner.rows_q, rows_k=inner.rows_k)
    form = structure(lengths)
    form = form._replace(k=form.k._replace(length=4, padded=True), on_host=False)
    return Gathered(inner, form, replace(operands, strides=strides), lengths, found)


def _rows(problem: Problem, operands: Operands) -> dict[str, KeptRows]:
    return {
        name: KeptRows(problem, operands, name, copy)
        for name, copy in {**_INPUTS, **_GRADIENTS}.items()
        if name in operands.strides
    }


def _unlimited(problem: Problem) -> Problem:
    count = problem.mask.kept
    return replace(
        problem, rows_k=count, max_seqlen_k=count, window_left=None, window_right=None, sink=0
    )


def _of_heads(
    strides: Mapping[str, Strides], heads: int, group: int, batch: int
) -> dict[str, Strides] | None:
    """Of the same arrays, each kv head with its query heads a sequence. None where those do not lie so.

    Kept keys do: of a sequence the heads come one after the other.
    """
    found: dict[str, Strides] = {}
    for name, (of_batch, row, head, element) in strides.items():
        sequence = head * (1 if name in (*_INPUTS, *_GRADIENTS) else group)
        if batch > 1 and of_batch != heads * sequence:
            return None
        found[name] = (sequence, row, head, element)
    return found


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    return replace(
        step,
        patches=tuple((at, names.get(name, name)) for at, name in step.patches),
        maps=tuple((names.get(name, name), geometry) for name, geometry in step.maps),
    )
