"""Turns the arrays of a call's options into inputs of its verb, and gradients of these arrays into outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from rawattn._call import option_advice
from rawattn._call.dtypes import DTYPES
from rawattn._call.gradients import Gradients, check_given
from rawattn._call.options import (
    ARRAYS,
    Options,
    check_array,
    dropout_p,
    for_message,
    no_score_mod,
)
from rawattn._call.problem import Problem
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime.verbs import Shape, Verb
from rawattn._scores.program import ScoreText
from rawattn._scores.score_mod import ScoreMod, require_float32, require_gradient

_arrays_of = attrgetter(*ARRAYS)
_ANGLES = {"cos": "rotary[0]", "sin": "rotary[1]"}  # what the caller knows these inputs as
_SEED_MASK = 2**64 - 1  # kernels take the low 64 bits of a seed


class OptionsSplit(NamedTuple):
    """The result of `with_arrays`.

    verb: has the options' arrays among its inputs. arrays: these arrays. values: numbers of options for the kernels.
    options: the options without arrays, which can be compared and hashed.
    """

    verb: Verb
    arrays: tuple[Any, ...]
    values: tuple[int, ...]
    options: Options


def with_arrays(
    verb: Verb, options: Options, gradients: tuple[str, ...] = (), q: Any = None
) -> OptionsSplit:
    """Takes the arrays out of the options.

    gradients: the names of a backward's outputs for these arrays. q: a BlockMask is moved to the device of this array; None
    leaves it where it is.

    TypeError, naming the option or the captured array, for an object that is no array and for captured float64.
    NotImplementedError for a score function without a derivative, if the verb is one whose caller takes gradients.
    """
    if (
        all(x is None for x in _arrays_of(options))
        and options.score_mod is None
        and (type(options.dropout_p) is float and options.dropout_p == 0)
    ):
        return OptionsSplit(verb, (), (), options)
    names: list[str] = []
    arrays: list[Any] = []
    values: tuple[int, ...] = ()
    form = None
    for name in ARRAYS:
        array = getattr(options, name)
        if array is None:
            continue
        if name == "mask" and isinstance(array, BlockMask):
            form = array.form
            names += ("mask_bits", "mask_map", "mask_keys")
            names += ("mask_kept",) if form.kept else ()
            arrays += array.arrays if q is None else array.on_device_of(q)
            continue
        check_array(name, array)
        names.append(name)
        arrays.append(array)
    text = None
    if options.score_mod is not None:
        if not isinstance(options.score_mod, ScoreMod):
            raise no_score_mod(options.score_mod)
        require_float32(options.score_mod.text)
        if not verb.refuses_gradients:  # the caller computes gradients
            require_gradient(options.score_mod.text)
        text = (options.score_mod.text, options.score_mod.scalars)
        names += (f"captured{n}" for n in range(len(options.score_mod.arrays)))
        arrays += options.score_mod.arrays.values()
    seed, drawn = options.seed, dropout_p(options) > 0
    if hasattr(seed, "__dlpack__"):
        if drawn:
            names.append("seed")
            arrays.append(seed)
    elif seed is not None:
        # Only dropout reads a seed, but one of a wrong type is refused without dropout too.
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(
                f"seed: got {for_message(seed)}, expected an int, or an integer array of one element"
                f"{option_advice.seed(seed)}"
            )
        if drawn:
            values = (int(seed) & _SEED_MASK,)
    left = options._replace(**{**dict.fromkeys(ARRAYS), "mask": form}, score_mod=text, seed=0)
    found = extended(verb, tuple(names), ("seed_value",) if values else (), gradients)
    return OptionsSplit(found, tuple(arrays), values, left)


def _gradient(problem: Problem, name: str) -> tuple[Shape, np.dtype[Any]]:
    """The shape and dtype of the gradient `name` of an option's array, which are those of the array."""
    if name.startswith("dcaptured"):
        form = problem.captured[int(name.removeprefix("dcaptured"))]
    else:
        form = getattr(problem, name.removeprefix("d"))
    return form.given, DTYPES[form.dtype]


