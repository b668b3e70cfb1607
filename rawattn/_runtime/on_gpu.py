"""Calls whose arrays lie on GPUs, of one framework: their launches found or prepared, results made, launches made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from rawattn._call.checks import check_apart
from rawattn._call.hints import cast
from rawattn._call.layout import Lengths
from rawattn._call.options import Options, structural
from rawattn._call.structure import Structure, structure
from rawattn._interop import arrays
from rawattn._interop.native import Native, Read, View
from rawattn._kernels.selection import selection
from rawattn._runtime.calls import Call, prepare
from rawattn._runtime.verbs import Verb

Arrays = Sequence[Any]

# Calls prepared earlier, by everything that decides them but addresses and host integers.
_prepared: dict[Any, Call] = {}
_MAX_PREPARED = 512
_prepared_lock = threading.Lock()


def run(
    verb: Verb,
    own: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """`dispatch.run` on what `own` has read of these arrays. framework: that of the caller's."""
    addresses, form, together, _ = read
    device: int = form[verb.q * 4 + 3]
    if device != own.current_device():
        import cupy

        with cupy.cuda.Device(device):
            return run(verb, own, read, inputs, targets, options, flag, framework, values)
    if verb.extras:
        together = _together(verb, addresses)
    call = lengths = None
    key: Any = None
    try:
        form_of_lengths: Structure | None = None
        if options.seqs is not None:
            lengths = verb.bind(options.seqs, inputs)
            form_of_lengths = structure(lengths)
        # 16 bytes is the widest access there is: of an address only its place in them matters.
        key = (
            verb,
            flag,
            together % 16,
            form,
            form_of_lengths,
            structural(options),
            selection(),
        )
        if verb.extras:
            key = (*key, places(verb, addresses))
        call = _prepared.get(key)
    except (TypeError, ValueError, IndexError, AttributeError):
        key = None  # describing the call tells what is wrong with it
    if call is None:
        call = _prepare_natives(verb, own, read, inputs, targets, options, flag, framework)
        if key is not None:
            _remember(key, call)
    else:
        for target in targets:
            if target is not None:
                _check_reach(verb, call, own, addresses, inputs, targets)
                break
        if verb.extras and lengths is not None:
            call.check_longest(lengths)
    if call.copies is not None:
        inputs = [
            own.contiguous(x) if copy else x for x, copy in zip(inputs, call.copies, strict=True)
        ]
        addresses = [0 if x is None else own.address(x) for x in (*inputs, *targets)]
    results = list(targets)
    first = len(inputs)
    for n, shape, dtype in call.made:
        if results[n] is None:
            results[n] = array = own.empty(shape, dtype, inputs[verb.q])
            addresses[first + n] = own.address(array)
    addresses += values
    call.prepared.run(addresses, own.stream(device), own, lengths or call.lengths)
    return results


def find(
    verb: Verb,
    own: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
) -> tuple[Call, Lengths]:
    """A call of arrays of one framework, checked and prepared, and its lengths: for whoever runs it later."""
    framework = arrays.framework_of(inputs[verb.q])
    call = _prepare_natives(verb, own, read, inputs, targets, options, flag, framework)
    return call, call.lengths


def _prepare_natives(
    verb: Verb,
    own: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
) -> Call:
    views = [None if x is None else _view(name, own, x) for name, x in verb.named(inputs, targets)]
    pointers = _together(verb, read[0]) if verb.extras else read[2]
    found = places(verb, read[0])
    return prepare(verb, views, options, flag, read[1][verb.q * 4 + 3], pointers, framework, found)


def _together(verb: Verb, addresses: Sequence[int]) -> int:
    """All addresses OR-ed together, but for those of options' arrays, which are read in their own ways."""
    first = len(verb.inputs) - len(verb.extras)
    found = 0
    for address in (*addresses[:first], *addresses[len(verb.inputs) :]):
        found |= address
    return found


def places(verb: Verb, addresses: Sequence[int]) -> tuple[int, ...]:
    """Where the options' arrays begin within 16 bytes."""
    last = len(verb.inputs)
    return tuple(address % 16 for address in addresses[last - len(verb.extras) : last])


def _check_reach(
    verb: Verb,
    call: Call,
    own: Native,
    addresses: Sequence[int],
    inputs: Arrays,
    targets: Arrays,
) -> None:
    """What of `check_out` depends on addresses: overlap."""
    spans = [
        (address + low, address + high)
        for address, (low, high) in zip(addresses, call.reach, strict=True)
    ]
    for n, target in enumerate(targets, len(inputs)):
        if target is None:
            continue
        low, high = spans[n]
        for m, (other_low, other_high) in enumerate(spans):
            if m != n and low < other_high and other_low < high:
                views = {
                    f"{verb.prefix}{name}" if name in verb.outputs else name: own.view(x)
                    for other, (name, x) in enumerate(verb.named(inputs, targets))
                    if x is not None and other != n
                }
                name = f"{verb.prefix}{verb.names[n]}"
                check_apart(own.view(target), views, name)
                break


def _view(name: str, own: Native, array: Any) -> View:
    try:
        return own.view(array)
    except TypeError as error:
        more = ", and float8_e4m3fn" if name.endswith("_pages") else ""
        raise TypeError(
            f"{name}: {error}; accepted are float16, bfloat16 and float32{more}: convert it, as by "
            f"{cast(arrays.framework_of(array), name, 'float32')}"
        ) from None


def _remember(key: Any, call: Call) -> None:
    with _prepared_lock:
        if len(_prepared) >= _MAX_PREPARED:
            for old in list(_prepared)[: _MAX_PREPARED // 2]:
                del _prepared[old]
        _prepared[key] = call
