"""The integers of a call's lengths on a device, and the orders that follow from them.

Host lengths travel in the parameters of launches on the caller's stream, so nothing waits for them. What was sent belongs to
the layout and to the stream: a later call with the same layout on that stream finds it there, and its memory goes back to
where it came from, in the order of that stream, with the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn._call.layout import Lengths
from rawattn._call.structure import Structure
from rawattn._interop.native import Memory
from rawattn._kernels.steps import logical_lengths

NAMES = ("start_q", "length_q", "start_k", "length_k")
_ALIGNMENT = 8  # bytes


class Places:
    """Where lengths of one structure and `more` lie on one device: sizes in bytes of what else belongs to the layout."""

    __slots__ = ("_behind", "_device", "_starts", "_structure", "_total")

    def __init__(self, structure: Structure, device: int, more: Sequence[int]) -> None:
        self._structure, self._device = structure, device
        self._starts = [
            np.dtype(np.int32 if form.start == 4 else np.int64)
            for form in (structure.q, structure.k)
        ]
        self._behind: list[int] = []  # where those of `more` begin, from the end of the integers
        self._total = 0
        for size in more:
            self._behind.append(self._total)
            self._total += -(-size // _ALIGNMENT) * _ALIGNMENT

    def place(self, lengths: Lengths, memory: Memory) -> tuple[Any, list[int], bytes, int]:
        """Finds memory for what the host has: what keeps it, addresses, data that is to be sent, and where to.

        The addresses are those of `NAMES`, 0 where there are no such integers, and behind them those of `more`.
        """
        q, k = lengths.q, lengths.k
        data = b""
        where: list[int] = []
        for n, side in enumerate((q, k)):
            if n and side.start is q.start:
                where.append(where[0])
            elif type(side.start) is np.ndarray:
                where.append(len(data))
                data += _padded(_as(side.start, self._starts[n]))
            else:
                where.append(-1)
            if n and side.length is q.length and side.cumulative == q.cumulative:
                where.append(where[1])
            elif type(side.length) is np.ndarray:
                where.append(len(data))
                data += _padded(_as(logical_lengths(side, lengths.batch), _INT32))
            else:
                where.append(-1)
        sent = len(data)
        base, owner = 0, None
        if total := sent + self._total:
            owner, base = memory.keep(total, self._device)
        addresses = [
            base + where[0] if where[0] >= 0 else _address(q.start),
            base + where[1] if where[1] >= 0 else _address(q.length),
            base + where[2] if where[2] >= 0 else _address(k.start),
            base + where[3] if where[3] >= 0 else _address(k.length),
        ]
        end = base + sent
        for at in self._behind:
            addresses.append(end + at)
        return owner, addresses, data, base


_INT32 = np.dtype(np.int32)


def _as(integers: Any, dtype: np.dtype[Any]) -> bytes:
    found: bytes = (integers if integers.dtype is dtype else integers.astype(dtype)).tobytes()
    return found


def _padded(data: bytes) -> bytes:
    rest = len(data) % _ALIGNMENT
    return data + bytes(_ALIGNMENT - rest) if rest else data


def _address(integers: Any) -> int:
    return 0 if integers is None else int(integers.data.ptr)
