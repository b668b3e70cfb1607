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
    found: object | None = lengths.token
    if found is None:
        form = structure(lengths)
        found = _tokens.get(form)
        if found is None:
            if len(_tokens) >= _MAX_TOKENS:
                _tokens.clear()  # those that are known stay what they are, and are found no more
            found = _tokens.setdefault(form, object())
        lengths.token = found
    return found


def structure(lengths: Lengths) -> Structure:
    """Found once for each `lengths`."""
    found: Structure | None = lengths.structure
    if found is None:
        q = _side(lengths.q)
        k = q if lengths.k is lengths.q else _side(lengths.k)
        on_host = lengths.on_host
        devices = () if on_host else _devices(lengths)
        # Not by their own constructors, which take three times as long.
        fields = lengths.batch, lengths.group, q, k, on_host, devices
        found = lengths.structure = _new(Structure, fields)
    return found


_new: Any = tuple.__new__


def _side(side: Side) -> SideStructure:
    start, length, rows = side.start, side.length, side.rows
    most, of_start, of_length, cumulative = rows, 0, 0, False
    if start is not None or length is not None:
        most = min((1 << side.max_seqlen.bit_length()) - 1, rows)
    if type(start) is np.ndarray:
        of_start = 4 if rows <= _INT32_MAX else 8
    elif start is not None:
        of_start = int(start.dtype.itemsize)
    if type(length) is np.ndarray:
        of_length = 4
    elif length is not None:
        of_length, cumulative = int(length.dtype.itemsize), side.cumulative
    found: SideStructure = _new(
        SideStructure, (rows, of_start, of_length, cumulative, side.padded, most)
    )
    return found


def _devices(lengths: Lengths) -> tuple[int, ...]:
    integers = (lengths.q.start, lengths.q.length, lengths.k.start, lengths.k.length)
    found: list[int] = []
    for x in integers:
        if x is not None and type(x) is not np.ndarray and x.data.device_id not in found:
            found.append(int(x.data.device_id))
    return tuple(sorted(found))
