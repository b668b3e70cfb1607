"""The integers of a call's lengths on a device, and the orders of sequences that follow from them.

Host lengths are sent in the parameters of launches on the caller's stream, so nothing waits for them. The copy on the device
is kept with the layout, for this stream: later calls with the same layout on the same stream use it. Its memory is freed with
the layout, in the order of that stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn._call.layout import Lengths, Side
from rawattn._call.seq_layout import SeqLayout
from rawattn._call.structure import Structure
from rawattn._interop.native import Memory
from rawattn._kernels.steps import logical_lengths

NAMES = ("start_q", "length_q", "start_k", "length_k")
POSITIONS = ("position_q", "position_k")  # behind these, if there are positions
# The slot that holds the bytes of host integers, where these are carried: they travel in the parameters of the attention
# kernel itself, and need no memory. Their "addresses" are then small numbers (kernels_cu/attn/carried.cuh), which begin at
# _CARRIED_AT.
CARRIED = "carried"
_CARRIED_AT = 8
_ALIGNMENT = 8  # bytes, of every array


class LengthsMemory:
    """The memory on one device for lengths of one structure, and for the orders that belong to the layout.

    more: the sizes of the orders in bytes.
    integers: bytes of the lengths if all of them are on the host.
    carried: whether lengths travel in the parameters of the kernel that reads them, so that they need no memory.
    """

    __slots__ = (
        "_behind",
        "_bytes",
        "_device",
        "_offsets",
        "_positions",
        "_shared",
        "_starts",
        "carried",
        "integers",
    )

    def __init__(
        self, structure: Structure, device: int, more: Sequence[int], *, carried: bool = False
    ) -> None:
        self._device = device
        q, k, batch = structure.q, structure.k, structure.batch
        self._starts = [np.dtype(np.int32 if x.start == 4 else np.int64) for x in (q, k)]
        # Room for all integers of the structure, since any of them may be on the host.
        sizes = [q.start * (batch + 1), q.length * batch, k.start * (batch + 1), k.length * batch]
        self._positions = structure.positions
        if self._positions:
            sizes += [q.position * batch, k.position * batch]
        self._bytes = 0
        self._offsets = [self._room(size) for size in sizes]
        self.integers = self._bytes
        self.carried = carried
        self._shared = structure.shared
        self._behind = [self._room(size) for size in more]

    def _room(self, size: int) -> int:
        at = self._bytes
        self._bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        return at

    def addresses(self, lengths: Lengths, memory: Memory) -> tuple[Any, list[Any], bytes, int]:
        """(owner, addresses, data, to) for some lengths: the owner of the memory, and the data to send to the address `to`.

        addresses: those of `NAMES` and, if there are positions, of `POSITIONS`; 0 for integers that do not exist. Behind them
        the addresses of the orders or, if lengths are carried, their bytes.
        """
        q, k, owner, base = lengths.q, lengths.k, None, 0
        addresses: list[Any]
        if self.carried:
            base = _CARRIED_AT
        elif self._bytes and (lengths.on_host or _any_on_host(lengths)):
            owner, base = memory.keep(self._bytes, self._device)
        data, start, length = self._put(b"", 0, q, lengths, base)
        if k is q:
            addresses = [start, length, start, length]
        else:
            data, start_k, length_k = self._put(data, 1, k, lengths, base)
            addresses = [start, length, start_k, length_k]
        if self._positions:
            for n, side in enumerate((q, k)):
                data, at = self._put_positions(data, n, side.position, base)
                addresses.append(at)
        if self.carried:
            return None, [*addresses, data], b"", 0
        for at in self._behind:
            addresses.append(base + at)
        return owner, addresses, data, base

    def carried_starts(self, seqs: SeqLayout) -> list[Any]:
        """The addresses of `addresses` for a layout with only starts, where these are carried."""
        start = seqs._arrays["seqstart_q"]
        data, at = self._sent(0, start), _CARRIED_AT + self._offsets[0]
        if self._shared:
            return [at, 0, at, 0, data]
        at_k = self._offsets[2]
        data = data.ljust(at_k, b"\0") + self._sent(1, seqs._arrays.get("seqstart_k", start))
        return [at, 0, _CARRIED_AT + at_k, 0, data]

    def _sent(self, n: int, start: Any) -> bytes:
        """The bytes of a side's starts, in the dtype that kernels read. n: 0 for q, 1 for k."""
        dtype = self._starts[n]
        found: bytes = (start if start.dtype is dtype else start.astype(dtype)).tobytes()
        return found

    def _put(
        self, data: bytes, n: int, side: Side, lengths: Lengths, base: int
    ) -> tuple[bytes, int, int]:
        """`data` with the side's host integers added at their offsets, and the addresses of its starts and lengths."""
        start, length = side.start, side.length
        at_start = at_length = 0
        if type(start) is np.ndarray:
            at, sent = self._offsets[2 * n], self._sent(n, start)
            data = data.ljust(at, b"\0") + sent if at else sent
            at_start = base + at
        elif start is not None:
            at_start = start.data.ptr
        if type(length) is np.ndarray:
            at = self._offsets[2 * n + 1]
            sent = logical_lengths(side, lengths.batch).astype(np.int32).tobytes()
            data = data.ljust(at, b"\0") + sent
            at_length = base + at
        elif length is not None:
            at_length = length.data.ptr
        return data, at_start, at_length

    def _put_positions(self, data: bytes, n: int, position: Any, base: int) -> tuple[bytes, int]:
        """`data` with positions on the host added at their offset, and the address of the positions."""
        if type(position) is np.ndarray:
            at = self._offsets[4 + n]
            return data.ljust(at, b"\0") + position.astype(np.int32).tobytes(), base + at
        return data, 0 if position is None else position.data.ptr


def _any_on_host(lengths: Lengths) -> bool:
    q, k, host = lengths.q, lengths.k, np.ndarray
    if type(q.start) is host or type(q.length) is host or type(q.position) is host:
        return True
    if k is q:
        return False
    return type(k.start) is host or type(k.length) is host or type(k.position) is host
