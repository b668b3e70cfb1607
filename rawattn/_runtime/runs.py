"""Runs of launches that are known with their numbers of blocks, and the memory that they take beside their arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rawattn._interop import streams
from rawattn._interop.native import Memory
from rawattn._interop.streams import PER_THREAD, own_stream
from rawattn._runtime import graphs
from rawattn._runtime.launches import Launch

_SCRATCH_ALIGNMENT, _COUNTER_ALIGNMENT = 256, 8  # bytes, of every piece

# Each with its number of blocks.
Launches = Sequence[tuple[Launch, int]]


class RunMemory:
    """What runs on one device take beside their arrays, in pieces of these sizes in bytes: their addresses come last of all.

    scratch: of each run. counters: of all runs on one stream, zero before and after each.
    """

    def __init__(self, device: int, scratch: Iterable[int], counters: Iterable[int]) -> None:
        self.device = device
        sizes = [max(nbytes, 1) for nbytes in scratch]
        self.scratch_at, self.scratch_bytes = _behind_each_other(sizes, _SCRATCH_ALIGNMENT)
        self.counter_at, self.counter_bytes = _behind_each_other(counters, _COUNTER_ALIGNMENT)
        self.counters: dict[Any, tuple[Any, list[int]]] = {}  # with their owner, by `own_stream`

    def without_first(self, count: int) -> tuple[RunMemory, int]:
        """That of runs for which so many pieces of scratch are kept elsewhere, and the bytes of those."""
        rest = self.scratch_at[count:]
        nbytes = rest[0] if rest else self.scratch_bytes
        found = copy.copy(self)
        found.scratch_at = [at - nbytes for at in rest]
        found.scratch_bytes -= nbytes
        return found, nbytes

    def counters_of(self, stream: int, memory: Memory, capturing: bool = False) -> list[int]:
        """The addresses of counters of runs on a stream."""
        if not self.counter_bytes:
            return []
        if capturing:
            base = graphs.zeros(self.counter_bytes, self.device)
            return [base + at for at in self.counter_at]
        key = own_stream(stream)
        found = self.counters.get(key)
        if found is None:
            found = self.counters[key] = self.zeros(stream, memory)
        return found[1]

    def zeros(self, stream: int, memory: Memory) -> tuple[Any, list[int]]:
        """Counters of one owner: what keeps their memory, and their addresses."""
        import cupy

        owner, base = memory.keep(self.counter_bytes, self.device)
        cupy.cuda.runtime.memsetAsync(base, 0, self.counter_bytes, stream)
        return owner, [base + at for at in self.counter_at]

    def run_captured(
        self, addresses: list[int], stream: int, memory: Memory, launches: Launches
    ) -> None:
        """On a stream that is being captured: the graph owns what the launches use."""
        scratch = None
        if self.scratch_bytes:
            scratch, base = memory.allocate(self.scratch_bytes, self.device)
            addresses += [base + at for at in self.scratch_at]
        addresses += self.counters_of(stream, memory, capturing=True)
        for launch, blocks in launches:
            launch(addresses, blocks, stream)
        if not memory.keeps_captured():
            graphs.hold(launches, scratch)


def _behind_each_other(sizes: Iterable[int], alignment: int) -> tuple[list[int], int]:
    """Where each piece begins, and the bytes of all."""
    begins, end = [], 0
    for nbytes in sizes:
        begins.append(end)
        end += -(-nbytes // alignment) * alignment
    return begins, end


def run_of(
    launches: Launches | None, beside: RunMemory
) -> Callable[[list[int], int, Memory, Any], None]:
    """`Prepared.run` that looks at no lengths. Where the call has some, what kernels read of them is among the addresses.

    launches: of all runs; None: each is given its own, instead of lengths.
    """
    device, scratch_at, scratch_bytes = beside.device, beside.scratch_at, beside.scratch_bytes
    counters, counter_bytes, counters_of = beside.counters, beside.counter_bytes, beside.counters_of
    stateful, is_capturing = bool(scratch_bytes or counter_bytes), streams.is_capturing
    run_captured = beside.run_captured

    def run(addresses: list[int], stream: int, memory: Memory, given: Any) -> None:
        own: Launches = given if launches is None else launches
        if stateful and stream > 1 and is_capturing(stream):
            run_captured(addresses, stream, memory, own)
            return
        if scratch_bytes:
            # `scratch` may be freed as soon as the launches are in the stream: whoever gets it then comes later there.
            scratch, base = memory.allocate(scratch_bytes, device)  # noqa: RUF059
            for at in scratch_at:  # not a comprehension, which before Python 3.12 is another call
                addresses.append(base + at)
        if counter_bytes:
            found = counters.get(stream if stream != PER_THREAD else own_stream(stream))
            addresses += counters_of(stream, memory) if found is None else found[1]
        for launch, blocks in own:
            launch(addresses, blocks, stream)

    return run
