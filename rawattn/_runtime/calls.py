"""Prepares a call on one GPU from the form of its arrays: checks it, chooses its kernels and loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rawattn._call import problem, scores
from rawattn._call.binding import refuse_traced
from rawattn._call.checks import byte_range, check_apart, check_out
from rawattn._call.layout import Lengths
from rawattn._call.options import Options
from rawattn._call.pages import PagedLayout
from rawattn._call.structure import structure
from rawattn._interop import arrays
from rawattn._interop.arrays import HOST
from rawattn._interop.forward_mode import refuse_tangents
from rawattn._kernels.operands import Operands
from rawattn._runtime.option_arrays import caller_names_with_outputs
from rawattn._runtime.verbs import Verb
from rawattn._scores.program import ScoreText
from rawattn._strides import contiguous, ignoring_unit_axes

if TYPE_CHECKING:
    from rawattn._runtime.prepared import Prepared


class Call(NamedTuple):
    """A prepared call on one GPU, for all arrays of one form.

    results: shape and dtype of each output, None for one that is not wanted.
    allocated_outputs: index among the outputs, shape and dtype of each output that the library allocates.
    copies: for each input, whether it is copied to C order before every run; None if no input is.
    byte_extents: for each array in the verb's order, the distances in bytes from its address to its first byte and behind its
        last.
    """

    prepared: Prepared
    problem: problem.Problem
    lengths: Lengths
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]] | None, ...]
    allocated_outputs: tuple[tuple[int, tuple[int, ...], np.dtype[Any]], ...]
    copies: tuple[bool, ...] | None
    byte_extents: tuple[tuple[int, int], ...]

    def check_longest(self, lengths: Lengths) -> None:
        """ValueError if a sequence is longer than a bias or mask whose axes count positions inside sequences."""
        problem = self.problem
        shapes = scores.Shapes(
            np.dtype(np.float32),
            problem.batch,
            problem.nheads_q,
            problem.nheads_kv,
            problem.rows_q,
            problem.rows_k,
            problem.packed or problem.pages is not None,
        )
        for name in ("bias", "mask"):
            form = getattr(problem, name)
            if form is not None:
                scores.four_axes(name, form.given, shapes, lengths)


def prepare(
    verb: Verb,
    views: Sequence[Any],
    options: Options,
    flag: bool,
    device: int,
    pointers: int,
    framework: str,
    alignments: tuple[int, ...] = (),
) -> Call:
    """Checks a call on arrays of this form and prepares its launches.

    views: all arrays of the verb, with `shape`, `strides`, `dtype` and `device`. None for an input that is not given, and for
    an output that the library allocates or the call does not have.
    pointers: the addresses OR-ed together. alignments: the addresses of the options' arrays modulo 16.
    framework: that of the caller's arrays.
    """
    named = dict(zip(verb.inputs + verb.outputs, views, strict=True))
    described, lengths, results = describe(verb, named, options, flag, framework)
    shown_names = caller_names_with_outputs(verb, options)
    for shown, view in zip(shown_names, views, strict=True):
        if view is not None and view.device != device:
            raise ValueError(elsewhere(shown, view.device, device, verb.lead))
    form = structure(lengths)
    for other in form.devices:
        if other != device:
            name = of_layout(options.seqs, other)
            raise ValueError(elsewhere(name, other, device, verb.lead))
    inputs = [named[name] for name in verb.inputs]
    copied = {name for name in verb.inputs if _is_copied(verb, name, named[name])}
    for names in verb.same_strides:
        if len({ignoring_unit_axes(x.shape, x.strides) for x in map(named.__getitem__, names)}) > 1:
            copied.update(names)
    copies = tuple(name in copied for name in verb.inputs)
    strides: dict[str, tuple[int, ...]] = {}
    for name, x, copy in zip(verb.inputs, inputs, copies, strict=True):
        if x is not None and name not in verb.c_order:
            strides[name] = contiguous(x.shape, x.dtype.itemsize) if copy else x.strides
    ours = set()
    for name, result in zip(verb.outputs, results, strict=True):
        target = named[name]
        if target is not None:
            strides[name] = target.strides
        elif result is not None:
            ours.add(name)
            if name not in verb.c_order:
                strides[name] = contiguous(result[0], result[1].itemsize)
    of_options = {name: strides.pop(name) for name in (*verb.extra_inputs, *verb.gradients)}
    operands = Operands(
        strides,
        pointers % 16,
        frozenset(ours),
        of_options,
        dict(zip(verb.extra_inputs, alignments, strict=not verb.any_alignment)),
    )
    prepared = launches(verb, described, lengths, operands, flag, device)
    byte_extents = tuple((0, 0) if x is None else byte_range(x, 0) for x in views)
    allocated = tuple(
        (n, *result)
        for n, (name, result) in enumerate(zip(verb.outputs, results, strict=True))
        if result is not None and named[name] is None
    )
    return Call(
        prepared, described, lengths, results, allocated, copies if copied else None, byte_extents
    )


def launches(
    verb: Verb,
    described: problem.Problem,
    lengths: Lengths,
    operands: Operands,
    flag: bool,
    device: int,
) -> Prepared:
    """The launches of the fastest kernel family that supports a call, with their kernels loaded.

    Raises CompileError if a kernel does not compile; it is a ValueError too if the cause is a score function's text in C++.
    """
    from rawattn._compile.compiler import CompileError, TextError
    from rawattn._kernels import registry
    from rawattn._runtime import kernel
    from rawattn._runtime.prepared import Prepared

    form = structure(lengths)
    if form.ragged:
        described = replace(
            described,
            max_seqlen_q=form.q.length_bound,
            max_seqlen_k=form.k.length_bound,
            shared_lengths=form.shared,
        )
    target = kernel.target(device)
    family = registry.choose(verb.name, described, target, operands)
    steps = family.steps(described, form, operands, target, **verb.step_arguments(flag))
    try:
        return Prepared(steps, form, lengths, device, verb.names)
    except CompileError as error:
        text = described.score_mod
        if isinstance(text, ScoreText) and text.language == "cuda":
            from rawattn._scores.cuda_text import compile_error_message

            if message := compile_error_message(error.log, text):
                raise TextError(f"{message}\n{error}", error.log) from error
        raise


def describe(
    verb: Verb, named: dict[str, Any], options: Options, flag: bool, framework: str
) -> tuple[problem.Problem, Lengths, tuple[tuple[tuple[int, ...], np.dtype[Any]] | None, ...]]:
    """The call as a `Problem`, its sequences, and the shape and dtype of each output, once every check has passed."""
    refuse_traced(options.seqs)
    of_options = {name: named[name] for name in verb.extra_inputs}
    described, lengths = verb.describe(named, options, framework, of_options)
    verb.check(described, named, framework)
    check_written(verb, named)
    results = verb.results(described, named[verb.lead].dtype, flag)
    for name, result in zip(verb.outputs, results, strict=True):
        target = named[name]
        if target is None or result is None:
            continue
        shown = dict(
            zip(verb.inputs + verb.outputs, caller_names_with_outputs(verb, options), strict=True)
        )
        others = [(each, named[x]) for x, each in shown.items() if x != name]
        shape, dtype = result
        like = shown[name.removeprefix("d")] if name.startswith("d") else "q"
        check_out(target, shape=shape, dtype=dtype, others=others, name=shown[name], like=like)
    return described, lengths, results


def check_written(verb: Verb, named: Mapping[str, Any]) -> None:
    """ValueError if an input that the call changes shares memory with another input."""
    others = {name: named[name] for name in verb.inputs}
    for name in verb.inputs:
        if name in verb.written:
            check_apart(others.pop(name), others.items(), name)


def refuse_gradients(
    verb: Verb, options: Options, inputs: Sequence[Any], targets: Sequence[Any]
) -> None:
    """Raises if a gradient would be lost without notice.

    That is so for a tensor that requires a gradient if it is an array to write, or an input of a verb with
    `refuses_gradients`; and for any input with a forward-mode tangent.
    """
    names = caller_names_with_outputs(verb, options)
    count = len(inputs)
    refuse_gradients_of_read(verb, names[:count], inputs)
    arrays.refuse_gradients_of_written(names[count:], targets)


def refuse_gradients_of_read(verb: Verb, names: Sequence[str], inputs: Sequence[Any]) -> None:
    """The part of `refuse_gradients` that is about inputs. names: those by which the caller knows them."""
    refuse = arrays.refuse_gradients if verb.refuses_gradients else refuse_tangents
    refuse(names, inputs)


def _is_copied(verb: Verb, name: str, view: Any) -> bool:
    if view is None or 0 in view.shape or (name in verb.extra_inputs and name not in verb.dense):
        return False
    itemsize = view.dtype.itemsize
    if name in verb.c_order:
        dense = contiguous(view.shape, itemsize)
        return any(
            n > 1 and stride != wanted
            for n, stride, wanted in zip(view.shape, view.strides, dense, strict=True)
        )
    return bool(view.shape[-1] > 1 and view.strides[-1] != itemsize)


def elsewhere(name: str, device: int, other: int, of: str) -> str:
    """The message about an array that is not on the device of the array named `of`."""
    return f"{name}: on {name_of(device)}, but {of} is on {name_of(other)}; move them to one device"


def of_layout(seqs: Any, device: int) -> str:
    """The name of the caller's argument that has a layout's integers on this GPU."""
    if isinstance(seqs, PagedLayout):
        for name, array in (("seqlen_k", seqs.seqlen_k), ("block_table", seqs.indptr)):
            if array is None or isinstance(array, np.ndarray):
                continue
            if array.data.device_id == device:
                return name
    return "seqs"


def name_of(device: int) -> str:
    return "the host" if device == HOST else f"GPU {device}"
