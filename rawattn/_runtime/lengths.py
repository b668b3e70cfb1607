"""The integers of a call's lengths on a device, and the orders that follow from them.

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
from rawattn._kernels.steps import logical_lengths

NAMES = ("start_q", "length_q", "start_k", "length_k")
_ALIGNMENT = 8  # bytes


def place(
    lengths: Lengths, structure: Structure, memory: Memory, device: int, more: list[int]
) -> tuple[Any, list[int], bytes, int]:
    """Finds memory on a device for what the host has: what keeps it, addresses, data that is to be sent, and where to.

    more: sizes in bytes of what else belongs to the layout. The addresses are those of `NAMES`, 0 where there are no such
    integers, and behind them those of `more`.
    """
    data, where = _sent(lengths, structure)
    total = len(data)
    for size in more:
        where.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    base, owner = 0, None
    if total:
        owner, base = memory.keep(total, device)
    addresses = [base + at for at in where]
    for n, integers in enumerate(_integers(lengths)):
        if where[n] < 0:
            addresses[n] = 0 if integers is None else int(integers.data.ptr)
    return owner, addresses, data, base


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
