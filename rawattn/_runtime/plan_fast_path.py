"""Fast path of a plan's calls: arrays are read, addresses patched, and kernels launched, without further checks.

A call is found by the number of arrays that it gives by position and by the names of the others. A call that is not like that
of planning time, or not like the first one with the same names, takes the slow path (`GpuPlan.__call__`), which runs it or
raises the proper error.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rawattn._call.checks import byte_range
from rawattn._call.options import Options
from rawattn._interop.native import Native, Read
from rawattn._interop.written import bump_versions, version_bumper
from rawattn._runtime import on_gpu
from rawattn._runtime.call_request import SLOW_PATH
from rawattn._runtime.calls import refuse_gradients_of_read
from rawattn._runtime.option_arrays import caller_names
from rawattn._runtime.plan_launches import LaunchAll, launcher
from rawattn._runtime.plan_same_arrays import Repeat, on_same_arrays
from rawattn._runtime.plan_streams import PlanStreams
from rawattn._runtime.prepared import PlanMemory
from rawattn._runtime.verbs import Verb

LeftOut = tuple[tuple[Any, int], ...]  # inputs of planning time with their addresses


@dataclass(frozen=True, slots=True)
class Planned:
    """What all calls of a plan have in common.

    inputs: the arrays of planning time. results: for each output the caller's array of planning time or the plan's own; None
    for an output that the call does not have. returned: makes the caller's result of the outputs.
    values: numbers of options for the kernels.
    alignment: in bytes, the one that the addresses of all arrays but `extra_inputs` must have. alignments: the addresses of
    `extra_inputs` modulo 16.
    possible_overlaps: inputs that must not share memory. forbidden: addresses of inputs at which these might share memory with
    results. changed: indices of inputs that a call writes.
    memory: scratch and counters of the plan, with its launches. as_graph: whether those on the arrays of planning time are a
    CUDA graph. streams: those on which calls have been launched.
    """

    verb: Verb
    native: Native
    device: int
    options: Options
    inputs: tuple[Any, ...]
    results: Sequence[Any]
    returned: Callable[[Sequence[Any]], Any]
    values: tuple[int, ...]
    alignment: int
    alignments: tuple[int, ...]
    possible_overlaps: tuple[on_gpu.PossibleOverlap, ...]
    forbidden: tuple[on_gpu.Forbidden, ...]
    changed: tuple[int, ...]
    memory: PlanMemory
    as_graph: bool
    streams: PlanStreams

    @property
    def lengths_at(self) -> int:
        """The index of the first address of lengths among a run's addresses: behind inputs, results and values."""
        return len(self.inputs) + len(self.results) + len(self.values)

    def addresses(self) -> list[int]:
        """All addresses of a run with the arrays of planning time."""
        named = (*self.inputs, *self.results)
        first = [0 if x is None else self.native.address(x) for x in named]
        return [*first, *self.values, *self.memory.tail]

    def own_launch(self) -> LaunchAll:
        """Launches on the arrays of planning time."""
        launches, addresses = self.memory.bound_launches(), self.addresses()
        for each in launches:
            each.write(addresses)
        return launcher(launches, self.as_graph)

    def left_out(self, given: Container[int]) -> LeftOut:
        """Inputs of planning time that may get other memory, and their addresses. given: indices of inputs that a call gives.

        A call is on the fast path while they have the memory that these addresses are of.
        """
        if not self.native.may_move:
            return ()
        held = [(n, x) for n, x in enumerate(self.inputs) if x is not None and n not in given]
        return tuple((x, self.native.address(x)) for _, x in held)

    def are_aligned(self, addresses: Sequence[int]) -> bool:
        """Whether all arrays but `extra_inputs` have the plan's alignment."""
        return not on_gpu.ored_addresses(self.verb, addresses) & (self.alignment - 1)

    def surely_disjoint(self, addresses: Sequence[int]) -> bool:
        return not self.possible_overlaps or on_gpu.surely_disjoint(
            self.possible_overlaps, addresses
        )

    def begin_alike(self, addresses: Sequence[int]) -> bool:
        """Whether the addresses of `extra_inputs` modulo 16 are those of planning time."""
        return not self.alignments or on_gpu.alignments(self.verb, addresses) == self.alignments


def spare_results(forbidden: Sequence[on_gpu.Forbidden], addresses: Sequence[int]) -> bool:
    """Whether it is certain that the results of planning time share no memory with the inputs."""
    return not any(
        low < addresses[n] < high and addresses[n] != allowed
        for _, n, low, high, allowed in forbidden
    )


