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
from rawattn._kernels.params import WORDS_A_LAUNCH
from rawattn._kernels.portable import send_words
from rawattn._kernels.steps import logical_lengths
from rawattn._runtime import kernel
from rawattn._runtime.kernel import Arguments

NAMES = ("start_q", "length_q", "start_k", "length_k")
_ALIGNMENT = 8  # bytes


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
        device: int,
        stream: int,
        more: list[int],
    ) -> None:
        """more: sizes in bytes of what else belongs to the layout."""
        words, where = _words(lengths, structure)
        sizes = [4 * words.size, *more]
        starts = []
        total = 0
        for size in sizes:
            starts.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        base = 0
        self._owner: Any = None
        if total:
            self._owner, base = memory.keep(total, device)
        self.addresses = [
            base + at if at is not None else _address(integers)
            for at, integers in zip(where, _integers(lengths), strict=True)
        ]
        self.addresses += [base + start for start in starts[1:]]
        if words.size:
            send = kernel.load(send_words.source(), device)
            for packed in send_words.launches(words, base):
                send.launch(1, send_words.THREADS, 0, stream, Arguments([packed]))

    @property
    def owner(self) -> Any:
        """What keeps the memory."""
        return self._owner


def launches_to_send(words: int) -> int:
    """How many launches carry so many 32-bit words."""
    return -(-words // WORDS_A_LAUNCH)


def _integers(lengths: Lengths) -> tuple[Any, ...]:
    return (lengths.q.start, lengths.q.length, lengths.k.start, lengths.k.length)


def _address(integers: Any) -> int:
    return 0 if integers is None else int(integers.data.ptr)


def _words(lengths: Lengths, structure: Structure) -> tuple[np.ndarray[Any, Any], list[int | None]]:
    """All host integers as 32-bit words, and the byte at which each of `NAMES` begins there; None where it is elsewhere."""
    parts: list[np.ndarray[Any, Any]] = []
    where: list[int | None] = []
    known: dict[int, int] = {}
    size = 0
    for side, form in ((lengths.q, structure.q), (lengths.k, structure.k)):
        for integers in (side.start, side.length):
            if not isinstance(integers, np.ndarray):
                where.append(None)
                continue
            at = known.get(id(integers))
            if at is None:
                sent = _sent(side, form, integers, lengths.batch)
                at = known[id(integers)] = size
                parts.append(sent)
                size += sent.nbytes
                if size % _ALIGNMENT:
                    parts.append(np.zeros(1, np.uint32))
                    size += 4
            where.append(at)
    return (np.concatenate(parts) if parts else np.empty(0, np.uint32)), where


def _sent(side: Side, form: SideStructure, integers: Any, batch: int) -> np.ndarray[Any, Any]:
    if integers is side.start:
        dtype = np.int32 if form.start == 4 else np.int64
        return np.ascontiguousarray(integers, dtype).view(np.uint32)
    lengths = logical_lengths(side, batch)
    return np.ascontiguousarray(lengths, np.int32).view(np.uint32)
