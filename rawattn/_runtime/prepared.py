"""`Prepared`: a call with everything decided except addresses. Kernels are loaded, parameters written, memory counted.

Calls that differ only in their arrays share one, so a repeated call costs a dictionary lookup, the allocation of results and
the launches.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rawattn._call.layout import Lengths
from rawattn._call.seq_layout import SeqLayout
from rawattn._call.structure import Structure
from rawattn._eviction import evict_if_full
from rawattn._interop import streams
from rawattn._interop.native import Memory
from rawattn._interop.streams import PER_THREAD_DEFAULT, own_stream
from rawattn._kernels.steps import Lists, Step, Steps, Tiles
from rawattn._runtime import graphs, kernel
from rawattn._runtime.launches import BoundLaunch, bound_launch, launch_of
from rawattn._runtime.lengths import CARRIED, NAMES, POSITIONS, LengthsMemory
from rawattn._runtime.runs import Launches, RunMemory, run_of
from rawattn._runtime.setup import SendIntegers, Setup, without_filling

_MAX_COUNTED = 512  # entries of `Prepared._counted`
_MAX_KNOWN = 16  # entries of `Lengths.memo`: pairs of a prepared call and a stream
_MAX_LISTED = 8  # entries of a mask's memo, for such pairs too: its lists take more memory

Run = Callable[[list[int], int, Memory, "Lengths | None"], None]
RunKeeping = Callable[[list[int], int, Memory, dict[Any, Any]], None]

# What a layout's memo has for a prepared call on a stream: the owner of the lengths' memory on the device, the addresses of
# the lengths, those of the counters, and the number of blocks of each launch.
Found = tuple[Any, list[int], list[int], Sequence[int]]


class Prepared:
    """The launches of one call on one device, which must be current.

    names: the arrays whose addresses a run takes, in this order.
    run: launches everything on a stream. Its arguments:
        addresses: those of the arrays, 0 for one that is not given. The list is changed.
        stream: the handle. memory: allocates for work on that stream. lengths: needed if the call is ragged.
    run_keeping: `run` with the mask's memo in place of lengths, where it keeps the lists of tiles that the mask leaves; None
        for a call without such lists.
    run_memory: the scratch and counters of runs.
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
        # If all lengths are on the host, the order of the sequences is kept with the layout. Otherwise each run computes it.
        self._once = structure.on_host
        orders = steps.orders if self.ragged else {}
        # A mask's lists come first, so that `RunMemory.without_leading_scratch` can leave them out when the mask keeps them.
        listed = {name: steps.scratch[name] for name in steps.lists.scratch}
        scratch = {**({} if self._once else orders), **listed, **steps.scratch}
        self._lengths_memory = LengthsMemory(
            structure,
            device,
            list(orders.values()) if self._once else [],
            carried=any(each.carried for each in steps.launches),
        )
        slots = [*names, *(NAMES if self.ragged else ())]
        slots += POSITIONS if structure.positions else ()
        slots += orders if self._once else ()
        slots += (CARRIED,) if self._lengths_memory.carried else ()
        slots += (*scratch, *steps.counters)
        # Numbers of blocks, by the longest sequences of q and k.
        self._counted: dict[tuple[int, int], list[int]] = {}
        self._slot = slot = {name: n for n, name in enumerate(slots)}

        # The setup launch of a ragged call, which comes first. A layout's first run also sends the integers on the host.
        self._setup = None
        self._later_setup = None
        if self.ragged:
            self._setup = setup = Setup(steps, slot, structure.batch, device, self._once)
            self._later_setup = setup.later_runs
            self._first_setup: SendIntegers = setup.first_run
            if self._once and not self._lengths_memory.carried:
                self._first_setup = setup.load_first_run(self._lengths_memory.integers)
        # Without ragged lengths the shapes decide the numbers of blocks: kernels without any block are not compiled.
        counts = [_count(each.blocks, lengths) for each in steps.launches]
        wanted = [self.ragged or bool(blocks) for blocks in counts]
        self.steps = list(itertools.compress(steps.launches, wanted))
        kernel.load_all((step.source for step in self.steps), device)
        self._launches = [launch_of(step, slot, device) for step in self.steps]
        self._blocks = list(itertools.compress(counts, wanted))
        pieces = (scratch, steps.counters) if self._launches else ({}, {})
        of_run, of_stream = [each.values() for each in pieces]
        spans_launches = _span_launches(steps.counters, self.steps)
        self.run_memory = RunMemory(device, of_run, of_stream, spans_launches)
        self.run = self._runner()
        self.run_keeping = self._keeping_runner(steps.lists)

    def _runner(self) -> Run:
        """`run`, specialised for what this call needs."""
        if self.ragged:
            return self._ragged_runner()
        return run_of(self.launches, self.run_memory)

    @property
    def launches(self) -> Launches:
        """The launches of each run of a call without ragged lengths."""
        return list(zip(self._launches, self._blocks, strict=True))

    def _keeping_runner(self, lists: Lists) -> RunKeeping | None:
        """`run_keeping`: a mask's first run on a stream writes its lists of tiles; later runs leave these launches out.

        The lists are kept in the mask's memo for this stream. They are written and read in the order of the stream. Their
        memory is freed in that order too, when the mask is deleted or its memo drops them.
        """
        made = [any(step is each for each in lists.launches) for step in self.steps]
        if not any(made):
            return None
        count = len(lists.scratch)
        rest, kept_bytes = self.run_memory.without_leading_scratch(count)
        kept_at = self.run_memory.scratch_at[:count]
        launches = self.launches
        others = list(itertools.compress(launches, map(operator.not_, made)))
        run_all, run_others = run_of(launches, rest), run_of(others, rest)
        run_captured = self.run_memory.run_captured
        device, is_capturing = self.device, streams.is_capturing

        def run(addresses: list[int], stream: int, memory: Memory, memo: dict[Any, Any]) -> None:
            if stream > 1 and is_capturing(stream):  # a graph owns all memory that it uses
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
            except MemoryError:  # the framework's allocator for scratch may have memory left
                self.run(addresses, stream, memory, None)
                return
            listed = [base + at for at in kept_at]
            addresses += listed
            run_all(addresses, stream, memory, None)
            # Entered only now: another thread that finds the lists then launches behind the launches that write them.
            evict_if_full(memo, _MAX_LISTED)
            memo[key] = owner, listed

        return run

    def _ragged_runner(self) -> Run:
        first_setup, later_setup = self._first_setup, self._later_setup
        addresses_of, blocks_of, counters_of = (
            self._lengths_memory.addresses,
            self._blocks_of,
            self.run_memory.counters_of,
        )
        launches, is_capturing, device = self._launches, streams.is_capturing, self.device
        scratch_at, scratch_bytes = self.run_memory.scratch_at, self.run_memory.scratch_bytes
        spans_launches = self.run_memory.spans_launches
        take, give_back = self.run_memory.take_counters, self.run_memory.give_back_counters

        def run(addresses: list[int], stream: int, memory: Memory, lengths: Lengths | None) -> None:
            assert lengths is not None
            capturing = stream > 1 and is_capturing(stream)
            stream_key = stream if stream != PER_THREAD_DEFAULT else own_stream(stream)
            key, data = (self, stream_key), b""
            # A captured graph sends the lengths in each replay, so it takes nothing from the memo.
            found: Found | None = None if capturing else lengths.memo.get(key)
            blocks: Sequence[int]
            known = found is not None
            if found is None:
                # Blocks are counted first: ValueError for too many in one launch, before anything is launched.
                blocks = blocks_of(lengths)
                owner, own_addresses, data, to = addresses_of(lengths, memory)
                of_one_run = spans_launches and not capturing
                counters = [] if of_one_run else counters_of(stream, memory, capturing)
                found = owner, own_addresses, counters, blocks
            else:
                _, own_addresses, counters, blocks = found
            addresses += own_addresses
            scratch = None
            if scratch_bytes:
                # The scratch may be freed as soon as the launches are enqueued: its next user comes later in the stream.
                scratch, base = memory.allocate(scratch_bytes, device)
                # Not a comprehension, which before Python 3.12 is one more function call.
                for at in scratch_at:
                    addresses.append(base + at)
            taken = None
            if spans_launches and not capturing:
                taken = take(stream, memory)
                counters = taken[1]
            addresses += counters
            if data:
                first_setup(data, to, addresses, stream)
            elif later_setup is not None:
                launch, count = later_setup
                launch(addresses, count, stream)
            if not known and not capturing:
                if lengths.memo:
                    evict_if_full(lengths.memo, _MAX_KNOWN)
                lengths.memo[key] = found
            for launch, count in zip(launches, blocks):  # noqa: B905  # (strict takes as long as patching a launch)
                launch(addresses, count, stream)
            if taken is not None:
                give_back(stream, taken)
            if capturing and not memory.keeps_captured():
                graphs.keep_forever(self, found, scratch)

        return run

    def with_integers(self, lengths: Lengths) -> Launches:
        """The launches of runs on lengths that are all on the device, whose addresses, in the order of `NAMES`, stand behind
        the arrays'.

        lengths: such lengths, which give the numbers of blocks.
        """
        setup = () if self._later_setup is None else (self._later_setup,)
        blocks = [_count(each.blocks, lengths) for each in self.steps]
        return [*setup, *zip(self._launches, blocks, strict=True)]

    def with_starts(
        self, bound: Callable[[SeqLayout], Lengths]
    ) -> tuple[
        Callable[[list[int], int, Memory, Any], None],
        Callable[[SeqLayout], tuple[Sequence[Any], Any]],
    ]:
        """`run` for layouts with only starts, all on the host, and a function that makes two of its arguments of a layout.

        These are the slots behind the arrays' addresses, and the last argument of `run`.

        bound: binds such a layout. It takes longer than everything else here, so it is called only if necessary.
        """
        if not self._lengths_memory.carried:
            return self.run, lambda seqs: ((), bound(seqs))
        integers_of, launches, known = (
            self._lengths_memory.carried_starts,
            self._launches,
            self._counted,
        )

        def given(seqs: SeqLayout) -> tuple[list[Any], Launches]:
            q, k = seqs._start_values  # type: ignore[misc]  # layouts with only starts on the host have values
            blocks = known.get((q[0], k[0])) or self._blocks_of(bound(seqs))
            return integers_of(seqs), list(zip(launches, blocks))  # noqa: B905

        return run_of(None, self.run_memory), given

    def bound_launches(self, blocks: Sequence[int], theirs: Sequence[int]) -> list[BoundLaunch]:
        """The launches of every run but a layout's first one, with parameters of their own.

        blocks: of each launch behind that of the setup. theirs: the indices of arrays whose padding rows stay as they are.
        """
        kept = {self._names[n] for n in theirs}
        setup = None if self._setup is None else self._setup.bound_later_runs(kept)
        found = [] if setup is None else [setup]
        for step, count in zip(self.steps, blocks, strict=True):
            if count:
                found.append(
                    bound_launch(without_filling(step, kept), self._slot, self.device, count)
                )
        return found

    def plan_memory(self, memory: Memory, stream: int, lengths: Lengths | None) -> PlanMemory:
        """Memory for the runs of a plan, which must not allocate. Lengths on the host are sent and ordered now, on `stream`."""
        return PlanMemory(self, memory, stream, lengths)

    def _blocks_of(self, lengths: Lengths) -> list[int]:
        """The number of blocks of each step."""
        longest = (lengths.q.max_seqlen, lengths.k.max_seqlen)
        found = self._counted.get(longest)
        if found is None:
            found = [_count(each.blocks, lengths) for each in self.steps]
            # Only in group mode: in batch mode `tile_count` counts the tiles of all host lengths, not just of the longest.
            if lengths.packed:
                evict_if_full(self._counted, _MAX_COUNTED)
                self._counted[longest] = found
        return found


