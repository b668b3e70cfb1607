"""Folds the heads of a GQA group into rows: one query for each sequence and many heads become a call of Hopper's forward.

A tile of decoding's kernel has up to 32 rows. With more heads that kernel reads their keys several times, and it multiplies 16
rows at once where the forward multiplies 64. The heads of a group lie one after the other, as rows of one head would. So with
other strides the same arrays are a call of one head for each kv head, whose rows are the heads of the group. All of them see
the keys that the query sees.
"""

from __future__ import annotations

from dataclasses import replace

from rawattn._call.binding import bind
from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import decode_tiles
from rawattn._kernels.sm90 import forward, forward_steps, tma
from rawattn._kernels.steps import Steps
from rawattn._kernels.target import Target

# The least number of (sequence, kv head) pairs for each SM: each pair is a query tile (docs/notes/decode.md).
_BUSY = 0.75
# Features that differ by head or by the query's position are not here: they would differ by row.
FEATURES = frozenset(("ragged", "right", "scale_first", "softcap", "paged", "float8"))


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not folded, else None. `is_whole` asks besides that no sequence is without its query."""
    if problem.packed or problem.rows_q != 1:
        return "a sequence has other than one query"
    if problem.num_splits is not None:
        return "the splits of its keys are given"
    if decode_tiles.sharing_keys(problem) == 1:
        return "a tile of decoding's kernel has all rows that share keys"
    if problem.batch * problem.nheads_kv < _BUSY * target.multiprocessors:
        return "decoding's kernel shares few sequences out at less cost"
    problem, target, operands = _folded(problem, target, operands)
    if not {"k", "v"}.isdisjoint(tma.unaligned(problem, operands)):
        return "keys and values would be copied first"
    return forward.supports(problem, target, operands)


def is_whole(structure: Structure) -> bool:
    """Whether every sequence has its query."""
    return not structure.q.length


def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
    """The launches of a call for which `is_whole` holds."""
    problem, target, operands = _folded(problem, target, operands)
    rows = problem.rows_q
    q = structure.q._replace(rows=rows, length_bound=rows)
    inner = forward_steps.steps(problem, structure._replace(q=q), operands, target)
    # The runtime's lengths count one row for each sequence, so blocks are counted here. No launch counts tiles of keys.
    lengths = bind(None, batch=problem.batch, rows_q=rows, rows_k=1)
    launches = tuple(
        step if isinstance(step.blocks, int) else replace(step, blocks=step.blocks.blocks(lengths))
        for step in inner.launches
    )
    return replace(inner, launches=launches)


def _folded(
    problem: Problem, target: Target, operands: Operands
) -> tuple[Problem, Target, Operands]:
    group = problem.group_heads
    folded = replace(
        problem,
        nheads_q=problem.nheads_kv,
        rows_q=group,
        max_seqlen_q=group,
        window_right=None,  # the only query is the last one, which sees all keys
    )
    strides = dict(operands.strides)
    for name in ("q", "out"):
        if name in strides:
            batch, _, head, element = strides[name]
            strides[name] = (batch, head, group * head, element)
    return folded, target, replace(operands, strides=strides)
