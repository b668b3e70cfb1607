"""Guarded calls: straight-line functions that repeat a call on arrays of one form, without looking the call up.

A guarded call reads its arrays, compares their form with the one that it was made for (the guard), makes the results and
launches. A call that is found by its key does the same in several functions, with lists between them (docs/notes/host-time.md).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rawattn._interop.arrays import is_recording
from rawattn._interop.native import Native
from rawattn._interop.readers import Attributes
from rawattn._runtime.runs import Lone

# Takes the arrays of a call, and the array to write last if there is one. They have values: nothing traces the call
# (`Native.is_traced`). Returns the caller's result. Returns None, and has done nothing, if the arrays are not of its form or
# their derivatives would be lost.
GuardedCall = Callable[..., Any]

# Results of alike sizes share a block of memory up to this size in bytes, which saves most of what allocating each takes. It is
# freed with the last of them. How many times as large as the smallest result it may be; what results begin at multiples of.
_MOST_SHARED, _LEAST_SHARE, _ALIGNMENT = 4 << 20, 16, 512

_TEXT = """\
def make(form, native, is_recording, allocators, places, run, given, lone, integers, bounds, returned):
    device, current_device, stream_of = native.current_device(), native.current_device, native.stream
    launch, blocks, counters = lone
    tails = {{}} if counters is not None else {{0: integers, 1: integers}}
    {allocators}
    {places}
    {bounds}
    def call({arguments}):
        try:
            if not ({valid}):
                return None
            {addresses}
            if ({form}) != form or current_device() != device or ({tracked}) and is_recording():
                return None
        except RuntimeError:  # as in readers
            return None
        {overlap}
        {results}
        stream = {stream}
        {launch}
        return {returned}
    return call
"""
_RUN = "run([{listed}, *integers], stream, native, given)"
# The streams 0 and 1 are never captured, and are the same in all threads: their counters stay where the first run has them.
_LAUNCH = """\
tail = tails.get(stream)
        if tail is not None:
            launch([{listed}, *tail], blocks, stream)
        else:
            run([{listed}, *integers], stream, native, given)
            if stream < 2:
                tails[stream] = [*integers, *counters[stream][1]]"""


@dataclass(frozen=True, slots=True)
class Slots:
    """Which arrays the addresses of a run belong to.

    order: for each address before those of lengths the index of a given array, or None for an address that is 0; the results
    that are made have the indices behind those of the given arrays. given, made: the numbers of both.
    writes: whether the last given array is written.
    """

    order: tuple[int | None, ...]
    given: int
    made: int
    writes: bool


class Run(NamedTuple):
    """How a guarded call launches: a function and its last argument. lone: the one launch that this function makes, if it is so
    simple.
    """

    run: Callable[..., None]
    given: Any
    lone: Lone | None


def guarded_call(
    slots: Slots,
    native: Native,
    form: tuple[Any, ...],
    allocators: Sequence[Callable[..., Any]],
    sizes: Sequence[int],
    run: Run,
    integers: Sequence[Any],
    bounds: Sequence[tuple[int, int]],
    returned: Callable[[Sequence[Any]], Any],
    first_is_known: bool,
) -> GuardedCall:
    """A guarded call for arrays of this form, on the device that is current now.

    allocators: make the results, of `sizes` bytes. integers: slots behind the arrays' addresses.
    bounds: for each other array the distances of an array to write at which they overlap (`on_gpu.overlap_bounds`).
    returned: makes the caller's result of the outputs.
    first_is_known: whether the first array has the type and the shape of this form wherever the call is used.
    """
    launching, lone = (_RUN, (None, 0, None)) if run.lone is None else (_LAUNCH, run.lone)
    places = _places(sizes) if native.attributes.block else ()
    make = _maker(
        *(native.attributes, slots, first_is_known),
        *(len(places) > 0, len(bounds), launching, returned is tuple),
    )
    call: GuardedCall = make(
        form[first_is_known:],
        native,
        is_recording,
        allocators,
        places,
        run.run,
        run.given,
        lone,
        integers,
        bounds,
        returned,
    )
    return call


def _places(sizes: Sequence[int]) -> tuple[int, ...]:
    """The size of a block that results share, and the offset of each but the first; empty if they have memory of their own."""
    total = sum(sizes)
    if len(sizes) < 2 or not 0 < total <= min(_MOST_SHARED, _LEAST_SHARE * min(sizes)):
        return ()
    ends = itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    *offsets, end = ends
    return end, *offsets


@functools.lru_cache(maxsize=256)
def _maker(
    attributes: Attributes,
    slots: Slots,
    first_is_known: bool,
    shared: bool,
    bounds: int,
    launching: str,
    in_a_tuple: bool,
) -> Callable[..., GuardedCall]:
    """shared: whether results share a block. in_a_tuple: whether the caller gets the outputs in a tuple."""
    arrays = [f"x{n}" for n in range(slots.given)]
    made = [f"r{n}" for n in range(slots.made)]
    addresses = [f"{x}p" for x in (*arrays, *made)]
    listed = ["0" if n is None else addresses[n] for n in slots.order]
    distances = [f"low{n} < {arrays[-1]}p - x{n}p < high{n}" for n in range(bounds)]
    outputs = [*arrays[slots.given - slots.writes :], *made]
    if shared:
        first, *others = made
        results = [
            f"block = {attributes.block}; {first}p = block.ptr; {first} = make_{first}(block)"
        ]
        results += [f"{r} = make_{r}(block + {r}_at); {r}p = {first}p + {r}_at" for r in others]
    else:
        results = [f"{r} = make_{r}(); {r}p = {attributes.address_of(r)}" for r in made]
    text = _TEXT.format(
        places=f"nbytes, {', '.join(f'{r}_at' for r in made[1:])} = places" if shared else "",
        allocators="; ".join(f"make_{r} = allocators[{n}]" for n, r in enumerate(made)),
        arguments=", ".join(arrays),
        bounds="; ".join(f"low{n}, high{n} = bounds[{n}]" for n in range(bounds)),
        overlap=f"if {' or '.join(distances)}: return None" if bounds else "",
        results="; ".join(results),
        stream=attributes.stream,
        launch=launching.format(listed=", ".join(listed)),
        returned=_returned(outputs, in_a_tuple),
        **attributes.expressions(arrays, first_is_known=first_is_known),
    )
    return attributes.define(text, "make")


def _returned(outputs: Sequence[str], in_a_tuple: bool) -> str:
    all_outputs = f"({', '.join(outputs)},)"
    if in_a_tuple:
        return all_outputs
    # A call that writes to no array of the caller returns its one result.
    return "r0" if list(outputs) == ["r0"] else f"returned({all_outputs})"
