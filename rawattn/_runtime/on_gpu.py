"""Runs calls on arrays of one framework on a GPU: finds or prepares the launches, allocates results, launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from rawattn._call.checks import byte_range, check_apart
from rawattn._call.layout import Lengths
from rawattn._call.options import Options, structural
from rawattn._call.structure import Structure, structure
from rawattn._eviction import evict_if_full
from rawattn._interop import arrays, streams
from rawattn._interop.advice import cast
from rawattn._interop.native import Native, Read, View
from rawattn._kernels.selection import selection
from rawattn._runtime import graphs
from rawattn._runtime.calls import Call, check_written, prepare
from rawattn._runtime.option_arrays import caller_names_with_outputs
from rawattn._runtime.verbs import Verb

Arrays = Sequence[Any]

# Prepared calls, by everything that they depend on. Addresses (but for alignment) and values of host integers are not part of
# the key.
_prepared: dict[Any, Call] = {}
_MAX_PREPARED = 512  # entries of `_prepared`


def run(
    verb: Verb,
    native: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
    memo: dict[Any, Any] | None = None,
) -> Sequence[Any]:
    """`dispatch.run` on a GPU. read: what `native` has read of inputs and targets. framework: that of the caller's arrays."""
    addresses, form, _ = read
    device: int = form[verb.lead_index * 4 + 3]
    if device != native.current_device():
        import cupy

        with cupy.cuda.Device(device):
            return run(verb, native, read, inputs, targets, options, flag, framework, values, memo)
    call, lengths, is_new = find_or_prepare(
        verb, native, read, inputs, targets, options, flag, framework
    )
    if not is_new:
        for target in targets:
            if target is not None:
                _check_reach(verb, call, native, addresses, inputs, targets, options)
                break
        if verb.written:
            named = zip(verb.inputs, inputs, strict=True)
            check_written(verb, {name: native.view(x) for name, x in named if x is not None})
        if verb.extra_inputs and lengths is not None:
            call.check_longest(lengths)
    if call.copies is not None:
        inputs = [
            native.contiguous(x) if copy else x for x, copy in zip(inputs, call.copies, strict=True)
        ]
        addresses = [0 if x is None else native.address(x) for x in (*inputs, *targets)]
    results = list(targets)
    first = len(inputs)
    for n, shape, dtype in call.allocated_outputs:
        if results[n] is None:
            results[n] = array = native.empty(shape, dtype, inputs[verb.lead_index])
            addresses[first + n] = native.address(array)
    addresses += values
    prepared, stream = call.prepared, native.stream(device)
    if call.copies is not None and not native.keeps_captured() and streams.is_capturing(stream):
        graphs.keep_forever(*itertools.compress(inputs, call.copies))
    if memo is not None and prepared.run_keeping is not None:
        prepared.run_keeping(addresses, stream, native, memo)
    else:
        prepared.run(addresses, stream, native, lengths or call.lengths)
    return results


def find_or_prepare(
    verb: Verb,
    native: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
) -> tuple[Call, Lengths | None, bool]:
    """The prepared call, the lengths (None without a layout), and whether the call was prepared only now."""
    addresses, form, _ = read
    call = lengths = None
    key: Any = None
    try:
        form_of_lengths: Structure | None = None
        if options.seqs is not None:
            lengths = verb.bind(options.seqs, inputs)
            form_of_lengths = structure(lengths)
        key = (verb, flag, form, form_of_lengths, structural(options), selection())
        if verb.extra_inputs:
            key = (*key, ored_addresses(verb, addresses) % 16, alignments(verb, addresses))
        call = _prepared.get(key)
    except (TypeError, ValueError, IndexError, AttributeError):
        key = None  # `_prepare_natives` raises the proper error
    if call is not None:
        return call, lengths, False
    call = _prepare_natives(verb, native, read, inputs, targets, options, flag, framework)
    if key is not None:
        evict_if_full(_prepared, _MAX_PREPARED)
        _prepared[key] = call
    return call, lengths, True


def overlap_bounds(call: Call, first: int) -> tuple[tuple[int, int], ...]:
    """For each input, the open interval of distances (output's address - input's) at which the first output overlaps it.

    first: the index of that output among the verb's arrays, which is the number of inputs.
    """
    low, high = call.byte_extents[first]
    return tuple((start - high, end - low) for start, end in call.byte_extents[:first])


class PossibleOverlap(NamedTuple):
    """An input that a call changes and another input, by their indices among the addresses.

    They may share memory if the difference of their addresses, changed - other, is between low and high. At `distance` they
    do not: this has been checked for the call that was prepared. Views of one array may interleave so.
    """

    changed: int
    other: int
    low: int
    high: int
    distance: int


