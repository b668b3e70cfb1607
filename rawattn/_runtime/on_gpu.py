"""Calls whose arrays lie on GPUs, of one framework: their launches found or prepared, results made, launches made."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rawattn._call.binding import bind
from rawattn._call.checks import check_apart
from rawattn._call.layout import Lengths
from rawattn._call.options import Options, structural
from rawattn._call.structure import Structure, structure
from rawattn._forgetting import make_room
from rawattn._interop import arrays, streams
from rawattn._interop.advice import cast
from rawattn._interop.native import Memory, Native, Read, View
from rawattn._kernels.selection import selection
from rawattn._runtime import graphs
from rawattn._runtime.calls import Call, check_written, prepare
from rawattn._runtime.option_arrays import told_with_results
from rawattn._runtime.verbs import Verb

if TYPE_CHECKING:
    from rawattn._runtime.prepared import Prepared

Arrays = Sequence[Any]

# A call made again, from the addresses of its arrays, which it uses up; the array that it is to write, the last of those, or
# None; and its sequences where there is a layout, or what goes to its launches instead, or the memo of its mask. It gives None
# back, and has done nothing, where it is no such call after all: the way of a first call tells why.
Repeat = Callable[[list[int], Any, Any], Any]

# Calls prepared earlier, by everything that decides them but addresses and host integers.
_prepared: dict[Any, Call] = {}
_MAX_PREPARED = 512


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
    if call.copies is not None and not own.keeps_captured() and streams.is_capturing(stream):
        graphs.hold(*itertools.compress(inputs, call.copies))
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
            key = (*key, together(verb, addresses) % 16, alignments(verb, addresses))
        call = _prepared.get(key)
    except (TypeError, ValueError, IndexError, AttributeError):
        key = None  # describing the call tells what is wrong with it
    if call is not None:
        return call, lengths, False
    call = _prepare_natives(verb, own, read, inputs, targets, options, flag, framework)
    if key is not None:
        make_room(_prepared, _MAX_PREPARED)
        _prepared[key] = call
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
    masked: bool = False,
    told: bool = False,
) -> Repeat | None:
    """A call that `run` has made, to be made again with arrays, and sequences, of the same form; None where it cannot be.

    It is for calls that have no numbers for kernels among their options. returned: what it gives back, from the results.
    masked: it is given the memo of a mask instead of sequences. told: what stands behind the addresses of arrays, and what
    `Prepared.run` is given. These are the addresses of integers on the GPU, and None; of starts on the host what its attribute
    `of_starts` makes of their layout.
    """
    read = own.read((*inputs, *targets), verb.required)
    assert read is not None
    device: int = read[1][verb.q * 4 + 3]
    if device != own.current_device() or streams.is_capturing(own.stream(device)):
        return None
    call, lengths, _ = called(verb, own, read, inputs, targets, options, flag, framework)
    if call.copies is not None:
        return None
    given = [n for n, x in enumerate((*inputs, *targets)) if x is not None]
    made = [len(inputs) + n for n, _, _ in call.made]
    first, last = (made[0], made[-1] + 1) if made else (len(verb.names), len(verb.names))
    if given[-1] > first or made != list(range(first, first + len(made))):
        return None
    # Between the addresses of what is given stand 0s, and behind them 0s, those of the results that are made, and 0s.
    absent = sorted({*range(given[-1])} - {*given})
    before, behind = [0] * (first - given[-1] - 1), [0] * (len(verb.names) - last)
    makers = [own.maker(shape, dtype, inputs[verb.q]) for _, shape, dtype in call.made]
    writes = given[-1] >= len(inputs)
    bounds = overlaps(call, len(inputs)) if writes else ()
    stream_of, current_device, address_of = own.stream, own.current_device, own.address
    launch: Callable[..., None] = call.prepared.run
    dense: Lengths | None = call.lengths
    of_starts: Callable[[Any], Any] | None = None
    if masked:
        launch, dense = _launch_with_mask(call.prepared), None
    elif told:
        assert lengths is not None
        if lengths.on_host:
            rows_q, rows_k = lengths.q.rows, lengths.k.rows
            bound = functools.partial(bind, batch=None, rows_q=rows_q, rows_k=rows_k)
            launch, of_starts = call.prepared.with_starts(bound)
        else:
            launch = call.prepared.with_integers(lengths)
    if len(makers) == 1 and not (writes or absent or before):
        (make_one,) = makers

        def repeat_one(addresses: list[int], written: Any, with_it: Any) -> Any:
            if current_device() != device:
                return None
            result = make_one()
            addresses.append(address_of(result))
            addresses += behind
            if told:
                integers, with_it = with_it
                addresses += integers
            launch(addresses, stream_of(device), own, dense if with_it is None else with_it)
            return result

        vars(repeat_one)["of_starts"] = of_starts
        return repeat_one

    def repeat(addresses: list[int], written: Any, with_it: Any) -> Any:
        if current_device() != device:
            return None
        for n in absent:
            addresses.insert(n, 0)
        results = []
        if written is not None:
            last = addresses[-1]
            for address, (low, high) in zip(addresses, bounds):  # noqa: B905  # the last one is its own
                if low < last - address < high:
                    return None
            results.append(written)
        addresses += before
        for make in makers:
            result = make()
            results.append(result)
            addresses.append(address_of(result))
        addresses += behind
        if told:
            integers, with_it = with_it
            addresses += integers
        launch(addresses, stream_of(device), own, dense if with_it is None else with_it)
        return returned(results)

    vars(repeat)["of_starts"] = of_starts
    return repeat


def _launch_with_mask(prepared: Prepared) -> Callable[..., None]:
    """`prepared.run` of a call without a layout, which is given its mask's memo, if that has one, instead of lengths."""
    run, run_keeping = prepared.run, prepared.run_keeping

    def launch(
        addresses: list[int], stream: int, memory: Memory, memo: dict[Any, Any] | None
    ) -> None:
        if run_keeping is None or memo is None:
            run(addresses, stream, memory, None)
        else:
            run_keeping(addresses, stream, memory, memo)

    return launch


def overlaps(call: Call, first: int) -> tuple[tuple[int, int], ...]:
    """Between which distances from each input the first output would overlap it."""
    low, high = call.reach[first]
    return tuple((start - high, end - low) for start, end in call.reach[:first])


class Pair(NamedTuple):
    """An input that a call changes and another one, by their indices among the addresses.

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
    named = zip(told_with_results(verb, options), (*inputs, *targets), strict=True)
    views = [None if x is None else _view(name, own, x) for name, x in named]
    pointers = together(verb, read[0])
    found = alignments(verb, read[0])
    return prepare(verb, views, options, flag, read[1][verb.q * 4 + 3], pointers, framework, found)


def together(verb: Verb, addresses: Sequence[int]) -> int:
    """Those of inputs and outputs OR-ed together, but for options' arrays, which are read in their own ways: of how all of them
    are aligned its last bits tell.
    """
    count = len(verb.inputs)
    found = 0
    for address in addresses[: count - len(verb.extras)]:
        found |= address
    for address in addresses[count : count + len(verb.outputs)]:
        found |= address
    return found


def alignments(verb: Verb, addresses: Sequence[int]) -> tuple[int, ...]:
    """The addresses of the options' arrays modulo 16; of those that may begin anywhere, nothing."""
    if verb.anywhere:
        return ()
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
