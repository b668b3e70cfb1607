"""Repeats calls on arrays of one framework on a GPU, from the addresses of arrays of the same form."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rawattn._call.binding import bind
from rawattn._call.layout import Lengths
from rawattn._call.options import Options
from rawattn._interop import streams
from rawattn._interop.native import Memory, Native
from rawattn._runtime import guarded, on_gpu
from rawattn._runtime.guarded import GuardedCall
from rawattn._runtime.on_gpu import Arrays
from rawattn._runtime.runs import Launches, lone_of, run_of
from rawattn._runtime.verbs import Verb

if TYPE_CHECKING:
    from rawattn._runtime.prepared import Prepared

# Repeats a call. Arguments:
# - the addresses of its arrays, a list that the function changes;
# - the array to write, whose address is the last of these, or None;
# - the lengths if there is a layout, or what the launches take in their place, or the memo of the mask.
# Returns the caller's result. Returns None, and has done nothing, if the call cannot be repeated after all; the slow path then
# runs it, or raises the proper error.
Repeat = Callable[[list[int], Any, Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """How a call is repeated.

    of_starts: of a call on a layout with starts on the host, makes the last argument of `repeat` of this layout.
    guarded: makes a guarded call of the form of its arrays, the last argument of `repeat`, and whether the first array always
    has the type and the shape of this form; None where a mask's memo, which differs from call to call, is that argument.
    """

    repeat: Repeat
    of_starts: Callable[[Any], Any] | None = None
    guarded: Callable[[tuple[Any, ...], Any, bool], GuardedCall] | None = None


def repeated_call(
    native: Native,
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    returned: Callable[[Sequence[Any]], Any],
    takes_mask_memo: bool = False,
    layout_in_key: bool = False,
) -> Repeated | None:
    """How to repeat a call which `on_gpu.run` has made, on arrays and sequences of the same form; None if it cannot be.

    The call may not have numbers for kernels among its options. returned: makes the caller's result of the outputs.

    takes_mask_memo: `Repeated.repeat` is given the memo of a mask, not lengths.
    layout_in_key: it is given a pair, not lengths: the integers' slots behind the arrays' addresses, and the last argument of
    the launches. With lengths on the GPU the pair is their addresses and None. With starts on the host, `Repeated.of_starts`
    makes the pair of their layout.
    """
    read = native.read((*inputs, *targets), verb.required_count)
    assert read is not None
    device: int = read[1][verb.lead_index * 4 + 3]
    if device != native.current_device() or streams.is_capturing(native.stream(device)):
        return None
    call, lengths, _ = on_gpu.find_or_prepare(
        verb, native, read, inputs, targets, options, flag, framework
    )
    if call.copies is not None:
        return None
    given = [n for n, x in enumerate((*inputs, *targets)) if x is not None]
    made = [len(inputs) + n for n, _, _ in call.allocated_outputs]
    first, last = (made[0], made[-1] + 1) if made else (len(verb.names), len(verb.names))
    if given[-1] > first or made != list(range(first, first + len(made))):
        return None
    # The order of a run's addresses: given arrays, with 0 for each absent one among them; then 0s (`before`), the results that
    # the library allocates, and 0s (`behind`).
    absent = sorted({*range(given[-1])} - {*given})
    before, behind = [0] * (first - given[-1] - 1), [0] * (len(verb.names) - last)
    allocators = [
        native.allocator_like(shape, dtype, inputs[verb.lead_index])
        for _, shape, dtype in call.allocated_outputs
    ]
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in call.allocated_outputs]
    writes = given[-1] >= len(inputs)
    bounds = on_gpu.overlap_bounds(call, len(inputs)) if writes else ()
    stream_of, current_device, address_of = native.stream, native.current_device, native.address
    prepared = call.prepared
    launch: Callable[..., None] = prepared.run
    launches: Launches = () if lengths is not None else prepared.launches
    dense: Lengths | None = call.lengths
    of_starts: Callable[[Any], Any] | None = None
    if takes_mask_memo:
        launch, dense = _launch_with_mask(prepared), None
    elif layout_in_key:
        assert lengths is not None
        if lengths.on_host:
            rows_q, rows_k = lengths.q.rows, lengths.k.rows
            bound = functools.partial(bind, batch=None, rows_q=rows_q, rows_k=rows_k)
            launch, of_starts = prepared.with_starts(bound)
        else:
            launches = prepared.with_integers(lengths)
            launch = run_of(launches, prepared.run_memory)

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
        for allocate in allocators:
            result = allocate()
            results.append(result)
            addresses.append(address_of(result))
        addresses += behind
        if layout_in_key:
            integers, with_it = with_it
            addresses += integers
        launch(addresses, stream_of(device), native, dense if with_it is None else with_it)
        return returned(results)

    if takes_mask_memo:
        return Repeated(repeat)
    found = {n: at for at, n in enumerate((*given, *made))}
    order = tuple([found.get(n) for n in range(len(verb.names))])
    slots = guarded.Slots(order, len(given), len(made), writes)
    apart = [bounds[n] for n in given[:-1]] if writes else ()

    def guarded_call(form: tuple[Any, ...], with_it: Any, first_is_known: bool) -> GuardedCall:
        integers, last = with_it if layout_in_key else ((), dense if with_it is None else with_it)
        own = last if of_starts is not None and isinstance(last, list) else launches
        lone = lone_of(own, prepared.run_memory)
        run = guarded.Run(launch, last, lone)
        return guarded.guarded_call(
            *(slots, native, form, allocators, sizes, run, integers, apart, returned),
            first_is_known=first_is_known,
        )

    return Repeated(repeat, of_starts, guarded_call)


def _launch_with_mask(prepared: Prepared) -> Callable[..., None]:
    """`prepared.run` of a call without a layout, which takes the memo of its mask, or None, in place of lengths."""
    run, run_keeping = prepared.run, prepared.run_keeping

    def launch(
        addresses: list[int], stream: int, memory: Memory, memo: dict[Any, Any] | None
    ) -> None:
        if run_keeping is None or memo is None:
            run(addresses, stream, memory, None)
        else:
            run_keeping(addresses, stream, memory, memo)

    return launch
