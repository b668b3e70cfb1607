"""What of a call's lengths decides how it is launched: their form, not their values.

Calls whose layouts have the same structure share kernels, grids and parameters; the integers themselves are data.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rawattn._call.layout import Lengths, Side

_INT32_MAX = 2**31 - 1
_MAX_TOKENS = 4096


class SideStructure(NamedTuple):
    """The integers of one side as kernels read them; a tuple, since it is part of keys.

    start, length: bytes of each integer, 0 where there are none. From the host, lengths go to the device as int32 and not
    cumulative.
    most: a bound of every logical length, the same for lengths of the same number of binary digits.
    """

    rows: int
    start: int
    length: int
    cumulative: bool
    padded: bool
    most: int


class Structure(NamedTuple):
    """on_host: every integer is host data, and the schedule follows once and for all.

    devices: of the integers that are not.
    """

    batch: int
    group: bool
    q: SideStructure
    k: SideStructure
    on_host: bool
    devices: tuple[int, ...]

    @property
    def ragged(self) -> bool:
        """Whether sequences have lengths of their own."""
        return self.group or bool(self.q.length or self.k.length)

    def side(self, name: str) -> SideStructure:
        """That of "q" or "k"."""
        return self.q if name == "q" else self.k


_tokens: dict[Structure, object] = {}


def token(lengths: Lengths) -> object:
    """The same object for lengths of the same structure, quicker to find things by. Found once for each `lengths`."""
    found: object | None = lengths.memo.get("token")
    if found is None:
        form = structure(lengths)
        if len(_tokens) >= _MAX_TOKENS and form not in _tokens:
            _tokens.clear()  # those that are known stay what they are, and are found no more
        found = lengths.memo["token"] = _tokens.setdefault(form, object())
    return found


def structure(lengths: Lengths) -> Structure:
    """Found once for each `lengths`."""
    found: Structure | None = lengths.memo.get("structure")
    if found is None:
        found = lengths.memo["structure"] = Structure(
            lengths.batch,
            lengths.group,
            _side(lengths.q),
            _side(lengths.k),
            lengths.on_host,
            () if lengths.on_host else tuple(sorted(_devices(lengths))),
        )
    return found


def _side(side: Side) -> SideStructure:
    start, length, rows = side.start, side.length, side.rows
    most = rows
    if start is not None or length is not None:
        most = min((1 << side.max_seqlen.bit_length()) - 1, rows)
    return SideStructure(
        rows,
        _bytes(start, 4 if rows <= _INT32_MAX else 8),
        _bytes(length, 4),
        side.cumulative and not isinstance(length, np.ndarray),
        side.padded,
        most,
    )


def _bytes(integers: Any, of_host: int) -> int:
    if integers is None:
        return 0
    return of_host if isinstance(integers, np.ndarray) else int(integers.dtype.itemsize)


def _devices(lengths: Lengths) -> set[int]:
    integers = (lengths.q.start, lengths.q.length, lengths.k.start, lengths.k.length)
    return {
        int(x.data.device_id) for x in integers if x is not None and not isinstance(x, np.ndarray)
    }