def by_position(planned: Planned) -> Repeat:
    """The fast path of calls that give arrays by position only and write to the results of planning time.

    It returns `SLOW_PATH`, and has done nothing, if the arrays are not like those of planning time.

    There are launches with the addresses of planning time, and others with those of the last call on other arrays. Such
    addresses have been checked. Where arrays never move, those of planning time are known by their identity, and are not read.
    """
    native, device, verb = planned.native, planned.device, planned.verb
    known_calls = _readers_by_count(planned)
    inputs = planned.inputs[: max(known_calls, default=0)]  # what a call without arrays reads
    own_addresses, launch = planned.addresses(), planned.own_launch()
    result = planned.returned(planned.results)
    streams, stream_of, current_device = planned.streams, native.stream, native.current_device
    known_streams = streams.known
    names, address_of = caller_names(verb, planned.options), native.address
    bump, changed = version_bumper(*planned.results), planned.changed
    may_overlap, have_alignments = bool(planned.possible_overlaps), bool(planned.alignments)
    forbidden, count = planned.forbidden, len(planned.inputs)
    # All forbidden addresses lie between these, and those of most inputs do not.
    lowest = min((x.low for x in forbidden), default=0)
    highest = max((x.high for x in forbidden), default=0)
    # Of launches on other arrays, made by the first such call.
    writes: list[Callable[[Sequence[int]], None]] = []
    launch_others = launch
    written: list[int] | None = None  # the addresses that their parameters hold

    def may_run(addresses: list[int], alignment: int) -> bool:
        """alignment: the given addresses OR-ed together, modulo 16."""
        if may_overlap and not planned.surely_disjoint(addresses):
            return False
        if have_alignments and not planned.begin_alike(addresses):
            return False
        if alignment and not planned.are_aligned(addresses):
            return False
        for address in addresses[:count]:
            if lowest < address < highest:
                return spare_results(forbidden, addresses)
        return True

    def write(addresses: list[int]) -> None:
        nonlocal launch_others, written
        if not writes:
            bound = planned.memory.bound_launches()
            launch_others = launcher(bound, as_graph=False)
            writes.extend(each.write for each in bound)
        written = None  # until all parameters are written, in case of an exception
        for write_one in writes:
            write_one(addresses)
        written = addresses

    def repeat(args: Sequence[Any]) -> Any:
        args = args or inputs
        known_call = known_calls.get(len(args))
        if known_call is None:
            return SLOW_PATH
        read, form, tail, left_out = known_call
        found = read(*args)
        if found is None:
            return SLOW_PATH
        addresses, got, tracked = found
        if got != form:
            return SLOW_PATH
        if tracked:
            refuse_gradients_of_read(verb, names[: len(args)], args)
        for x, address in left_out:
            if address_of(x) != address:
                return SLOW_PATH
        addresses += tail
        if current_device() != device:
            return SLOW_PATH
        are_own = addresses == own_addresses
        if not are_own and addresses != written:
            if not may_run(addresses, got[-1]):
                return SLOW_PATH
            write(addresses)
        stream = stream_of(device)
        if stream not in known_streams:
            streams.add(stream)
        (launch if are_own else launch_others)(stream)
        if bump is not None:
            bump()
        if changed:
            bump_versions(*[args[n] for n in changed])
        return result

    if native.may_move or bump is not None or changed or not inputs:
        return repeat
    return on_same_arrays(
        *(inputs, known_calls, launch, result, repeat),
        *(current_device, device, stream_of, known_streams),
    )


def _readers_by_count(
    planned: Planned,
) -> dict[int, tuple[Callable[..., Read | None], Any, list[int], LeftOut]]:
    """By the number of arrays that a call gives: their reader, their form, the addresses that follow theirs, and the arrays
    that are left out (`left_out`).

    A call may leave out options' arrays, which are then those of planning time. So are all arrays behind the first input that
    the plan does not have.
    """
    verb, native, inputs = planned.verb, planned.native, planned.inputs
    most = next((n for n, x in enumerate(inputs) if x is None), len(inputs))
    addresses = planned.addresses()
    found = {}
    for count in range(min(most, len(inputs) - len(verb.extra_inputs)), most + 1):
        if verb.refuses_gradients and any(_is_tracked(x) for x in inputs[count:]):
            continue
        read = native.reader(count)
        form = read(*inputs[:count])[1]  # type: ignore[index]  # they have been read before
        found[count] = read, form, addresses[count:], planned.left_out(range(count))
    return found


