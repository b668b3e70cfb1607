"""Runs of launches with known numbers of blocks, and the memory that they need: scratch and counters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rawattn._interop import streams
from rawattn._interop.native import Memory
from rawattn._interop.streams import PER_THREAD_DEFAULT, own_stream
from rawattn._runtime import graphs
from rawattn._runtime.launches import Launch

_SCRATCH_ALIGNMENT, _COUNTER_ALIGNMENT = 256, 8  # bytes, of every piece

Launches = Sequence[tuple[Launch, int]]  # each with its number of blocks


class RunMemory:
    """Scratch and counters of runs on one device. Their addresses come last among a run's addresses, in this order.

    scratch: sizes in bytes of memory that a single run uses.
    counters: sizes in bytes of memory that all runs on one stream share, zero before and after each run.
    spans_launches: whether counters are not zero between two launches of a run. Then a run has them to itself until all of its
        launches are enqueued, since another thread may enqueue launches on the same stream meanwhile.
    """

    def __init__(
        self,
        device: int,
        scratch: Iterable[int],
        counters: Iterable[int],
        spans_launches: bool = False,
    ) -> None:
        self.device, self.spans_launches = device, spans_launches
        sizes = [max(nbytes, 1) for nbytes in scratch]
        self.scratch_at, self.scratch_bytes = _behind_each_other(sizes, _SCRATCH_ALIGNMENT)
        self.counter_at, self.counter_bytes = _behind_each_other(counters, _COUNTER_ALIGNMENT)
        # By stream (`own_stream`): the owner of the counters, and their addresses.
        self.counters: dict[Any, tuple[Any, list[int]]] = {}

    def without_leading_scratch(self, count: int) -> tuple[RunMemory, int]:
        """The memory of runs whose first `count` pieces of scratch are kept elsewhere, and the bytes of these pieces."""
        rest = self.scratch_at[count:]
        nbytes = rest[0] if rest else self.scratch_bytes
        found = copy.copy(self)
        found.scratch_at = [at - nbytes for at in rest]
        found.scratch_bytes -= nbytes
        return found, nbytes

    def counters_of(self, stream: int, memory: Memory, capturing: bool = False) -> list[int]:
        """The addresses of the counters for a run on a stream."""
        if not self.counter_bytes:
            return []
        if capturing:
            base = graphs.zeros(self.counter_bytes, self.device)
            return [base + at for at in self.counter_at]
        key = own_stream(stream)
        found = self.counters.get(key)
        if found is None:
            # Another thread may have entered its own meanwhile. All use those: memory of others would be freed before a launch.
            found = self.counters.setdefault(key, self.zeros(stream, memory))
        return found[1]

    def zeros(self, stream: int, memory: Memory) -> tuple[Any, list[int]]:
        """New counters, cleared on a stream: the owner of their memory, and their addresses."""
        import cupy

        owner, base = memory.keep(self.counter_bytes, self.device)
        cupy.cuda.runtime.memsetAsync(base, 0, self.counter_bytes, stream)
        return owner, [base + at for at in self.counter_at]

    def take_counters(self, stream: int, memory: Memory) -> tuple[Any, list[int]]:
        """Counters that no other run gets before `give_back_counters`: the owner of their memory, and their addresses.

        A run that fails does not give them back, since they may not be zero: the next one gets new ones.
        """
        found = self.counters.pop(own_stream(stream), None)
        return self.zeros(stream, memory) if found is None else found

    def give_back_counters(self, stream: int, taken: tuple[Any, list[int]]) -> None:
        """Leaves counters to later runs on the stream. Those of another run that came first stay; these are freed then."""
        self.counters.setdefault(own_stream(stream), taken)

    def run_alone(
        self, addresses: list[int], stream: int, memory: Memory, launches: Launches
    ) -> None:
        """A run that has its counters to itself, where they span launches."""
        scratch = self._add_scratch(addresses, memory)  # noqa: F841  # may be freed when the launches are enqueued
        taken = self.take_counters(stream, memory)
        addresses += taken[1]
        for launch, blocks in launches:
            launch(addresses, blocks, stream)
        self.give_back_counters(stream, taken)

    def run_captured(
        self, addresses: list[int], stream: int, memory: Memory, launches: Launches
    ) -> None:
        """A run on a stream that is being captured. The memory of the launches stays allocated for the graph."""
        scratch = self._add_scratch(addresses, memory)
        addresses += self.counters_of(stream, memory, capturing=True)
        for launch, blocks in launches:
            launch(addresses, blocks, stream)
        if not memory.keeps_captured():
            graphs.keep_forever(launches, scratch)

    def _add_scratch(self, addresses: list[int], memory: Memory) -> Any:
        """Allocates scratch, adds its addresses, and returns its owner; None if there is none."""
        if not self.scratch_bytes:
            return None
        scratch, base = memory.allocate(self.scratch_bytes, self.device)
        addresses += [base + at for at in self.scratch_at]
        return scratch


class Lone(NamedTuple):
    """A run of one launch that needs no scratch. counters: by stream, as in `RunMemory`; None if it needs none."""

    launch: Launch
    blocks: int
    counters: dict[Any, tuple[Any, list[int]]] | None


def lone_of(launches: Launches, run_memory: RunMemory) -> Lone | None:
    """The one launch of these runs, if they are so simple."""
    if len(launches) != 1 or run_memory.scratch_bytes:
        return None
    return Lone(*launches[0], run_memory.counters if run_memory.counter_bytes else None)


def _behind_each_other(sizes: Iterable[int], alignment: int) -> tuple[list[int], int]:
    """The offset of each piece, and the size of all, in bytes."""
    begins, end = [], 0
    for nbytes in sizes:
        begins.append(end)
        end += -(-nbytes // alignment) * alignment
    return begins, end


def run_of(
    launches: Launches | None, run_memory: RunMemory
) -> Callable[[list[int], int, Memory, Any], None]:
    """A `Prepared.run` that takes no lengths. If the call has lengths, their addresses are among the given ones.

    launches: those of all runs; None if each run is given its own, in place of lengths.
    """
    device, scratch_at, scratch_bytes = (
        run_memory.device,
        run_memory.scratch_at,
        run_memory.scratch_bytes,
    )
    counters, counter_bytes, counters_of = (
        run_memory.counters,
        run_memory.counter_bytes,
        run_memory.counters_of,
    )
    stateful, is_capturing = bool(scratch_bytes or counter_bytes), streams.is_capturing
    run_captured, run_alone = run_memory.run_captured, run_memory.run_alone

    def run_spanning(addresses: list[int], stream: int, memory: Memory, given: Any) -> None:
        capturing = stream > 1 and is_capturing(stream)
        one_run = run_captured if capturing else run_alone
        one_run(addresses, stream, memory, given if launches is None else launches)

    if run_memory.spans_launches:
        return run_spanning

    def run(addresses: list[int], stream: int, memory: Memory, given: Any) -> None:
        to_launch: Launches = given if launches is None else launches
        if stateful and stream > 1 and is_capturing(stream):
            run_captured(addresses, stream, memory, to_launch)
            return
        if scratch_bytes:
            # The scratch may be freed as soon as the launches are enqueued: its next user comes later in the stream.
            scratch, base = memory.allocate(scratch_bytes, device)  # noqa: RUF059
            for at in scratch_at:  # a comprehension is one more call before Python 3.12
                addresses.append(base + at)
        if counter_bytes:
            found = counters.get(stream if stream != PER_THREAD_DEFAULT else own_stream(stream))
            addresses += counters_of(stream, memory) if found is None else found[1]
        for launch, blocks in to_launch:
            launch(addresses, blocks, stream)

    return run
