"""Calls whose arrays lie on GPUs, of one framework: their launches found or prepared, results made, launches made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rawattn._call.checks import check_apart
from rawattn._call.hints import cast
from rawattn._call.layout import Lengths
from rawattn._call.options import Options, structural
from rawattn._call.structure import Structure, structure
from rawattn._interop import arrays, streams
from rawattn._interop.native import Native, Read, View
from rawattn._kernels.selection import selection
from rawattn._runtime.calls import Call, check_written, prepare
from rawattn._runtime.option_arrays import told_with_results
from rawattn._runtime.verbs import Verb

Arrays = Sequence[Any]

# A call made again, from the addresses of its arrays, which it uses up, the array that it is to write, the last of those, or
# None, and the sequences where there is a layout. It gives None back, and has done nothing, where it is no such call after
# all: the way of a first call tells why.
Repeat = Callable[[list[int], Any, "Lengths | None"], Any]

# Likewise, from the addresses of all arrays but those of a mask, then of that, and its memo.
RepeatWithMask = Callable[[list[int], Any, tuple[int, ...], "dict[Any, Any] | None"], Any]

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
    memo: dict[Any, Any] | None = None,
) -> Sequence[Any]:
    """`dispatch.run` on what `own` has read of these arrays. framework: that of the caller's."""
    addresses, form, _ = read
    device: int = form[verb.q * 4 + 3]
    if device != own.current_device():
        import cupy

        with cupy.cuda.Device(device):
            return run(verb, own, read, inputs, targets, options, flag, framework, values, memo)
    call, lengths, is_new = called(verb, own, read, inputs, targets, options, flag, framework)
    if not is_new:
        for target in targets:
            if target is not None:
                _check_reach(verb, call, own, addresses, inputs, targets, options)
                break
        if verb.written:
            named = zip(verb.inputs, inputs, strict=True)
            check_written(verb, {name: own.view(x) for name, x in named if x is not None})
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
    prepared, stream = call.prepared, own.stream(device)
    if memo is not None and prepared.run_keeping is not None:
        prepared.run_keeping(addresses, stream, own, memo)
    else:
        prepared.run(addresses, stream, own, lengths or call.lengths)
    return results


def called(
    verb: Verb,
    own: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
) -> tuple[Call, Lengths | None, bool]:
    """A call as it was prepared, its lengths where it was given some, and whether it is prepared only now."""
    addresses, form, _ = read
    call = lengths = None
    key: Any = None
    try:
        form_of_lengths: Structure | None = None
        if options.seqs is not None:
            lengths = verb.bind(options.seqs, inputs)
            form_of_lengths = structure(lengths)
        key = (verb, flag, form, form_of_lengths, structural(options), selection())
        if verb.extras:
            key = (*key, _together(verb, addresses) % 16, places(verb, addresses))
        call = _prepared.get(key)
    except (TypeError, ValueError, IndexError, AttributeError):
        key = None  # describing the call tells what is wrong with it
    if call is not None:
        return call, lengths, False
    call = _prepare_natives(verb, own, read, inputs, targets, options, flag, framework)
    if key is not None:
        _remember(key, call)
    return call, lengths, True


def repeated(
    own: Native,
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    returned: Callable[[Sequence[Any]], Any],
) -> Repeat | None:
    """A call that `run` has made, to be made again with arrays, and sequences, of the same form; None where it cannot be.

    It is for calls whose options have no arrays and no numbers for kernels. returned: what it gives back, from the results.
    """
    read = own.read((*inputs, *targets), verb.required)
    assert read is not None
    device: int = read[1][verb.q * 4 + 3]
    if device != own.current_device() or streams.is_capturing(own.stream(device)):
        return None
    call, _, _ = called(verb, own, read, inputs, targets, options, flag, framework)
    if call.copies is not None:
        return None
    given = [n for n, x in enumerate((*inputs, *targets)) if x is not None]
    if given != list(range(len(given))):
        return None
    # Behind the addresses of what is given come 0s, those of the results that are made, and 0s.
    made = [len(inputs) + n for n, _, _ in call.made]
    first, last = (made[0], made[-1] + 1) if made else (len(verb.names), len(verb.names))
    before, behind = [0] * (first - len(given)), [0] * (len(verb.names) - last)
    makers = [own.maker(shape, dtype, inputs[verb.q]) for _, shape, dtype in call.made]
    writes = len(given) > len(inputs)
    bounds = overlaps(call, len(inputs)) if writes else ()
    launch, stream_of, current_device = call.prepared.run, own.stream, own.current_device
    dense, address_of = call.lengths, own.address
    if len(makers) == 1 and not writes and not before:
        (make_one,) = makers

        def repeat_one(addresses: list[int], written: Any, lengths: Lengths | None) -> Any:
            if current_device() != device:
                return None
            result = make_one()
            addresses.append(address_of(result))
            addresses += behind
            launch(addresses, stream_of(device), own, lengths or dense)
            return result

        return repeat_one

    def repeat(addresses: list[int], written: Any, lengths: Lengths | None) -> Any:
        if current_device() != device:
            return None
        results = []
        if written is not None:
            place = addresses[-1]
            for address, (low, high) in zip(addresses, bounds):  # noqa: B905  # the last one is its own
                if low < place - address < high:
                    return None
            results.append(written)
        addresses += before
        for make in makers:
            result = make()
            results.append(result)
            addresses.append(address_of(result))
        addresses += behind
        launch(addresses, stream_of(device), own, lengths or dense)
        return returned(results)

    return repeat


