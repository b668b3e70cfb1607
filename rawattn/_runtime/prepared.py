"""A call with everything decided but the addresses: kernels loaded, parameters written, memory counted.

Calls that differ only in the arrays they are given share one, so a repeated call costs a dictionary lookup, the results'
allocation and the launches.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rawattn._call.layout import Lengths
from rawattn._call.seq_layout import SeqLayout
from rawattn._call.structure import Structure
from rawattn._forgetting import make_room
from rawattn._interop import streams
from rawattn._interop.native import Memory
from rawattn._interop.streams import PER_THREAD, own_stream
from rawattn._kernels.steps import Lists, Steps, Tiles
from rawattn._runtime import graphs
from rawattn._runtime.launches import Launch, launch_of
from rawattn._runtime.lengths import CARRIED, NAMES, LengthsMemory
from rawattn._runtime.runs import Launches, RunMemory, run_of
from rawattn._runtime.setup import Carrying, Setup, without_filling

_MAX_COUNTED = 512
_MAX_KNOWN = 16  # streams and calls that a layout remembers
_MAX_LISTED = 8  # likewise a mask, whose lists are larger

Run = Callable[[list[int], int, Memory, "Lengths | None"], None]
RunKeeping = Callable[[list[int], int, Memory, dict[Any, Any]], None]

# Lengths on a device: what keeps their memory, their addresses, those of the counters, and how many blocks each launch has.
Found = tuple[Any, list[int], list[int], Sequence[int]]


class Prepared:
    """The launches of one call on one device.

    names: of the arrays whose addresses a run is given, in that order.
    run: launches on a stream of the current device, from
        addresses: of the arrays, 0 for one not given; the list is used up.
        stream: its handle. memory: of work on that stream. lengths: where the call is ragged.
    run_keeping: likewise, with the memo of its mask for what it need not make again; None where there is nothing to keep.
    beside: what runs take beside the arrays.
    """

    def __init__(
        self,
        steps: Steps,
        structure: Structure,
        lengths: Lengths,
        device: int,
        names: Sequence[str],
    ) -> None:
        self.device, self.config, self._names = device, steps.config, tuple(names)
        self.ragged = structure.ragged
        # Orders of lengths on the host belong to the layout, others to the run.
        self._once = structure.on_host
        orders = steps.orders if self.ragged else {}
        # Lists come first: a mask may keep them, and none of the others.
        listed = {name: steps.scratch[name] for name in steps.lists.scratch}
        scratch = {**({} if self._once else orders), **listed, **steps.scratch}
        self._lengths_memory = LengthsMemory(
            structure,
            device,
            list(orders.values()) if self._once else [],
            carried=any(each.carried for each in steps.launches),
        )
        slots = [*names, *(NAMES if self.ragged else ())]
        slots += orders if self._once else ()
        slots += (CARRIED,) if self._lengths_memory.carried else ()
        slots += (*scratch, *steps.counters)
        self._counted: dict[tuple[int, int], list[int]] = {}  # blocks by the longest sequences
        self._slot = slot = {name: n for n, name in enumerate(slots)}

        # What comes before all else: in the first run with a layout, with integers of the host, and in each of the others.
        self._setup = None
        self._each_setup = None
        if self.ragged:
            self._setup = setup = Setup(steps, slot, structure.batch, device, self._once)
            self._each_setup = setup.each
            self._first_setup: Carrying = setup.first
            if self._once and not self._lengths_memory.carried:
                self._first_setup = setup.loaded(self._lengths_memory.integers)
        # Kernels that would have no blocks are not even compiled, where the shapes alone say so.
        counts = [_count(each.blocks, lengths) for each in steps.launches]
        wanted = [self.ragged or bool(blocks) for blocks in counts]
        self.steps = list(itertools.compress(steps.launches, wanted))
        self._launches = [launch_of(step, slot, device) for step in self.steps]
        self._blocks = list(itertools.compress(counts, wanted))
        pieces = (scratch, steps.counters) if self._launches else ({}, {})
        self.beside = RunMemory(device, *[each.values() for each in pieces])
        self.run = self._runner()
        self.run_keeping = self._keeping_runner(steps.lists)

    def _runner(self) -> Run:
        """`run`, without what this call does not need."""
        if self.ragged:
            return self._ragged_runner()
        return run_of(list(zip(self._launches, self._blocks, strict=True)), self.beside)

    def _keeping_runner(self, lists: Lists) -> RunKeeping | None:
        """What is kept belongs to the mask and to the stream, as lengths do to a layout: it is made and read in the order of
        that stream, and its memory goes back in that order too, when the mask is gone or has kept too much.
        """
        made = [any(step is each for each in lists.launches) for step in self.steps]
        if not any(made):
            return None
        count = len(lists.scratch)
        rest, kept_bytes = self.beside.without_first(count)
        kept_at = self.beside.scratch_at[:count]
        launches = list(zip(self._launches, self._blocks, strict=True))
        others = list(itertools.compress(launches, map(operator.not_, made)))
        run_all, run_others = run_of(launches, rest), run_of(others, rest)
        run_captured = self.beside.run_captured
        device, is_capturing = self.device, streams.is_capturing

        def run(addresses: list[int], stream: int, memory: Memory, memo: dict[Any, Any]) -> None:
            if stream > 1 and is_capturing(stream):  # a graph owns all that it uses
                run_captured(addresses, stream, memory, launches)
                return
            key = (self, own_stream(stream))
            found = memo.get(key)
            if found is not None:
                addresses += found[1]
                run_others(addresses, stream, memory, None)
                return
            try:
                owner, base = memory.keep(kept_bytes, device)
            except MemoryError:  # the framework's own allocator may have some left
                self.run(addresses, stream, memory, None)
                return
            listed = [base + at for at in kept_at]
            addresses += listed
            run_all(addresses, stream, memory, None)
            # Only now: another thread that finds them comes behind these launches.
            make_room(memo, _MAX_LISTED)
            memo[key] = owner, listed

        return run

    def _ragged_runner(self) -> Run:
        first_setup, each_setup = self._first_setup, self._each_setup
        addresses_of, blocks_of, counters_of = (
            self._lengths_memory.addresses,
            self._blocks_of,
            self.beside.counters_of,
        )
        launches, is_capturing, device = self._launches, streams.is_capturing, self.device
        scratch_at, scratch_bytes = self.beside.scratch_at, self.beside.scratch_bytes

        def run(addresses: list[int], stream: int, memory: Memory, lengths: Lengths | None) -> None:
            assert lengths is not None
            capturing = stream > 1 and is_capturing(stream)
            own = stream if stream != PER_THREAD else own_stream(stream)
            key, data = (self, own), b""
            # What a graph uses is sent anew at each replay.
            found: Found | None = None if capturing else lengths.memo.get(key)
            blocks: Sequence[int]
            known = found is not None
            if found is None:
                # Counted first: what one launch does not hold is refused before anything is launched.
                blocks = blocks_of(lengths)
                owner, own_addresses, data, to = addresses_of(lengths, memory)
                counters = counters_of(stream, memory, capturing)
                found = owner, own_addresses, counters, blocks
            else:
                _, own_addresses, counters, blocks = found
            addresses += own_addresses
            scratch = None
            if scratch_bytes:
                # It may be freed as soon as the launches are in the stream: whoever gets it then comes later there.
                scratch, base = memory.allocate(scratch_bytes, device)
                for (
                    at
                ) in scratch_at:  # not a comprehension, which before Python 3.12 is another call
                    addresses.append(base + at)
            addresses += counters
            if data:
                first_setup(data, to, addresses, stream)
            elif each_setup is not None:
                launch, count = each_setup
                launch(addresses, count, stream)
            if not known and not capturing:
                if lengths.memo:
                    make_room(lengths.memo, _MAX_KNOWN)
                lengths.memo[key] = found
            for launch, count in zip(launches, blocks):  # noqa: B905  # (strict costs what a launch's patches do)
                launch(addresses, count, stream)
            if capturing and not memory.keeps_captured():
                graphs.hold(self, found, scratch)

        return run

    def with_integers(self, lengths: Lengths) -> Run:
        """`run` of lengths that all lie on the device: their addresses, in the order of `NAMES`, stand behind those of arrays.

        lengths: such ones. They tell how many blocks there are.
        """
        setup = () if self._each_setup is None else (self._each_setup,)
        blocks = [_count(each.blocks, lengths) for each in self.steps]
        return run_of([*setup, *zip(self._launches, blocks, strict=True)], self.beside)

    def with_starts(
        self, bound: Callable[[SeqLayout], Lengths]
    ) -> tuple[
        Callable[[list[int], int, Memory, Any], None],
        Callable[[SeqLayout], tuple[Sequence[Any], Any]],
    ]:
        """`run` of lengths that are starts on the host alone. And what makes of their layout what stands behind the addresses
        of arrays, and what a run is given instead of lengths.

        bound: makes lengths of such a layout, which takes longer than what else there is to do.
        """
        if not self._lengths_memory.carried:
            return self.run, lambda seqs: ((), bound(seqs))
        integers_of, launches, known = (
            self._lengths_memory.carried_starts,
            self._launches,
            self._counted,
        )

        def given(seqs: SeqLayout) -> tuple[list[Any], Launches]:
            q, k = seqs._values  # type: ignore[misc]  # such ones have them
            blocks = known.get((q[0], k[0])) or self._blocks_of(bound(seqs))
            return integers_of(seqs), list(zip(launches, blocks))  # noqa: B905

        return run_of(None, self.beside), given

    def filling_all_but(
        self, theirs: Sequence[int]
    ) -> tuple[tuple[Launch, int] | None, list[Launch]]:
        """What comes before all else in each run, and the launches, where padding rows of these arrays stay as they are."""
        kept = {self._names[n] for n in theirs}
        launches = list(self._launches)
        for n, step in enumerate(self.steps):
            if kept.intersection(name for _, name in step.fills):
                launches[n] = launch_of(without_filling(step, kept), self._slot, self.device)
        setup = None if self._setup is None else self._setup.each_but(kept)
        return setup, launches

    def own(self, memory: Memory, stream: int, lengths: Lengths | None) -> Own:
        """What a run would allocate, for runs that must not: allocated, sent and ordered now, on `stream`."""
        return Own(self, memory, stream, lengths)

    def _blocks_of(self, lengths: Lengths) -> list[int]:
        """Of each step."""
        longest = (lengths.q.max_seqlen, lengths.k.max_seqlen)
        found = self._counted.get(longest)
        if found is None:
            found = [_count(each.blocks, lengths) for each in self.steps]
            # In batch mode the host counts all of the lengths that it has, and not by the longest one alone.
            if lengths.group:
                make_room(self._counted, _MAX_COUNTED)
                self._counted[longest] = found
        return found


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
        data, to = b"", 0
        if prepared.ragged:
            assert lengths is not None
            blocks = prepared._blocks_of(lengths)
            owner, own_addresses, data, to = prepared._lengths_memory.addresses(lengths, memory)
            self.tail += own_addresses
            self._held += [owner, lengths]
        beside = prepared.beside
        if beside.scratch_bytes:
            owner, base = memory.allocate(beside.scratch_bytes, prepared.device)
            self.tail += [base + at for at in beside.scratch_at]
            self._held.append(owner)
        if beside.counter_bytes:
            owner, counters = beside.zeros(stream, memory)
            self.tail += counters
            self._held.append(owner)
        if data:
            unknown = [0] * len(prepared._names)  # padding of what is not there is not filled
            prepared._first_setup(data, to, [*unknown, *self.tail], stream)
        self._prepared, self._blocks = prepared, blocks
        self.launches = self._launches_of(prepared._each_setup, prepared._launches)
        self._keeping: dict[tuple[int, ...], list[tuple[Launch, int]]] = {}  # by `theirs`

    def _launches_of(
        self, setup: tuple[Launch, int] | None, launches: Sequence[Launch]
    ) -> list[tuple[Launch, int]]:
        before = () if setup is None else (setup,)
        return [*before, *zip(launches, self._blocks, strict=True)]

    def run(
        self,
        addresses: list[int],
        stream: int,
        integers: dict[int, int] | None = None,
        theirs: Sequence[int] = (),
    ) -> None:
        """integers: other addresses of lengths on the device, by their index in `NAMES`.

        theirs: indices in `addresses` of a caller's own outputs, whose padding rows stay as they are.
        """
        first = len(addresses)
        addresses += self.tail
        if integers is not None:
            for index, address in integers.items():
                addresses[first + index] = address
        for launch, count in self.launches_keeping(tuple(theirs)):
            launch(addresses, count, stream)

    def launches_keeping(self, theirs: tuple[int, ...]) -> list[tuple[Launch, int]]:
        """All of a run that leaves padding rows of these arrays as they are."""
        if not theirs or not self._prepared.ragged:
            return self.launches
        found = self._keeping.get(theirs)
        if found is None:
            prepared = self._prepared
            found = self._launches_of(*prepared.filling_all_but(theirs))
            self._keeping[theirs] = found
        return found


def _count(blocks: int | Tiles, lengths: Lengths) -> int:
    return blocks if isinstance(blocks, int) else blocks.blocks(lengths)
