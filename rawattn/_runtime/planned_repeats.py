"""Calls of a plan like earlier ones: arrays read, addresses patched, launches made, and nothing looked at twice.

Such a call is found by how many arrays it gives by position and by the names of the others. What is not like the call of
planning time, or like the first one with those names, goes the long way, which tells what is wrong with it or takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rawattn._call.checks import byte_range
from rawattn._call.options import Options
from rawattn._interop import arrays
from rawattn._interop.native import Native, Read
from rawattn._interop.written import tell_written, teller
from rawattn._runtime import on_gpu
from rawattn._runtime.option_arrays import told
from rawattn._runtime.prepared import Own
from rawattn._runtime.verbs import Verb

UNLIKE: Any = object()

Repeat = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Planned:
    """What all calls of a plan have in common.

    inputs: the arrays of planning time. results: arrays to write, the caller's of that time or the plan's own; None for those
    that the call does not have. returned: what a call gives back, of the results. values: numbers of options.
    alignment: in bytes, of where all arrays but those of options begin. alignments: of these, where each begins within 16.
    changed: indices of inputs that a call writes. streams: that calls have been launched on.
    """

    verb: Verb
    own: Native
    device: int
    options: Options
    inputs: tuple[Any, ...]
    results: Sequence[Any]
    returned: Callable[[Sequence[Any]], Any]
    values: tuple[int, ...]
    alignment: int
    alignments: tuple[int, ...]
    pairs: tuple[on_gpu.Pair, ...]
    changed: tuple[int, ...]
    memory: Own
    streams: set[int] = field(default_factory=set)

    @property
    def lengths_at(self) -> int:
        """Where addresses of lengths begin among a run's: behind inputs, results and values."""
        return len(self.inputs) + len(self.results) + len(self.values)

    def addresses(self) -> list[int]:
        """Those of planning time."""
        named = (*self.inputs, *self.results)
        own = [0 if x is None else self.own.address(x) for x in named]
        return [*own, *self.values, *self.memory.tail]

    def are_aligned(self, addresses: Sequence[int]) -> bool:
        """Whether all but arrays of options begin where they may. Of the form of a call one bit tells of all together."""
        return not on_gpu.together(self.verb, addresses) & (self.alignment - 1)

    def are_apart(self, addresses: Sequence[int]) -> bool:
        return not self.pairs or on_gpu.are_apart(self.pairs, addresses)

    def begin_alike(self, addresses: Sequence[int]) -> bool:
        """Whether arrays of options begin where they did at planning time, within 16 bytes."""
        return not self.alignments or on_gpu.alignments(self.verb, addresses) == self.alignments


def by_position(planned: Planned) -> Repeat:
    """The call with arrays like those of planning time, into the plan's own. It gives `UNLIKE`, and has done nothing, where
    they are not like those.
    """
    own, device, verb = planned.own, planned.device, planned.verb
    known_calls = _known_calls(planned)
    launches, result = planned.memory.launches, planned.returned(planned.results)
    streams, stream_of, current_device = planned.streams, own.stream, own.current_device
    names = told(verb, planned.options)
    tell, changed = teller(*planned.results), planned.changed
    checked = bool(planned.pairs or planned.alignments or verb.extras)

    def repeat(args: Sequence[Any]) -> Any:
        known_call = known_calls.get(len(args))
        if known_call is None:
            return UNLIKE
        read, form, tail = known_call
        found = read(*args)
        if found is None:
            return UNLIKE
        addresses, got, tracked = found
        if got != form or current_device() != device:
            return UNLIKE
        if tracked and verb.refuses_gradients:
            arrays.refuse_gradients(names[: len(args)], args)
        addresses += tail
        if checked and not (
            planned.are_apart(addresses)
            and planned.begin_alike(addresses)
            and (not got[-1] or planned.are_aligned(addresses))
        ):
            return UNLIKE
        stream = stream_of(device)
        if stream not in streams:
            streams.add(stream)
        for launch, blocks in launches:
            launch(addresses, blocks, stream)
        if tell is not None:
            tell()
        if changed:
            tell_written(*[args[n] for n in changed])
        return result

    return repeat


