"""The families of kernels of each verb, the fastest first, and which of them runs a call.

The modules of a family are imported when a call first asks it: making their classes takes Python longer than the first launch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rawattn._call.problem import Problem
from rawattn._call.structure import Structure
from rawattn._kernels.features import features
from rawattn._kernels.operands import Operands
from rawattn._kernels.selection import selection
from rawattn._kernels.sm90 import few_rows
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


def _by_all_calls(problem: Problem, target: Target) -> bool:
    return True


class Candidate(NamedTuple):
    """A family of a verb. load: imports and returns it. asked: whether a call asks it at all, which needs no import."""

    load: Callable[[], Family]
    asked: Callable[[Problem, Target], bool] = _by_all_calls


def _gathered(verb: str) -> Candidate:
    @functools.cache
    def load() -> Family:
        from rawattn._kernels import gathered

        def steps(
            problem: Problem,
            structure: Structure,
            operands: Operands,
            target: Target,
            **more: Any,
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

    return Candidate(load, lambda problem, _: problem.mask is not None and problem.mask.kept > 0)


def _with_aligned_bias(verb: str) -> Candidate:
    @functools.cache
    def load() -> Family:
        from rawattn._kernels import aligned_bias

        def steps(
            problem: Problem,
            structure: Structure,
            operands: Operands,
            target: Target,
            **more: Any,
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

    return Candidate(load, lambda problem, _: problem.bias is not None)


def _folded(verb: str) -> Candidate:
    @functools.cache
    def load() -> Family:
        from rawattn._kernels.sm90 import folded

        def steps(
            problem: Problem, structure: Structure, operands: Operands, target: Target
        ) -> Steps:
            if folded.is_whole(structure):
                return folded.steps(problem, structure, operands, target)
            others = [each for each in CANDIDATES[verb] if each.load is not load]
            family = _first(others, verb, problem, target, operands)
            return family.steps(problem, structure, operands, target)

        return Family("sm90", folded.FEATURES, folded.supports, steps)

    return Candidate(load, lambda problem, _: problem.rows_q == 1)


def _family(name: str, module: str, module_of_steps: str | None = None) -> Callable[[], Family]:
    """A family by the names of its modules below `rawattn._kernels`: that of FEATURES and `supports`, and that of `steps`."""

    @functools.cache
    def load() -> Family:
        chosen, launched = (
            importlib.import_module(f"rawattn._kernels.{each}")
            for each in (module, module_of_steps or module)
        )
        return Family(name, chosen.FEATURES, chosen.supports, launched.steps)

    return load


_sm90 = _family("sm90", "sm90.forward", "sm90.forward_steps")
_sm90_decode = _family("decode", "sm90.decode")
_decode = _family("decode", "portable.decode")
_portable = _family("portable", "portable.forward")
_portable_backward = _family("portable", "portable.backward", "portable.backward_steps")
_append = _family("portable", "portable.append")
_combine = _family("portable", "portable.combine")

_FORWARDS = (
    # Few rows on many keys: decoding is faster than the forward.
    Candidate(_sm90_decode, few_rows.are_few),
    Candidate(_decode, few_rows.are_few),
    Candidate(_sm90),
    Candidate(_sm90_decode),
    Candidate(_decode),
    Candidate(_portable),
)

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "attention": (
        _gathered("attention"),
        _with_aligned_bias("attention"),
        _folded("attention"),
        *_FORWARDS,
    ),
    "paged_attention": (_folded("paged_attention"), *_FORWARDS),
    "append_kv": (Candidate(_append),),
    "combine": (Candidate(_combine),),
    "attention_backward": (
        _gathered("attention_backward"),
        _with_aligned_bias("attention_backward"),
        Candidate(_portable_backward),
    ),
}


def choose(verb: str, problem: Problem, target: Target, operands: Operands) -> Family:
    """The first family that supports a call of a verb, of those that the context allows."""
    return _first(CANDIDATES[verb], verb, problem, target, operands)


def supporting(verb: str, problem: Problem, target: Target, operands: Operands) -> Iterator[Family]:
    """All families that support a call of a verb."""
    return _supporting(CANDIDATES[verb], problem, target, operands)


def _supporting(
    candidates: Sequence[Candidate], problem: Problem, target: Target, operands: Operands
) -> Iterator[Family]:
    wanted = features(problem).active()
    for candidate in candidates:
        if candidate.asked(problem, target):
            family = candidate.load()
            if wanted <= family.features and family.supports(problem, target, operands) is None:
                yield family


def _first(
    candidates: Sequence[Candidate],
    verb: str,
    problem: Problem,
    target: Target,
    operands: Operands,
) -> Family:
    only, last = selection().family, candidates[-1].load
    for family in _supporting(candidates, problem, target, operands):
        # The last family supports every call. It runs even if another was asked for, where that one does not apply.
        if only in (None, family.name) or family.around or family == last():
            return family
    missing = ", ".join(sorted(features(problem).active() - last().features))
    raise NotImplementedError(f"{missing}: no kernel of {verb} has it in this version")
