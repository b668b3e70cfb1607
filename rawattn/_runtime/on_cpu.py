"""Calls on NumPy arrays by the CPU backend. The checks of a call are kept for later calls like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn._call import layout
from rawattn._call.layout import Lengths
from rawattn._call.options import Options, structural
from rawattn._call.problem import Problem
from rawattn._call.structure import structure
from rawattn._eviction import evict_if_full
from rawattn._interop import arrays
from rawattn._runtime.calls import check_written, describe
from rawattn._runtime.verbs import Verb
from rawattn._scores.numpy_eval import require_expression
from rawattn._scores.program import ScoreText

Arrays = Sequence[Any]

# Results of `described`, by everything that they depend on: forms of arrays, structure of lengths, options.
_known: dict[Any, tuple[Problem, Lengths, Any]] = {}
_MAX_KNOWN = 512


def run(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """Runs a call on NumPy arrays by the CPU backend."""
    problem, lengths, specs = described(verb, inputs, targets, options, flag, framework)
    results = []
    for target, spec, padding in zip(targets, specs, verb.padding, strict=True):
        result = target
        if target is None and spec is not None:
            result = np.empty(*spec) if framework == "numpy" else arrays.empty_host(*spec)
            if problem.ragged:  # otherwise the backend writes every row
                result[...] = padding
        results.append(result)
    extras: dict[str, Any] = {}
    host_lengths = layout.host_lengths(lengths) if problem.ragged else None
    if verb.extra_inputs or values:
        count = len(inputs) - len(verb.extra_inputs)
        extras = dict(zip(verb.extra_inputs + verb.values, (*inputs[count:], *values), strict=True))
        inputs = inputs[:count]
    verb.cpu(problem, host_lengths, inputs, results, flag, extras, verb.gradients)
    return results


def described(
    verb: Verb, inputs: Arrays, targets: Arrays, options: Options, flag: bool, framework: str
) -> tuple[Problem, Lengths, Any]:
    """`calls.describe` for NumPy arrays, kept for later calls like this one, which pass the same checks."""
    key: Any = None
    lengths = None
    # An array to write is checked for overlap with all other arrays at every call.
    if all(target is None for target in targets):
        try:
            form_of_lengths = None
            if options.seqs is not None:
                lengths = verb.bind(options.seqs, inputs)
                most = lengths.q.max_seqlen, lengths.k.max_seqlen
                form_of_lengths = structure(lengths), most
            forms = [None if x is None else (x.shape, x.dtype) for x in inputs]
            strides = [x.strides for x in inputs[len(inputs) - len(verb.extra_inputs) :]]
            if verb.written:
                named = zip(verb.inputs, inputs, strict=True)
                strides += [x.strides for name, x in named if name in verb.written]
            key = (verb, flag, *forms, *strides, form_of_lengths, structural(options))
            known = _known.get(key)
            if known is not None:
                check_written(verb, dict(zip(verb.inputs, inputs, strict=True)))
                problem, bound, specs = known
                return problem, lengths or bound, specs
        except (TypeError, ValueError, IndexError, AttributeError):
            key = None  # `describe` raises the proper error
    found = describe(verb, dict(verb.named(inputs, targets)), options, flag, framework)
    if isinstance(text := found[0].score_mod, ScoreText):
        require_expression(text)
    if key is not None:
        evict_if_full(_known, _MAX_KNOWN)
        _known[key] = found
    return found