def _known_calls(planned: Planned) -> dict[int, tuple[Callable[..., Read | None], Any, list[int]]]:
    """By how many arrays a call gives: what reads those, their form, and the addresses of all others.

    Arrays of options may be left out. They are then those of planning time, and so is what stands behind an array that the
    plan does not have.
    """
    verb, own, inputs = planned.verb, planned.own, planned.inputs
    most = next((n for n, x in enumerate(inputs) if x is None), len(inputs))
    addresses = planned.addresses()
    found = {}
    for count in range(min(most, len(inputs) - len(verb.extras)), most + 1):
        if verb.refuses_gradients and any(_is_tracked(x) for x in inputs[count:]):
            continue
        read = own.reader(count)
        form = read(*inputs[:count])[1]  # type: ignore[index]  # they have been read before
        found[count] = read, form, addresses[count:]
    return found


def _is_tracked(array: Any) -> bool:
    return bool(getattr(array, "requires_grad", False))


class Distance(NamedTuple):
    """Two arrays, by their indices among the addresses, share memory where that of the one less that of the other is between
    low and high."""

    one: int
    other: int
    low: int
    high: int


def by_names(
    planned: Planned, given: Sequence[Any], places: Sequence[Sequence[int]]
) -> Repeat | None:
    """Calls like one that has gone the long way, by the arrays that they give in this order: `UNLIKE` where they are not.
    None where one of these arrays is not plainly of the plan's framework.

    places: of each array, the indices in a run's addresses that are its own.
    """
    own, device, verb = planned.own, planned.device, planned.verb
    read = own.reader(len(given))
    found = None if any(x is None for x in given) else read(*given)
    if found is None or found[2]:
        return None
    form = found[1][:-1]  # where arrays begin may differ from call to call
    if any(verb.refuses_gradients and _is_tracked(x) for x in planned.inputs):
        return None
    first = len(planned.inputs)
    results_at = range(first, first + len(planned.results))
    patched = [(n, at) for n, own_places in enumerate(places) for at in own_places]
    written = [(n, at) for n, at in patched if at in results_at]
    theirs = tuple(at for _, at in written)
    launches = planned.memory.launches_keeping(theirs)
    others = planned.addresses()
    everything = [*planned.inputs, *planned.results]
    for n, at in patched:
        if at < len(everything):
            everything[at] = given[n]
    distances = _distances(planned, everything, theirs)
    checked = bool(planned.pairs or planned.alignments)
    tells = teller(*everything[first:]) is not None
    streams, stream_of, current_device = planned.streams, own.stream, own.current_device
    results, returned, changed = planned.results, planned.returned, planned.changed

    def repeat(args: Sequence[Any]) -> Any:
        found = read(*args)
        if found is None:
            return UNLIKE
        own_addresses, got, tracked = found
        if got[:-1] != form or tracked or current_device() != device:
            return UNLIKE
        addresses = others.copy()
        for n, at in patched:
            addresses[at] = own_addresses[n]
        for one, other, low, high in distances:
            if low < addresses[one] - addresses[other] < high:
                return UNLIKE
        if got[-1] and not planned.are_aligned(addresses):
            return UNLIKE
        if checked and not (planned.are_apart(addresses) and planned.begin_alike(addresses)):
            return UNLIKE
        stream = stream_of(device)
        if stream not in streams:
            streams.add(stream)
        all_results = results
        if written:
            all_results = list(results)
            for n, at in written:
                all_results[at - first] = args[n]
        for launch, blocks in launches:
            launch(addresses, blocks, stream)
        if tells:
            tell_written(*all_results)
        if changed:
            all_inputs = list(planned.inputs)
            for n, at in patched:
                if at < first:
                    all_inputs[at] = args[n]
            tell_written(*[all_inputs[n] for n in changed])
        return returned(all_results)

    return repeat


def _distances(
    planned: Planned, everything: Sequence[Any], theirs: Sequence[int]
) -> list[Distance]:
    """Of the caller's arrays to write from all other arrays."""
    reach = [None if x is None else byte_range(planned.own.view(x), 0) for x in everything]
    found = []
    for n in theirs:
        low, high = reach[n]  # type: ignore[misc]  # a given one
        for m, other in enumerate(reach):
            if other is not None and m != n and not (m in theirs and m < n):
                start, end = other
                if start < end and low < high:
                    found.append(Distance(n, m, start - high, end - low))
    return found
