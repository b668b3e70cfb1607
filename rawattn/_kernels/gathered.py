"""Calls whose rows all share a list of keys: K and V of those keys are gathered, and attention to them alone follows.

Another family's kernels compute that attention on the gathered arrays. A list need not be full, and a row may see fewer keys
than its list has. Where rows see all of their list and decoding's kernels take the inner call, a list becomes a sequence with
as many keys as it has. Otherwise a mask of bits says which of the gathered keys each row sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rawattn._call.binding import bind
from rawattn._call.layout import Lengths
from rawattn._call.options import ArrayForm
from rawattn._call.problem import Problem
from rawattn._call.structure import Structure, structure
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import kept_setup
from rawattn._kernels.portable.kept_setup import KeptRows, Mask
from rawattn._kernels.steps import Lists, Step, Steps
from rawattn._kernels.target import Target
from rawattn._masks import layout
from rawattn._strides import Strides

# Listed one by one, since gathering changes the positions of keys, which a new feature may read. Sequences of different lengths
# have no lists.
_SEEN = ("left", "right", "top_left", "positions", "block_mask")
FEATURES = frozenset((*_SEEN, "scale_first", "softcap", "sink_logits", "paged", "float8"))

# A call is gathered if it has at least this many keys for each kept one. Gathered rows are read, written and read again; from
# this ratio on that pays for few queries, too.
LEAST_KEYS_PER_KEPT = 2

# Names of scratch, by the names of the arrays for which the inner call reads or writes it.
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
    if LEAST_KEYS_PER_KEPT * mask.kept > problem.rows_k:
        return "most keys are kept"
    return None


@dataclass(frozen=True, slots=True)
class Gathered:
    """A call's attention to its kept keys alone: the inner call that another family runs."""

    problem: Problem
    structure: Structure
    operands: Operands
    _lengths: Lengths
    _rows: Mapping[str, KeptRows]

    def around(self, inner: Steps, target: Target) -> Steps:
        """The steps of that family, behind one that gathers and, in a backward, before one that scatters."""
        names = {**_OTHERS, **{name: rows.copy for name, rows in self._rows.items()}}
        keys, values = (self._rows[name] for name in _INPUTS)
        scratch = {rows.copy: rows.nbytes for rows in self._rows.values()}
        mask = self.problem.mask
        if mask is None:
            # Each kv head with a list of its own is a sequence of the inner call.
            lists = self.problem.batch // keys.problem.batch
            before = kept_setup.by_lengths(keys, values, lists, target)
            scratch["kept_lengths"] = 4 * self.problem.batch
        else:
            before = kept_setup.by_mask(
                keys, values, Mask(mask.shape, inner.lists.sub_tasks), target
            )
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
            lists=Lists(),  # each run gathers anew, so no lists are kept
        )

    def _blocks(self, step: Step) -> int:
        """Blocks counted from the inner call's lengths: the lengths that the runtime has are those of all keys."""
        return step.blocks if isinstance(step.blocks, int) else step.blocks.blocks(self._lengths)


def by_mask(problem: Problem, operands: Operands) -> Gathered:
    """The inner call with a mask, for any family. The call must be supported."""
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
    """The inner call with lengths, for a family that needs no order of sequences. The call must be supported.

    None where some row does not see all of its list, or where heads with lists of their own cannot become sequences.
    """
    if kept_setup.limits(problem) is not None:
        return None
    found = _rows(problem, operands)
    strides = {**operands.strides, **{name: rows.strides for name, rows in found.items()}}
    inner = replace(_unlimited(problem), mask=None, ragged=True)
    heads = problem.mask.shape[1]
    if heads > 1:
        group = problem.nheads_q // heads
        of_heads = _of_heads(strides, heads, group, problem.batch)
        # With heads as sequences, all sequences share one set of sink logits, so these cannot differ by kv head.
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
    """Strides of the same arrays where each kv head, with its query heads, is a sequence. None where no strides say that.

    For kept keys there always are such strides, since the heads of a sequence come one after the other.
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
