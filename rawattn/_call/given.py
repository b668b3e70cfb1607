"""What a layout says about one side, queries or keys, before it is bound to the arrays of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rawattn._call import integers
from rawattn._call.integers import Integers


@dataclass(slots=True, eq=False)
class GivenSide:
    """One side of a layout before it is bound to arrays."""

    side: Literal["q", "k"]
    start: Any  # physical starts, None without any
    start_name: str  # the argument that gave them, for messages
    inherited: bool  # these are the starts of k, which were taken from q
    length: Any  # logical lengths, None where the physical lengths count
    length_name: str  # the argument that gave them, for messages
    cumulative: bool  # whether `length` is cumulative
    max_seqlen: int | None
    on_host: bool
    # The following are known only from integers on the host, else None.
    end: int | None  # the last start, which is where the rows end
    longest_slot: int | None  # the longest physical length
    longest: int | None  # the longest logical length
    total: int | None  # the sum of the logical lengths
    position: Any  # positions of the first rows in longer sequences, None where these are whole

    @property
    def all_on_host(self) -> bool:
        """Whether every integer is on the host, positions too."""
        return self.on_host and (self.position is None or type(self.position) is np.ndarray)

    def logical(self) -> Integers:
        """The logical lengths. They are on the host and have been checked."""
        if self.length is None:
            return self.slots()
        lengths: Integers = np.diff(self.length) if self.cumulative else self.length
        return lengths

    def slots(self) -> Integers:
        """The physical lengths. The starts are on the host and have been checked."""
        slots: Integers = np.diff(self.start)
        return slots


# For each side, the arguments for its starts, its cumulative lengths and its lengths.
_NAMES = {side: (f"seqstart_{side}", f"cu_seqlen_{side}", f"seqlen_{side}") for side in ("q", "k")}


# The arguments that hold integers for each sequence.
ARRAYS = (
    *("seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k", "cu_seqlen_q", "cu_seqlen_k"),
    *("position_q", "position_k"),
)
# Those of shape (batch,); the others are (batch + 1,).
ONE_EACH = frozenset({"seqlen_q", "seqlen_k", "position_q", "position_k"})


def read_sides(
    arrays: Mapping[str, Any], max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[GivenSide, GivenSide]:
    """The sides q and k; one object if k has no arguments of its own. arrays: by argument name."""
    get = arrays.get
    start, position = get("seqstart_q"), get("position_q")
    lengths = get("cu_seqlen_q"), get("seqlen_q")
    of_q = of_k = read_side("q", start, *lengths, max_seqlen_q, None, position)
    if start is None or len(arrays) > 1 or max_seqlen_k != max_seqlen_q:
        lengths = get("cu_seqlen_k"), get("seqlen_k")
        start, position = get("seqstart_k"), get("position_k")
        of_k = read_side("k", start, *lengths, max_seqlen_k, of_q, position)
    return of_q, of_k


def read_side(
    side: Literal["q", "k"],
    start: Any,
    cumulative_length: Any,
    length: Any,
    max_seqlen: int | None,
    of_q: GivenSide | None = None,
    position: Any = None,
) -> GivenSide:
    """One side, from the arguments about it. of_q: the other side if this is k, whose starts are the default."""
    start_name, cumulative_name, length_name = _NAMES[side]
    inherited = start is None and of_q is not None and of_q.start is not None
    end = longest_slot = total = None
    if inherited and of_q is not None:
        start, start_name = of_q.start, "seqstart_k (by default seqstart_q)"
    on_host = start is None
    if type(start) is np.ndarray:
        on_host = True
        longest_slot, first, end = integers.most_between(start_name, start)
        total = end - first

    cumulative = cumulative_length is not None
    if cumulative:
        length_name, length = cumulative_name, cumulative_length
    longest = longest_slot
    if length is None:
        length_name = start_name
    elif type(length) is np.ndarray:
        if cumulative:
            longest, first, last = integers.most_between(length_name, length)
            total = last - first
        else:
            longest, total = integers.most_of(length_name, length)
    else:
        on_host, longest, total = False, None, None
    # By position, which is faster than by name: one is made for each side of each new layout.
    given = GivenSide(
        side,
        start,
        start_name,
        inherited,
        length,
        length_name,
        cumulative,
        max_seqlen,
        on_host,
        end,
        longest_slot,
        longest,
        total,
        position,
    )
    if type(position) is np.ndarray:
        integers.check_positions(f"position_{side}", position)
    if longest_slot is not None and length is not None and longest is not None:
        what = f"the physical length that {start_name} gives it"
        integers.check_at_most(length_name, given.logical(), given.slots(), what)
    # If k inherits its lengths from q, `side_of` checks their maximum: a layout for keys in pages says nothing about the keys.
    own = not inherited or length is not None
    if max_seqlen is not None and longest is not None and own:
        check_maximum(side, max_seqlen, longest, length_name)
    return given


def common_batch(arrays: Mapping[str, Any]) -> int | None:
    """The number of sequences by a layout's integers, which must agree; None without any. arrays: by argument name."""
    first, batch = "", None
    for name, array in arrays.items():
        count = array.size if name in ONE_EACH else array.size - 1
        if batch is None:
            first, batch = name, count
        elif count != batch:
            raise ValueError(
                f"{name}: got {array.size} entries, expected {array.size - count + batch}: {first} "
                f"is that of {batch} sequences (seqlen_* and position_* are (batch,), others (batch + 1,))"
            )
    return batch


def check_maximum(side: str, max_seqlen: int, longest: int, source: str) -> None:
    if max_seqlen < longest:
        raise ValueError(
            f"max_seqlen_{side}: got {max_seqlen}, expected at least {longest}, the longest "
            f"sequence by {source}"
        )