class PlanMemory:
    """The memory of one plan: scratch, counters, and the device copy of lengths on the host.

    Runs with it allocate nothing. They share the memory, so they must run one after the other on the device.

    tail: the addresses behind those of the arrays.
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
        run_memory = prepared.run_memory
        if run_memory.scratch_bytes:
            owner, base = memory.allocate(run_memory.scratch_bytes, prepared.device)
            self.tail += [base + at for at in run_memory.scratch_at]
            self._held.append(owner)
        if run_memory.counter_bytes:
            owner, counters = run_memory.zeros(stream, memory)
            self.tail += counters
            self._held.append(owner)
        if data:
            unknown = [0] * len(prepared._names)  # no outputs yet, so no padding rows are filled
            prepared._first_setup(data, to, [*unknown, *self.tail], stream)
        self._prepared, self._blocks = prepared, blocks
        self._bound: dict[tuple[int, ...], list[BoundLaunch]] = {}  # those of `run`, by `theirs`

    def bound_launches(self, theirs: Sequence[int] = ()) -> list[BoundLaunch]:
        """The launches of a run, with parameters of their own. theirs: as in `run`."""
        return self._prepared.bound_launches(self._blocks, theirs)

    def run(
        self,
        addresses: list[int],
        stream: int,
        integers: dict[int, int] | None = None,
        theirs: Sequence[int] = (),
    ) -> None:
        """Launches a run.

        integers: addresses of other lengths on the device, by their index in `NAMES`.
        theirs: indices in `addresses` of the caller's arrays to write, whose padding rows stay as they are.
        """
        first = len(addresses)
        addresses += self.tail
        if integers is not None:
            for index, address in integers.items():
                addresses[first + index] = address
        launches = self._bound.get(tuple(theirs))
        if launches is None:
            launches = self._bound[tuple(theirs)] = self.bound_launches(theirs)
        for each in launches:
            each.write(addresses)
            each.enqueue(each.blocks, stream, each.arguments)


def _count(blocks: int | Tiles, lengths: Lengths) -> int:
    return blocks if isinstance(blocks, int) else blocks.blocks(lengths)


def _span_launches(counters: Iterable[str], steps: Sequence[Step]) -> bool:
    """Whether several launches use the same counter. Then one leaves in it what another one reads and clears."""
    used = [name for step in steps for name in {name for _, name in step.patches}]
    return any(used.count(name) > 1 for name in counters)
