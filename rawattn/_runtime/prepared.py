"""A call with everything decided but the addresses: kernels loaded, parameters packed, memory counted.

Calls that differ only in the arrays they are given share one, so a repeated call costs a dictionary lookup, the results'
allocation and the launches.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rawattn._call.layout import Lengths
from rawattn._call.structure import Structure
from rawattn._interop import streams
from rawattn._interop.native import Memory
from rawattn._kernels.portable import fill_padding
from rawattn._kernels.steps import Step, Steps, Tiles
from rawattn._runtime import graphs, kernel
from rawattn._runtime.kernel import Arguments
from rawattn._runtime.lengths import NAMES, Placed, Sender
from rawattn._runtime.tensor_map import MAP_BYTES, TensorMaps

_ALIGNMENT = 256  # bytes, of every piece of scratch
_MAX_PLACED = 16  # streams and calls that a layout remembers

Run = Callable[[list[int], int, Memory, "Lengths | None"], None]


class Prepared:
    """The launches of one call on one device.

    names: of the arrays whose addresses a run is given, in that order.
    run: launches on a stream of the current device, from
        addresses: of the arrays, 0 for one not given; the list is used up.
        stream: its handle. memory: of work on that stream. lengths: where the call is ragged.
    """

    def __init__(
        self,
        steps: Steps,
        structure: Structure,
        lengths: Lengths,
        device: int,
        names: Sequence[str],
    ) -> None:
        self.device, self.config, self.arrays = device, steps.config, len(names)
        self.ragged = structure.ragged
        self._structure = structure
        self._sender = Sender(device) if self.ragged else None
        # Orders of lengths on the host belong to the layout, others to the run.
        self._once = structure.on_host
        orders = steps.orders if self.ragged else {}
        scratch = {**({} if self._once else orders), **steps.scratch}
        self._orders = list(orders.values()) if self._once else []
        slots = [*names, *(NAMES if self.ragged else ())]
        slots += orders if self._once else ()
        self._scratch_at: list[int] = []
        self._scratch_bytes = 0
        for name, nbytes in scratch.items():
            slots.append(name)
            self._scratch_at.append(self._scratch_bytes)
            self._scratch_bytes += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._counter_at: list[int] = []
        self._counter_bytes = 0
        for name, nbytes in steps.counters.items():
            slots.append(name)
            self._counter_at.append(self._counter_bytes)
            self._counter_bytes += -(-nbytes // 8) * 8
        self._counters: dict[int, tuple[Any, list[int]]] = {}  # by stream
        slot = {name: n for n, name in enumerate(slots)}

        def launches(steps: Sequence[Step]) -> list[Launch]:
            return [launch_of(step, slot, device) for step in steps]

        self._schedules = launches(steps.schedules if self.ragged else ())
        self._schedule_blocks = [_count(each.blocks, lengths) for each in steps.schedules]
        # Kernels that would have no blocks are not even compiled, where the shapes alone say so.
        counts = [_count(each.blocks, lengths) for each in steps.launches]
        wanted = [self.ragged or bool(blocks) for blocks in counts]
        self.steps = list(itertools.compress(steps.launches, wanted))
        self._launches = launches(self.steps)
        self._fills = [step.source.entry == fill_padding.ENTRY for step in self.steps]
        self._blocks = list(itertools.compress(counts, wanted))
        if not self._launches:
            self._scratch_bytes = self._counter_bytes = 0
            self._scratch_at, self._counter_at = [], []
        self.run = self._runner()

    def _runner(self) -> Run:
        """`run`, without what this call does not need."""
        if self.ragged:
            return self._run
        counted = list(zip(self._launches, self._blocks, strict=True))
        counters, counter_bytes = self._counters, self._counter_bytes
        scratch_at, scratch_bytes, device = self._scratch_at, self._scratch_bytes, self.device
        stateful, is_capturing = bool(scratch_bytes or counter_bytes), streams.is_capturing

        def run(addresses: list[int], stream: int, memory: Memory, lengths: Lengths | None) -> None:
            if stateful and stream > 1 and is_capturing(stream):
                self._run(addresses, stream, memory, lengths)
                return
            if scratch_bytes:
                # `scratch` may be freed as soon as the launches are in the stream: whoever gets it then comes later there.
                scratch, base = memory.allocate(scratch_bytes, device)  # noqa: RUF059
                for (
                    at
                ) in scratch_at:  # not a comprehension, which before Python 3.12 is another call
                    addresses.append(base + at)
            if counter_bytes:
                found = counters.get(stream)
                if found is None:
                    found = counters[stream] = self._zeros(stream, memory)
                addresses += found[1]
            for launch, blocks in counted:
                launch(addresses, blocks, stream)

        return run

    def _run(
        self, addresses: list[int], stream: int, memory: Memory, lengths: Lengths | None
    ) -> None:
        # The legacy stream, 0 or 1, cannot be captured.
        capturing = stream > 1 and streams.is_capturing(stream)
        blocks: Sequence[int] = self._blocks
        placed = None
        if self.ragged:
            assert lengths is not None
            placed, blocks = self._place(lengths, stream, memory, addresses, capturing)
            addresses += placed.addresses
        self._enqueue(addresses, blocks, stream, memory, placed, capturing)

    def with_integers(
        self, lengths: Lengths
    ) -> Callable[[list[int], list[int], int, Memory], None]:
        """`run` of lengths that all lie on the device, from their addresses in the order of `NAMES`, which come second.

        lengths: such ones. They tell how many blocks there are.
        """
        blocks = [_count(each.blocks, lengths) for each in self.steps]

        def run(addresses: list[int], integers: list[int], stream: int, memory: Memory) -> None:
            addresses += integers
            capturing = stream > 1 and streams.is_capturing(stream)
            self._enqueue(addresses, blocks, stream, memory, None, capturing)

        return run

    def _enqueue(
        self,
        addresses: list[int],
        blocks: Sequence[int],
        stream: int,
        memory: Memory,
        placed: Placed | None,
        capturing: bool,
    ) -> None:
        """addresses: of the arrays and of the lengths."""
        scratch = None
        if self._scratch_at:
            # It may be freed as soon as the launches are in the stream: whoever gets it then comes later there.
            scratch, base = memory.allocate(self._scratch_bytes, self.device)
            addresses += [base + at for at in self._scratch_at]
        if self._counter_bytes:
            if capturing:
                base = graphs.zeros(self._counter_bytes, self.device)
                addresses += [base + at for at in self._counter_at]
            else:
                counters = self._counters.get(stream)
                if counters is None:
                    counters = self._counters[stream] = self._zeros(stream, memory)
                addresses += counters[1]
        if not self._once:
            for launch, count in zip(self._schedules, self._schedule_blocks):  # noqa: B905
                launch(addresses, count, stream)
        for launch, count in zip(self._launches, blocks):  # noqa: B905  # (strict costs what a launch's patches do)
            launch(addresses, count, stream)
        if capturing and not memory.keeps_captured():
            graphs.hold(self, placed, scratch)

    def own(self, memory: Memory, stream: int, lengths: Lengths | None) -> Own:
        """What a run would allocate, for runs that must not: allocated, sent and ordered now, on `stream`."""
        return Own(self, memory, stream, lengths)

    def _place(
        self,
        lengths: Lengths,
        stream: int,
        memory: Memory,
        addresses: list[int],
        capturing: bool,
    ) -> tuple[Placed, Sequence[int]]:
        """The lengths on the device, and how many blocks each launch has for them."""
        key = (self, stream)
        found: tuple[Placed, Sequence[int]] | None = None
        if not capturing:  # what a graph uses is sent anew at each replay
            found = lengths.memo.get(key)
        if found is None:
            found = self._place_anew(lengths, stream, memory, addresses)
            if not capturing:
                if len(lengths.memo) >= _MAX_PLACED:
                    lengths.memo.clear()
                lengths.memo[key] = found
        return found

    def _place_anew(
        self, lengths: Lengths, stream: int, memory: Memory, addresses: list[int]
    ) -> tuple[Placed, Sequence[int]]:
        # Counted first: what one launch does not hold is refused before anything is launched.
        blocks = [_count(each.blocks, lengths) for each in self.steps]
        assert self._sender is not None
        placed = Placed(lengths, self._structure, memory, self._sender, stream, self._orders)
        if self._once:
            known = [*addresses, *placed.addresses]
            for launch, count in zip(self._schedules, self._schedule_blocks, strict=True):
                launch(known, count, stream)
        return placed, blocks

    def _zeros(self, stream: int, memory: Memory) -> tuple[Any, list[int]]:
        import cupy

        owner, base = memory.keep(self._counter_bytes, self.device)
        cupy.cuda.runtime.memsetAsync(base, 0, self._counter_bytes, stream)
        return owner, [base + at for at in self._counter_at]


class Own:
    """Memory for the runs of one owner: scratch, counters, and lengths of the host where they are now.

    Runs with it allocate nothing, and come one after the other on the device: they share this memory.

    tail: the addresses behind those of the arrays. launches: all of a run, each with its number of blocks.
    """

    def __init__(
        self, prepared: Prepared, memory: Memory, stream: int, lengths: Lengths | None
    ) -> None:
        blocks: Sequence[int] = prepared._blocks
        self.tail: list[int] = []
        self._held: list[Any] = []
        if prepared.ragged:
            assert lengths is not None
            unknown = [0] * prepared.arrays
            placed, blocks = prepared._place_anew(lengths, stream, memory, unknown)
            self.tail += placed.addresses
            self._held += [placed, lengths]
        if prepared._scratch_at:
            owner, base = memory.allocate(prepared._scratch_bytes, prepared.device)
            self.tail += [base + at for at in prepared._scratch_at]
            self._held.append(owner)
        if prepared._counter_bytes:
            counters = prepared._zeros(stream, memory)
            self.tail += counters[1]
            self._held.append(counters[0])
        schedules = () if prepared._once else zip(prepared._schedules, prepared._schedule_blocks)  # noqa: B905
        self.launches = [*schedules, *zip(prepared._launches, blocks, strict=True)]
        self._fills = [False] * (len(self.launches) - len(prepared._fills)) + prepared._fills

    def run(
        self,
        addresses: list[int],
        stream: int,
        integers: dict[int, int] | None = None,
        theirs: Sequence[int] = (),
    ) -> None:
        """integers: other addresses of lengths on the device, by their place in `NAMES`.

        theirs: places in `addresses` of a caller's own outputs, whose padding rows stay as they are.
        """
        first = len(addresses)
        addresses += self.tail
        if integers is not None:
            for place, address in integers.items():
                addresses[first + place] = address
        filled = addresses
        if theirs and any(self._fills):
            filled = [0 if n in theirs else x for n, x in enumerate(addresses)]
        for (launch, count), fills in zip(self.launches, self._fills, strict=True):
            launch(filled if fills else addresses, count, stream)


# Launches a step, from the addresses of everything that has a slot, the number of blocks and the stream.
Launch = Callable[[Sequence[int], int, int], None]


def launch_of(step: Step, slot: dict[str, int], device: int) -> Launch:
    """One step, its kernel loaded. Its arguments are packed once, and patched where addresses differ from the last ones."""
    loaded = kernel.load(step.source, device)
    if step.shared_bytes:
        loaded.allow_shared_memory(step.shared_bytes)
    enqueue = loaded.launcher(step.threads, step.shared_bytes, step.early)
    parameters: tuple[bytes, ...] = (step.params,)
    if step.maps:
        parameters += (bytes(MAP_BYTES * len(step.maps)),)
    first = Arguments(parameters)
    free = [first]  # arguments that no launch is using
    at = first.at[0]
    assert all((at + offset) % 8 == 0 for offset, _ in step.patches)
    placed = sorted((at + offset, slot[name]) for offset, name in step.patches)
    order = [n for _, n in placed] + [slot[name] for name, _ in step.maps]
    pick = operator.itemgetter(*order, order[-1])  # one more: it gives a tuple then
    words = [(place // 8, n) for n, (place, _) in enumerate(placed)]
    maps_at = [first.at[1] + MAP_BYTES * n for n in range(len(step.maps))]
    tensor_maps = [
        (slice(at, at + MAP_BYTES), n, TensorMaps(geometry))
        for n, at, (_, geometry) in zip(itertools.count(len(words)), maps_at, step.maps)
    ]

    def patch(arguments: Arguments, picked: tuple[int, ...]) -> None:
        # Through memory views: a third of what `struct.pack_into` and slices of a bytearray take.
        data, view = arguments.words, arguments.view
        arguments.patched = None  # until all of it is written
        for at, n in words:
            data[at] = picked[n]
        for where, n, maps in tensor_maps:
            view[where] = maps.at(picked[n])
        arguments.patched = picked

    def launch(addresses: Sequence[int], blocks: int, stream: int) -> None:
        if not blocks:
            return
        try:
            arguments = free.pop()
        except IndexError:  # another thread is launching it
            arguments = Arguments(parameters)
        picked = pick(addresses)
        if picked != arguments.patched:
            patch(arguments, picked)
        enqueue(blocks, stream, arguments)
        free.append(arguments)

    return launch


def _count(blocks: int | Tiles, lengths: Lengths) -> int:
    return blocks if isinstance(blocks, int) else blocks.blocks(lengths)