def named_gradients(
    into: Gradients, options: Options, want_dbias: bool | None
) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names of the gradients of options' arrays that a call has, and the caller's arrays to write them to, or None."""
    names: list[str] = []
    if options.bias is not None and (want_dbias is None or want_dbias):
        names.append("dbias")
    if options.sink_logits is not None:
        names.append("dsink_logits")
    score_mod = options.score_mod
    captured = differentiated(score_mod.text if isinstance(score_mod, ScoreMod) else None)
    names += (f"dcaptured{n}" for n in captured)
    return tuple(names), arrays_to_write(into, names, captured)


def arrays_to_write(
    into: Gradients, names: Sequence[str], captured: Mapping[int, str]
) -> tuple[Any, ...]:
    """The caller's array for each gradient of an option's array, None for one that is not given.

    names: the gradients of options' arrays that the call has. captured: see `differentiated`.
    ValueError for an array that is for another gradient.
    """
    check_given(into, names, captured.values())
    given = into.captured or {}
    return tuple(
        given.get(captured[int(name.removeprefix("dcaptured"))])
        if name.startswith("dcaptured")
        else getattr(into, name)
        for name in names
    )


def differentiated(text: ScoreText | None) -> dict[int, str]:
    """The names of the captured arrays whose gradients are wanted, by their indices. text: None without a score function."""
    if text is None:
        return {}
    return {n: name for n, (name, *_) in enumerate(text.arrays) if name in text.wrt}


@lru_cache(maxsize=256)
def extended(
    verb: Verb, extra_inputs: tuple[str, ...], values: tuple[str, ...], gradients: tuple[str, ...]
) -> Verb:
    """A verb with more inputs (`extra_inputs`), numbers for kernels (`values`) and outputs (`gradients` of options' arrays)."""

    def results(
        problem: Problem, dtype: np.dtype[Any], flag: bool
    ) -> tuple[tuple[Shape, np.dtype[Any]] | None, ...]:
        return (
            *verb.results(problem, dtype, flag),
            *(_gradient(problem, name) for name in gradients),
        )

    return replace(
        verb,
        inputs=verb.inputs + extra_inputs,
        outputs=verb.outputs + gradients,
        optional=verb.optional | set(extra_inputs),
        results=results,
        padding=verb.padding + (0.0,) * len(gradients),
        extra_inputs=verb.extra_inputs + extra_inputs,
        gradients=gradients,
        values=verb.values + values,
    )


def caller_names_with_outputs(verb: Verb, options: Options) -> tuple[str, ...]:
    """`caller_names`, then the names of the outputs. Gradients of captured arrays are entries of ``into.captured``."""
    names: tuple[str, ...] = ()
    if options.score_mod is not None and verb.gradients:
        names = tuple(name for name, *_ in options.score_mod[0].arrays)
    results = (
        f"captured[{names[int(name.removeprefix('dcaptured'))]!r}]"
        if name.startswith("dcaptured")
        else name
        for name in verb.outputs
    )
    return (*caller_names(verb, options), *(f"{verb.prefix}{name}" for name in results))


def caller_names(verb: Verb, options: Options) -> tuple[str, ...]:
    """The names by which the caller knows the inputs.

    Those of a BlockMask's arrays are "mask", those of captured arrays are the names in the ScoreMod, and those of angles are
    entries of `rotary`. options: as `with_arrays` returned them.
    """
    if not verb.extra_inputs:
        return verb.inputs
    captured: tuple[str, ...] = ()
    if options.score_mod is not None:
        captured = tuple(name for name, *_ in options.score_mod[0].arrays)
    return tuple(
        "mask"
        if name.startswith("mask_")
        else captured[int(name.removeprefix("captured"))]
        if name.startswith("captured")
        else _ANGLES.get(name, name)
        for name in verb.inputs
    )