def possible_overlaps(
    verb: Verb, call: Call, addresses: Sequence[int]
) -> tuple[PossibleOverlap, ...]:
    """The pairs of inputs that might share memory. addresses: those of inputs that have been checked not to."""
    found = []
    for n, name in enumerate(verb.inputs):
        if name not in verb.written:
            continue
        low, high = call.byte_extents[n]
        for m, other in enumerate(verb.inputs):
            if m > n or (m < n and other not in verb.written):
                start, end = call.byte_extents[m]
                found.append(
                    PossibleOverlap(n, m, start - high, end - low, addresses[n] - addresses[m])
                )
    return tuple(found)


class Forbidden(NamedTuple):
    """The addresses, between low and high, at which an input may share memory with a result that stays where it is.

    At `allowed` it does not: this has been checked for the call that was prepared. result, input: indices among the addresses.
    """

    result: int
    input: int
    low: int
    high: int
    allowed: int


def forbidden_addresses(
    inputs: Sequence[View | None], results: Sequence[View | None]
) -> tuple[Forbidden, ...]:
    """Those of each input beside each result. The arrays given have been checked not to share memory."""
    found = []
    for n, result in enumerate(results, len(inputs)):
        for m, other in enumerate(inputs):
            if result is None or other is None or 0 in result.shape or 0 in other.shape:
                continue
            (low, high), (start, end) = byte_range(result), byte_range(other, 0)
            found.append(Forbidden(n, m, low - end, high - start, other.address))
    return tuple(found)


def surely_disjoint(overlaps: Sequence[PossibleOverlap], addresses: Sequence[int]) -> bool:
    """Whether it is certain that no input that a call changes shares memory with another one."""
    for changed, other, low, high, distance in overlaps:
        if low < (found := addresses[changed] - addresses[other]) < high and found != distance:
            return False
    return True


def prepare_checked(
    verb: Verb,
    native: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
) -> tuple[Call, Lengths]:
    """Checks and prepares a call that is run later: the call, and its lengths."""
    framework = arrays.framework_of(inputs[verb.lead_index])
    call = _prepare_natives(verb, native, read, inputs, targets, options, flag, framework)
    return call, call.lengths


def _prepare_natives(
    verb: Verb,
    native: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
) -> Call:
    named = zip(caller_names_with_outputs(verb, options), (*inputs, *targets), strict=True)
    views = [None if x is None else _view(name, native, x) for name, x in named]
    pointers = ored_addresses(verb, read[0])
    found = alignments(verb, read[0])
    return prepare(
        verb, views, options, flag, read[1][verb.lead_index * 4 + 3], pointers, framework, found
    )


def ored_addresses(verb: Verb, addresses: Sequence[int]) -> int:
    """The addresses of inputs and outputs OR-ed together, without `extra_inputs`: the last bits give the alignment of all.

    Kernels choose the width of accesses to `extra_inputs` by the alignment of each.
    """
    count = len(verb.inputs)
    found = 0
    for address in addresses[: count - len(verb.extra_inputs)]:
        found |= address
    for address in addresses[count : count + len(verb.outputs)]:
        found |= address
    return found


def alignments(verb: Verb, addresses: Sequence[int]) -> tuple[int, ...]:
    """The addresses of `extra_inputs` modulo 16; empty for a verb whose extra inputs may have any alignment."""
    if verb.any_alignment:
        return ()
    last = len(verb.inputs)
    return tuple(address % 16 for address in addresses[last - len(verb.extra_inputs) : last])


def _check_reach(
    verb: Verb,
    call: Call,
    native: Native,
    addresses: Sequence[int],
    inputs: Arrays,
    targets: Arrays,
    options: Options,
) -> None:
    """The check of `check_out` that depends on addresses: ValueError if an array to write overlaps another array."""
    spans = [
        (address + low, address + high)
        for address, (low, high) in zip(addresses, call.byte_extents, strict=True)
    ]
    for n, target in enumerate(targets, len(inputs)):
        if target is None:
            continue
        low, high = spans[n]
        for m, (other_low, other_high) in enumerate(spans):
            if m != n and low < other_high and other_low < high:
                shown = caller_names_with_outputs(verb, options)
                others = [
                    (name, native.view(x))
                    for other, (name, x) in enumerate(zip(shown, (*inputs, *targets), strict=True))
                    if x is not None and other != n
                ]
                check_apart(native.view(target), others, shown[n])
                break


def _view(name: str, native: Native, array: Any) -> View:
    try:
        return native.view(array)
    except TypeError as error:
        more = ", and float8_e4m3fn" if name.endswith("_pages") else ""
        raise TypeError(
            f"{name}: {error}; accepted are float16, bfloat16 and float32{more}: convert it, as by "
            f"{cast(arrays.framework_of(array), name, 'float32')}"
        ) from None
