"""Calls whose bias is copied to aligned rows first: its own rows are not aligned, and each element belongs to several scores.

Another family's kernels follow, which read the copy instead of the bias.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rawattn._call.problem import Problem
from rawattn._compile.compiler import Source
from rawattn._kernels import features, helper_params, score_params, structs
from rawattn._kernels.operands import ITEMSIZE, WIDEST, Operands
from rawattn._kernels.sm90 import bias_slots, forward
from rawattn._kernels.source import round_up
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, Steps, checked, patches
from rawattn._kernels.target import Target
from rawattn._strides import Strides, contiguous

FEATURES = features.names() - {"paged"}

# The largest copy, as a fraction of the device's memory.
_MOST_OF_MEMORY = 1 / 64

# The fewest scores for each element of the bias, and the fewest query rows, for which a copy saves more time than it takes
# (docs/notes/scores.md).
LEAST_SCORES_PER_ELEMENT, LEAST_ROWS = 3, 32

THREADS = 256
_COPY = "aligned_bias"


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why the bias of a call is not copied, else None."""
    form = problem.bias
    if form is None or ITEMSIZE[form.dtype] != 2 or not form.dense:
        return "it has no bias of 16 bits whose keys lie side by side"
    if "bias" not in operands.alignments:
        return "where its bias begins is not known"
    shape = _shape(problem, operands)
    batches, nheads, rows, _ = shape
    if target.memory is not None and 2 * math.prod(shape) > _MOST_OF_MEMORY * target.memory:
        return "a copy of its bias takes too much memory"
    if rows < LEAST_ROWS:
        return "its bias has few rows"
    if problem.batch * problem.nheads_q < LEAST_SCORES_PER_ELEMENT * batches * nheads:
        return "few scores share an element of its bias"
    if not any(
        stride % WIDEST for stride in (operands.alignments["bias"], *_apart(problem, operands))
    ):
        return "its bias has aligned rows"
    return None


def supports_forward(problem: Problem, target: Target, operands: Operands) -> str | None:
    """The same for a forward. Only Hopper's forward gains by a copy; other kernels read a bias element by element."""
    return forward.supports(problem, target, operands) or supports(problem, target, operands)


def operands_of(problem: Problem, operands: Operands) -> Operands:
    """The operands with the copy in place of the bias."""
    shape = _shape(problem, operands)
    strides = contiguous(shape, 2)
    own = tuple(stride if n > 1 else 0 for stride, n in zip(strides, shape, strict=True))
    return replace(
        operands,
        option_strides={**operands.option_strides, "bias": own},
        alignments={**operands.alignments, "bias": 0},
        whole_rows=operands.whole_rows | {"bias"},
    )


def around(inner: Steps, problem: Problem, operands: Operands, target: Target) -> Steps:
    """The copy, and behind it `inner`: the steps that a family made from `operands_of`. operands: the call's own."""
    assert problem.bias is not None
    shape = _shape(problem, operands)
    lines = math.prod(shape[:-1])
    apart = score_params.elements(_apart(problem, operands), problem.bias.dtype)
    values = {
        **dict(zip(("batch", "head", "row"), apart, strict=True)),
        "lines": lines,
        **{"nheads": shape[1], "rows": shape[2], "keys": problem.bias.shape[3]},
    }
    copy = Step(
        source=source(),
        blocks=checked("bias", -(-lines // (THREADS // target.wave)), 1),
        threads=THREADS,
        params=structs.fill(helper_params.ALIGN_BIAS, values),
        patches=patches(helper_params.ALIGN_BIAS, **{"from": "bias", "to": _COPY}),
    )
    return replace(
        inner,
        launches=(copy, *map(_renamed, inner.launches)),
        scratch={**inner.scratch, _COPY: 2 * math.prod(shape)},
    )


def source() -> Source:
    return _source(
        "rawattn_align_bias",
        "portable/align_bias.cu",
        "portable align_bias",
        helper_params.ALIGN_BIAS,
        constants={"kThreads": THREADS},
    )


def _apart(problem: Problem, operands: Operands) -> Strides:
    """Strides of the bias in bytes for (batch, head, row): 0 where the bias is the same for all."""
    return bias_slots.strides(problem, operands)[:3]


def _shape(problem: Problem, operands: Operands) -> tuple[int, ...]:
    """The shape of the copy: one element along an axis along which the bias is the same, keys rounded up to 16 bytes."""
    assert problem.bias is not None
    *others, keys = problem.bias.shape
    apart = _apart(problem, operands)
    own = (n if stride else 1 for n, stride in zip(others, apart, strict=True))
    return (*own, round_up(keys, WIDEST // 2))


def _renamed(step: Step) -> Step:
    """The step with the copy in place of the bias. One without a bias is returned itself: `Steps.lists` compares identities."""
    own = {name for _, name in step.patches} | {name for name, _ in step.maps}
    if "bias" not in own:
        return step
    return replace(
        step,
        patches=tuple((at, _COPY if name == "bias" else name) for at, name in step.patches),
        maps=tuple((_COPY if name == "bias" else name, each) for name, each in step.maps),
    )
