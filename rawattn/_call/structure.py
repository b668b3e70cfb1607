"""`Structure`: the form of a call's lengths without their values, which decides how the call is launched.

Calls whose layouts have the same structure share kernels and parameters. The integers, and the numbers of blocks that follow
from them, are data.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rawattn._call.layout import Lengths, Side, bound_of
from rawattn._eviction import evict_if_full

_INT32_MAX = 2**31 - 1
_MAX_KNOWN = 4096  # entries of `_known`


class SideStructure(NamedTuple):
    """The integers of one side as kernels read them. A tuple, since it is part of keys.

    rows: physical rows. start, length, position: bytes of each integer, 0 if there are none. Lengths and positions on the host
    are sent to the device as int32, lengths not cumulative.
    length_bound: an upper bound of all logical lengths (`bound_of`).
    """

    rows: int
    start: int
    length: int
    cumulative: bool
    padded: bool
    length_bound: int
    position: int = 0


class Structure(NamedTuple):
    """The form of a call's lengths.

    on_host: whether every integer is on the host; the order of the sequences is then computed only once for a layout.
    devices: the GPUs of integers that are not on the host. shared: whether the keys have the same sequences as the queries.
    """

    batch: int
    packed: bool
    q: SideStructure
    k: SideStructure
    on_host: bool
    devices: tuple[int, ...]
    shared: bool

    @property
    def ragged(self) -> bool:
        """Whether sequences may differ: a packed batch, logical lengths, or positions."""
        return self.packed or self.positions or bool(self.q.length or self.k.length)

    @property
    def positions(self) -> bool:
        """Whether sequences have positions in longer ones."""
        return bool(self.q.position or self.k.position)

    def side(self, name: str) -> SideStructure:
        """The side "q" or "k"."""
        return self.q if name == "q" else self.k


# Structures with their tokens, by a plain tuple of their fields.
_known: dict[tuple[Any, ...], tuple[Structure, object]] = {}


def token(lengths: Lengths) -> object:
    """An object that is the same for all lengths of one structure: a key that is hashed faster. Kept in `lengths`."""
    if lengths.token is None:
        _find(lengths)
    found: object = lengths.token
    return found


def structure(lengths: Lengths) -> Structure:
    """The structure of some lengths. Kept in `lengths`."""
    if lengths.structure is None:
        _find(lengths)
    found: Structure = lengths.structure
    return found


def _find(lengths: Lengths) -> None:
    of_q, of_k, on_host = lengths.q, lengths.k, lengths.on_host
    q = _side(of_q)
    k = q if of_k is of_q else _side(of_k)
    devices = () if on_host else _devices(of_q, of_k)
    fields = lengths.batch, lengths.packed, q, k, on_host, devices, of_k is of_q
    found = _known.get(fields)
    if found is None:
        # Lengths keep their structure and token when these are dropped here.
        evict_if_full(_known, _MAX_KNOWN)
        sides = SideStructure(*q), SideStructure(*k)
        form = Structure(lengths.batch, lengths.packed, *sides, on_host, devices, of_k is of_q)
        found = _known.setdefault(fields, (form, object()))
    lengths.structure, lengths.token = found


def _side(side: Side) -> tuple[int, int, int, bool, bool, int, int]:
    """The fields of a side's `SideStructure`."""
    start, length, rows = side.start, side.length, side.rows
    length_bound, of_start, of_length, cumulative = rows, 0, 0, False
    if start is not None or length is not None:
        length_bound = bound_of(side.max_seqlen, rows)
    if type(start) is np.ndarray:
        of_start = 4 if rows <= _INT32_MAX else 8
    elif start is not None:
        of_start = start.dtype.itemsize
    if type(length) is np.ndarray:
        of_length = 4
    elif length is not None:
        of_length, cumulative = length.dtype.itemsize, side.cumulative
    position, of_position = side.position, 0
    if position is not None:
        of_position = 4 if type(position) is np.ndarray else position.dtype.itemsize
    return rows, of_start, of_length, cumulative, side.padded, length_bound, of_position


def _devices(q: Side, k: Side) -> tuple[int, ...]:
    found: tuple[int, ...] = ()
    sides = (q,) if k is q else (q, k)
    for x in [x for side in sides for x in (side.start, side.length, side.position)]:
        if x is not None and type(x) is not np.ndarray:
            device = x.data.device_id
            if device not in found:
                found = *found, device
    return tuple(sorted(found)) if len(found) > 1 else found