def repeated_with_mask(
    own: Native,
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    returned: Callable[[Sequence[Any]], Any],
) -> RepeatWithMask | None:
    """`repeated`, of a dense call that has the arrays of a mask besides, and no others among its options."""
    read = own.read((*inputs, *targets), verb.required)
    assert read is not None
    device: int = read[1][verb.q * 4 + 3]
    if device != own.current_device() or streams.is_capturing(own.stream(device)):
        return None
    call, _, _ = called(verb, own, read, inputs, targets, options, flag, framework)
    if call.copies is not None:
        return None
    first = len(inputs) - len(verb.extras)
    count = sum(x is not None for x in inputs[:first])
    targeted = sum(x is not None for x in targets)
    given = [n for n, x in enumerate((*inputs[:first], *targets)) if x is not None]
    made = [n for n, _, _ in call.made]
    after = targeted + len(made)
    if given != [*range(count), *range(first, first + targeted)] or made != [
        *range(targeted, after)
    ]:
        return None
    # Behind the addresses of what is given come 0s and those of the mask, and 0s behind those of the results.
    missing = (0,) * (first - count)
    behind = [0] * (len(targets) - after)
    makers = [own.maker(shape, dtype, inputs[verb.q]) for _, shape, dtype in call.made]
    bounds = overlaps(call, len(inputs)) if targeted else ()
    launch, keeping = call.prepared.run, call.prepared.run_keeping
    stream_of, current_device, address_of = own.stream, own.current_device, own.address
    dense = call.lengths

    def repeat(
        addresses: list[int], written: Any, of_mask: tuple[int, ...], memo: dict[Any, Any] | None
    ) -> Any:
        if current_device() != device:
            return None
        addresses[count:count] = missing + of_mask
        results = []
        if written is not None:
            place = addresses[-1]
            for address, (low, high) in zip(addresses, bounds):  # noqa: B905  # the last one is its own
                if low < place - address < high:
                    return None
            results.append(written)
        for make in makers:
            result = make()
            results.append(result)
            addresses.append(address_of(result))
        addresses += behind
        if keeping is None or memo is None:
            launch(addresses, stream_of(device), own, dense)
        else:
            keeping(addresses, stream_of(device), own, memo)
        return returned(results)

    return repeat


def overlaps(call: Call, first: int) -> tuple[tuple[int, int], ...]:
    """Between which distances from each input the first output would overlap it."""
    low, high = call.reach[first]
    return tuple((start - high, end - low) for start, end in call.reach[:first])


class Pair(NamedTuple):
    """An input that a call changes and another one, by their places among the addresses.

    They may share memory where the first one's address less the second's is between low and high, and is not the distance
    at which they were found not to.
    """

    changed: int
    other: int
    low: int
    high: int
    distance: int


def pairs(verb: Verb, call: Call, addresses: Sequence[int]) -> tuple[Pair, ...]:
    """addresses: of inputs that have been checked."""
    found = []
    for n, name in enumerate(verb.inputs):
        if name not in verb.written:
            continue
        low, high = call.reach[n]
        for m, other in enumerate(verb.inputs):
            if m > n or (m < n and other not in verb.written):
                start, end = call.reach[m]
                found.append(Pair(n, m, start - high, end - low, addresses[n] - addresses[m]))
    return tuple(found)


def are_apart(pairs: Sequence[Pair], addresses: Sequence[int]) -> bool:
    """Whether no input that a call changes may share memory with another one."""
    for changed, other, low, high, distance in pairs:
        if low < (found := addresses[changed] - addresses[other]) < high and found != distance:
            return False
    return True


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
    pointers = _together(verb, read[0])
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
    options: Options,
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
                shown = told_with_results(verb, options)
                others = [
                    (name, own.view(x))
                    for other, (name, x) in enumerate(zip(shown, (*inputs, *targets), strict=True))
                    if x is not None and other != n
                ]
                check_apart(own.view(target), others, shown[n])
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
