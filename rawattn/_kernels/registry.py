"""The families of kernels of each verb, the fastest first, and which of them runs a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels import aligned_bias, gathered
from rawattn._kernels.features import features
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import append, combine
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import backward_steps as portable_backward_steps
from rawattn._kernels.portable import decode as portable_decode
from rawattn._kernels.portable import forward as portable_forward
from rawattn._kernels.selection import selection
from rawattn._kernels.sm90 import decode as sm90_decode
from rawattn._kernels.sm90 import few_rows, folded
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_steps as sm90_forward_steps
from rawattn._kernels.steps import Steps
from rawattn._kernels.target import Target

Supports = Callable[[Problem, Target, Operands], str | None]


class Family(NamedTuple):
    """A family of kernels.

    features: the names of the features that its kernels have code for.

    supports: returns None, or why a call with these features is not for it.

    steps: returns the launches of a call that it supports, from (problem, structure of the lengths, operands, target) and what
    the verb adds by name.

    around: whether its launches surround those of another, inner family. `selection.only` then restricts the inner one.
    """

    name: str
    features: frozenset[str]
    supports: Supports
    steps: Callable[..., Steps]
    around: bool = False


def _gathered(verb: str) -> Family:
    def steps(
        problem: Problem, structure: Structure, operands: Operands, target: Target, **more: Any
    ) -> Steps:
        call = gathered.by_lengths(problem, operands)
        family = choose(verb, call.problem, target, call.operands) if call is not None else None
        # Other families would need an order of the sequences, which depends on lengths that only the GPU counts.
        if call is None or family is None or family.name != "decode":
            call = gathered.by_mask(problem, operands)
            family = choose(verb, call.problem, target, call.operands)
        inner = family.steps(call.problem, call.structure, call.operands, target, **more)
        return call.around(inner, target)

    return Family("gathered", gathered.FEATURES, gathered.supports, steps, around=True)


def _with_aligned_bias(verb: str) -> Family:
    def steps(
        problem: Problem, structure: Structure, operands: Operands, target: Target, **more: Any
    ) -> Steps:
        copied = aligned_bias.operands_of(problem, operands)
        family = choose(verb, problem, target, copied)
        if family.name == "decode":  # reads a bias as fast where it lies
            return family.steps(problem, structure, operands, target, **more)
        inner = family.steps(problem, structure, copied, target, **more)
        return aligned_bias.around(inner, problem, operands, target)

    ours = aligned_bias
    supports = ours.supports_forward if verb == "attention" else ours.supports
    return Family("aligned_bias", ours.FEATURES, supports, steps, around=True)


def _folded(verb: str) -> Family:
    def steps(problem: Problem, structure: Structure, operands: Operands, target: Target) -> Steps:
        if folded.is_whole(structure):
            return folded.steps(problem, structure, operands, target)
        others = tuple(each for each in FAMILIES[verb] if each.supports is not folded.supports)
        family = _first(others, verb, problem, target, operands)
        return family.steps(problem, structure, operands, target)

    return Family("sm90", folded.FEATURES, folded.supports, steps)


_DECODE = Family(
    "decode", portable_decode.FEATURES, portable_decode.supports, portable_decode.steps
)
_SM90_DECODE = Family("decode", sm90_decode.FEATURES, sm90_decode.supports, sm90_decode.steps)

# Where these support a call, few rows meet many keys, and they are faster than the forward.
_SM90_DECODE_FIRST = _SM90_DECODE._replace(supports=few_rows.supports_mapped)
_DECODE_FIRST = _DECODE._replace(supports=few_rows.supports_portable)

_SM90 = Family("sm90", sm90_forward.FEATURES, sm90_forward.supports, sm90_forward_steps.steps)

FAMILIES = {
    "attention": (
        _gathered("attention"),
        _with_aligned_bias("attention"),
        _folded("attention"),
        _SM90_DECODE_FIRST,
        _DECODE_FIRST,
        _SM90,
        _SM90_DECODE,
        _DECODE,
        Family(
            "portable",
            portable_forward.FEATURES,
            portable_forward.supports,
            portable_forward.steps,
        ),
    ),
    "paged_attention": (
        _folded("paged_attention"),
        _SM90_DECODE_FIRST,
        _DECODE_FIRST,
        _SM90,
        _SM90_DECODE,
        _DECODE,
        Family(
            "portable",
            portable_forward.FEATURES,
            portable_forward.supports,
            portable_forward.steps,
        ),
    ),
    "append_kv": (Family("portable", append.FEATURES, append.supports, append.steps),),
    "combine": (Family("portable", combine.FEATURES, combine.supports, combine.steps),),
    "attention_backward": (
        _gathered("attention_backward"),
        _with_aligned_bias("attention_backward"),
        Family(
            "portable",
            portable_backward.FEATURES,
            portable_backward.supports,
            portable_backward_steps.steps,
        ),
    ),
}


def choose(verb: str, problem: Problem, target: Target, operands: Operands) -> Family:
    """The first family that supports a call of a verb, of those that the context allows."""
    return _first(FAMILIES[verb], verb, problem, target, operands)


def _first(
    families: Sequence[Family], verb: str, problem: Problem, target: Target, operands: Operands
) -> Family:
    only = selection().family
    wanted = features(problem).active()
    for family in families:
        # The last family supports every call. It runs even if another was asked for, where that one does not apply.
        asked = only in (None, family.name) or family.around or family is families[-1]
        if (
            asked
            and wanted <= family.features
            and family.supports(problem, target, operands) is None
        ):
            return family
    missing = ", ".join(sorted(wanted - families[-1].features))
    raise NotImplementedError(f"{missing}: no kernel of {verb} has it in this version")
