"""The integers of a call's lengths on a device: sent there where the host has them, and the orders that follow from them.

Host lengths travel in the parameters of launches on the caller's stream, so nothing waits for them. What was sent belongs to
the layout and to the stream: a later call with the same layout on that stream finds it there, and its memory goes back to
where it came from, in the order of that stream, with the layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn._call.layout import Lengths, Side
from rawattn._call.structure import SideStructure, Structure
from rawattn._interop.native import Memory
from rawattn._kernels.portable import send_words
from rawattn._kernels.steps import logical_lengths
from rawattn._runtime import kernel
from rawattn._runtime.kernel import Arguments

NAMES = ("start_q", "length_q", "start_k", "length_k")
_ALIGNMENT = 8  # bytes


class Sender:
    """Small data of the host to one device, by launches that carry it."""

    __slots__ = ("_free", "_launch", "device")

    def __init__(self, device: int) -> None:
        self.device = device
        self._launch = kernel.load(send_words.source(), device).launcher(
            send_words.THREADS, 0, False
        )
        self._free: list[Arguments] = []  # that no launch is using

    def send(self, data: bytes, to: int, stream: int) -> None:
        """To an address, in the order of a stream."""
        for first in range(0, len(data), send_words.MOST):
            try:
                arguments = self._free.pop()
            except IndexError:
                arguments = Arguments([bytes(send_words.BYTES)])
            part = data[first : first + send_words.MOST]
            send_words.pack_into(arguments.data, arguments.at[0], part, to + first)
            self._launch(1, stream, arguments)
            self._free.append(arguments)


class Placed:
    """Lengths on one device, for work on one stream.

    addresses: of `NAMES`, 0 where there are no such integers; behind them those of `more` bytes that were asked for.
    """

    __slots__ = ("_owner", "addresses")

    def __init__(
        self,
        lengths: Lengths,
        structure: Structure,
        memory: Memory,
        sender: Sender,
        stream: int,
        more: list[int],
    ) -> None:
        """more: sizes in bytes of what else belongs to the layout."""
        data, where = _sent(lengths, structure)
        total = len(data)
        for size in more:
            where.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        base = 0
        self._owner: Any = None
        if total:
            self._owner, base = memory.keep(total, sender.device)
        self.addresses = [base + at for at in where]
        for n, integers in enumerate(_integers(lengths)):
            if where[n] < 0:
                self.addresses[n] = 0 if integers is None else int(integers.data.ptr)
        if data:
            sender.send(data, base, stream)

    @property
    def owner(self) -> Any:
        """What keeps the memory."""
        return self._owner


def _integers(lengths: Lengths) -> tuple[Any, ...]:
    return (lengths.q.start, lengths.q.length, lengths.k.start, lengths.k.length)


def _sent(lengths: Lengths, structure: Structure) -> tuple[bytes, list[int]]:
    """All host integers as kernels read them, and the byte at which each of `NAMES` begins; -1 where it is elsewhere."""
    data = b""
    where: list[int] = []
    known: dict[int, int] = {}
    for side, form in ((lengths.q, structure.q), (lengths.k, structure.k)):
        for integers in (side.start, side.length):
            if not isinstance(integers, np.ndarray):
                where.append(-1)
                continue
            at = known.get(id(integers))
            if at is None:
                at = known[id(integers)] = len(data)
                data += _bytes_of(side, form, integers, lengths.batch)
                data += bytes(-len(data) % _ALIGNMENT)
            where.append(at)
    return data, where


def _bytes_of(side: Side, form: SideStructure, integers: Any, batch: int) -> bytes:
    if integers is side.start:
        start: bytes = integers.astype(np.int32 if form.start == 4 else np.int64).tobytes()
        return start
    length: bytes = logical_lengths(side, batch).astype(np.int32).tobytes()
    return length