def _is_tracked(array: Any) -> bool:
    return bool(getattr(array, "requires_grad", False))


class Distance(NamedTuple):
    """Two arrays, by their indices among the addresses. They may share memory if the difference of their addresses,
    one - other, is between low and high.
    """

    one: int
    other: int
    low: int
    high: int


def by_names(
    planned: Planned, given: Sequence[Any], places: Sequence[Sequence[int]]
) -> Repeat | None:
    """The fast path of calls like one that has taken the slow path, which give such arrays in this order.

    It returns `SLOW_PATH`, and has done nothing, if the arrays are not like these. There is no fast path (None) if one of the
    arrays is not a plain array of the plan's framework, or requires a gradient, which only the slow path checks.

    given: the arrays of the call. places: for each, its indices among a run's addresses.
    """
    native, device, verb = planned.native, planned.device, planned.verb
    read = native.reader(len(given))
    found = None if any(x is None for x in given) else read(*given)
    if found is None or found[2]:
        return None
    form = found[1][:-1]  # without the alignment, which may differ from call to call
    if any(verb.refuses_gradients and _is_tracked(x) for x in planned.inputs):
        return None
    first = len(planned.inputs)
    results_at = range(first, first + len(planned.results))
    patched = [(n, at) for n, own_places in enumerate(places) for at in own_places]
    written = [(n, at) for n, at in patched if at in results_at]
    theirs = tuple(at for _, at in written)
    bound = planned.memory.bound_launches(theirs)
    writes = [each.write for each in bound]
    enqueues = [(each.enqueue, each.blocks, each.arguments) for each in bound]
    others = planned.addresses()
    everything = [*planned.inputs, *planned.results]
    for n, at in patched:
        if at < len(everything):
            everything[at] = given[n]
    left_out, address_of = planned.left_out({at for _, at in patched}), native.address
    distances = _distances(planned, everything, theirs)
    forbidden = tuple(x for x in planned.forbidden if x.result not in theirs)
    bumps = version_bumper(*everything[first:]) is not None
    streams, stream_of, current_device = planned.streams, native.stream, native.current_device
    known_streams = streams.known
    results, returned, changed = planned.results, planned.returned, planned.changed
    held: list[int] | None = None  # the given arrays' addresses that the launches' parameters hold

    def may_run(addresses: list[int], alignment: int) -> bool:
        """alignment: the given addresses OR-ed together, modulo 16."""
        for one, other, low, high in distances:
            if low < addresses[one] - addresses[other] < high:
                return False
        if not spare_results(forbidden, addresses):
            return False
        if alignment and not planned.are_aligned(addresses):
            return False
        return planned.surely_disjoint(addresses) and planned.begin_alike(addresses)

    def repeat(args: Sequence[Any]) -> Any:
        nonlocal held
        found = read(*args)
        if found is None:
            return SLOW_PATH
        own_addresses, got, tracked = found
        if got[:-1] != form or tracked or current_device() != device:
            return SLOW_PATH
        for x, address in left_out:
            if address_of(x) != address:
                return SLOW_PATH
        if own_addresses != held:
            addresses = others.copy()
            for n, at in patched:
                addresses[at] = own_addresses[n]
            if not may_run(addresses, got[-1]):
                return SLOW_PATH
            held = None  # until all parameters are written, in case of an exception
            for write in writes:
                write(addresses)
            held = own_addresses
        stream = stream_of(device)
        if stream not in known_streams:
            streams.add(stream)
        all_results = results
        if written:
            all_results = list(results)
            for n, at in written:
                all_results[at - first] = args[n]
        for enqueue, blocks, arguments in enqueues:
            enqueue(blocks, stream, arguments)
        if bumps:
            bump_versions(*all_results)
        if changed:
            all_inputs = list(planned.inputs)
            for n, at in patched:
                if at < first:
                    all_inputs[at] = args[n]
            bump_versions(*[all_inputs[n] for n in changed])
        return returned(all_results)

    return repeat


def _distances(
    planned: Planned, everything: Sequence[Any], theirs: Sequence[int]
) -> list[Distance]:
    """The distances at which an array to write overlaps any other array. theirs: indices of the caller's arrays to write."""
    reach = [None if x is None else byte_range(planned.native.view(x), 0) for x in everything]
    found = []
    for n in theirs:
        low, high = reach[n]  # type: ignore[misc]  # a given one
        for m, other in enumerate(reach):
            if other is not None and m != n and not (m in theirs and m < n):
                start, end = other
                if start < end and low < high:
                    found.append(Distance(n, m, start - high, end - low))
    return found
