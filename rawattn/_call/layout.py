"""Where the sequences of a call are in memory, and how many of their rows count.

Physical starts address memory; logical lengths say how many of a sequence's rows count, the others are padding. Integers on
the host are checked in full. Integers on a GPU are never read back to be checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn._call import integers
from rawattn._call.given import GivenSide, check_maximum

Int64s = NDArray[np.int64]


@dataclass(slots=True, eq=False)  # not frozen: one is made at every call with a new layout
class Side:
    """The sequences of one side of a call, queries or keys. Integer arrays are C-contiguous, of NumPy or CuPy."""

    start: Any  # (batch + 1,) physical starts, int32 or int64; None in batch mode
    length: Any  # logical lengths: (batch + 1,) if cumulative, else (batch,); None = physical
    cumulative: bool
    rows: int  # physical rows: seqlen in batch mode, total in group mode
    max_seqlen: int  # upper bound of all logical lengths
    padded: bool  # there may be rows outside of all logical sequences
    page_size: int = 0  # not 0: rows are in pages (`_call.pages`), and `start` counts pages
    promised: bool = False  # the caller gave max_seqlen_q or max_seqlen_k
    position: Any = None  # (batch,) positions of the first rows in longer sequences; None = 0


@dataclass(slots=True, eq=False)  # not frozen: one is made at every call with a new layout
class Lengths:
    """The sequences of a call.

    q, k: one object if the keys have the same sequences as the queries.
    on_host: whether every integer array is on the host.
    structure, token: see `_call.structure`, which computes them when they are first needed.
    memo: what prepared calls keep with these lengths, such as addresses on the device and numbers of blocks.
    """

    batch: int
    packed: bool
    q: Side
    k: Side
    on_host: bool
    structure: Any = field(default=None, init=False, repr=False)
    token: Any = field(default=None, init=False, repr=False)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def positions(self) -> bool:
        """Whether sequences have positions in longer ones."""
        return self.q.position is not None or self.k.position is not None


@dataclass(frozen=True, slots=True, eq=False)
class HostLengths:
    """First physical row, logical length and position of every sequence, (batch,) int64 on the host.

    In batch mode starts are relative to the sequence's batch entry, so they are 0.
    """

    start_q: Int64s
    len_q: Int64s
    start_k: Int64s
    len_k: Int64s
    position_q: Int64s
    position_k: Int64s


def bound_of(longest: int, rows: int) -> int:
    """The longest of some lengths, rounded up so that launches are shared: to four binary digits and zeros behind them, by an
    eighth at most. At most `rows`.
    """
    step = 1 << max(longest.bit_length() - 4, 0)
    bound = -(-longest // step) * step
    return bound if bound < rows else rows


def side_of(given: GivenSide, batch: int, rows: int, of: str = "") -> Side:
    """A side bound to an array with so many rows. of: the array's name, by default that of the side."""
    side, start = given.side, given.start
    of = of or side
    if given.end is not None and given.end > rows:
        raise ValueError(
            f"{given.start_name}: got an end of {given.end}, expected at most {rows}, the rows of {of}"
        )
    capacity = rows if start is not None else batch * rows
    total = None  # sum of the logical lengths, if known
    if start is None and given.length is None:
        if batch and given.max_seqlen is not None:
            check_maximum(side, given.max_seqlen, rows, f"the shape of {of}")
        longest, total = rows, capacity
    elif given.longest is not None and given.total is not None:
        longest, total = given.longest, given.total
        if given.inherited and given.max_seqlen is not None:
            check_maximum(side, given.max_seqlen, longest, given.length_name)
        if longest > rows:
            what = f"the rows of {of}"
            integers.check_at_most(given.length_name, given.logical(), rows, what)
        if total > capacity:
            raise ValueError(
                f"{given.length_name}: got {total} rows in all, expected at most {capacity}, the rows of {of}"
            )
    else:
        longest = rows
        if given.longest_slot is not None and given.longest_slot < longest:
            longest = given.longest_slot
        if given.max_seqlen is not None and given.max_seqlen < longest:
            longest = given.max_seqlen
    if longest > integers.LONGEST:
        advice = f"; give SeqLayout(max_seqlen_{side}=...) if it has fewer" if total is None else ""
        raise ValueError(
            f"{side}: got a sequence of up to {longest} rows, expected at most {integers.LONGEST}{advice}"
        )
    # Sequences never overlap, so there is no padding if their lengths add up to all rows.
    padded = capacity > 0 and not (given.on_host and total == capacity)
    promised = given.max_seqlen is not None
    # By position, which is faster than by name: one is made at every call with a new layout.
    length, cumulative = given.length, given.cumulative
    return Side(start, length, cumulative, rows, longest, padded, 0, promised, given.position)


def host_lengths(lengths: Lengths) -> HostLengths:
    """Starts and lengths as host integers.

    Arrays on a GPU are copied to the host, which synchronises with CuPy's current stream. Values are clamped as the kernels
    clamp them, so every sequence is inside its array.
    """
    return HostLengths(
        *_starts_and_lengths(lengths.q, lengths.batch),
        *_starts_and_lengths(lengths.k, lengths.batch),
        _positions(lengths.q, lengths.batch),
        _positions(lengths.k, lengths.batch),
    )


def _starts_and_lengths(side: Side, batch: int) -> tuple[Int64s, Int64s]:
    start = np.zeros(batch, np.int64)
    room = np.full(batch, side.rows, np.int64)
    if side.start is not None:
        unit = side.page_size or 1
        bounds = np.clip(_to_host(side.start), 0, side.rows // unit) * unit
        start = bounds[:-1]
        room = np.maximum(bounds[1:] - start, 0)
    if side.length is None:
        return start, room
    length = _to_host(side.length)
    return start, np.clip(np.diff(length) if side.cumulative else length, 0, room)


def _positions(side: Side, batch: int) -> Int64s:
    if side.position is None:
        return np.zeros(batch, np.int64)
    return np.clip(_to_host(side.position), 0, integers.LAST_POSITION)


def _to_host(array: Any) -> Int64s:
    host = array if isinstance(array, np.ndarray) else array.get()
    return host.astype(np.int64)
