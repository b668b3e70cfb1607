"""What a layout says of one side, queries or keys, before it meets the arrays of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rawattn._call import integers
from rawattn._call.integers import Integers


@dataclass(slots=True, eq=False)
class Given:
    """One side of a layout before it is bound to arrays."""

    side: Literal["q", "k"]
    start: Any
    start_name: str
    inherited: bool  # k's, from q's
    length: Any
    length_name: str
    cumulative: bool
    max_seqlen: int | None
    on_host: bool
    # What the host integers tell, where they do: the last physical row's end, the longest physical and logical length, and the
    # sum of the logical ones.
    end: int | None
    longest_slot: int | None
    longest: int | None
    total: int | None

    def logical(self) -> Integers:
        """The logical lengths that the host integers tell, which have been checked."""
        if self.length is None:
            return self.slots()
        lengths: Integers = np.diff(self.length) if self.cumulative else self.length
        return lengths

    def slots(self) -> Integers:
        """The physical ones."""
        slots: Integers = np.diff(self.start)
        return slots


# Of a side: starts, cumulative lengths and lengths.
_NAMES = {side: (f"seqstart_{side}", f"cu_seqlen_{side}", f"seqlen_{side}") for side in ("q", "k")}


_LENGTHS = frozenset({"seqlen_q", "seqlen_k"})


def read_side(
    side: Literal["q", "k"],
    start: Any,
    cumulative_length: Any,
    length: Any,
    max_seqlen: int | None,
    of_q: Given | None = None,
) -> Given:
    """What the arguments about a side say; `of_q`: what those about the other do, when this is k."""
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
    # By position: one is made for each side of each new layout.
    given = Given(
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
    )
    if longest_slot is not None and length is not None and longest is not None:
        what = f"the physical length that {start_name} gives it"
        integers.check_at_most(length_name, given.logical(), given.slots(), what)
    # Starts that are q's may have no keys, where those are in pages: `side_of` checks them.
    own = not inherited or length is not None
    if max_seqlen is not None and longest is not None and own:
        check_maximum(side, max_seqlen, longest, length_name)
    return given


def common_batch(arrays: Mapping[str, Any]) -> int | None:
    """How many sequences integers are for, by name; None without any."""
    first, batch = "", None
    for name, array in arrays.items():
        count = array.size if name in _LENGTHS else array.size - 1
        if batch is None:
            first, batch = name, count
        elif count != batch:
            raise ValueError(
                f"{name}: got {array.size} entries, expected {array.size - count + batch}: {first} "
                f"is that of {batch} sequences (seqlen_* is (batch,), others are (batch + 1,))"
            )
    return batch


def check_maximum(side: str, max_seqlen: int, longest: int, source: str) -> None:
    if max_seqlen < longest:
        raise ValueError(
            f"max_seqlen_{side}: got {max_seqlen}, expected at least {longest}, the longest "
            f"sequence by {source}"
        )
