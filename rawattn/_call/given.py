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
    # What the host integers tell, where they do: the physical and the logical lengths, the longest of each, and the sum of the
    # logical ones.
    slots: Integers | None
    longest_slot: int | None
    logical: Integers | None
    longest: int | None
    total: int | None


# Of a side: starts, cumulative lengths, lengths and the bound on them.
_NAMES = {
    side: (f"seqstart_{side}", f"cu_seqlen_{side}", f"seqlen_{side}", f"max_seqlen_{side}")
    for side in ("q", "k")
}


def read_side(side: Literal["q", "k"], fields: Mapping[str, Any], of_q: Given | None) -> Given:
    """What the arguments in `fields` say of a side; `of_q`: what they say of the other, when this is k."""
    start_name, cumulative_name, length_name, max_name = _NAMES[side]
    start = fields[start_name]
    inherited = start is None and of_q is not None and of_q.start is not None
    slots = longest_slot = None
    if inherited and of_q is not None:
        start, start_name = of_q.start, "seqstart_k (by default seqstart_q)"
        slots, longest_slot = of_q.slots, of_q.longest_slot
    elif isinstance(start, np.ndarray):
        slots = integers.differences(start_name, start)
        longest_slot = integers.longest(slots)

    cumulative = fields[cumulative_name] is not None
    if cumulative:
        length_name = cumulative_name
    length = fields[length_name]
    logical = longest = total = None
    if length is None:
        length_name = start_name
        if slots is not None:
            logical, longest = slots, longest_slot
            total = int(start[-1]) - int(start[0])
    elif isinstance(length, np.ndarray):
        read = integers.differences if cumulative else integers.counts
        logical = read(length_name, length)
        longest = integers.longest(logical)
        total = int(length[-1]) - int(length[0]) if cumulative else int(np.add.reduce(length))
        if slots is not None:
            integers.check_at_most(
                length_name, logical, slots, f"the physical length that {start_name} gives it"
            )

    max_seqlen = fields[max_name]
    if max_seqlen is not None and longest is not None:
        check_maximum(side, max_seqlen, longest, length_name)
    on_host = _on_host(start) and _on_host(length)
    # By position: one is made for each side of each new layout.
    return Given(
        *(side, start, start_name, inherited, length, length_name, cumulative, max_seqlen, on_host),
        *(slots, longest_slot, logical, longest, total),
    )


def common_batch(arrays: Mapping[str, Any]) -> int | None:
    first, batch = "", None
    for name, array in arrays.items():
        count = array.size - (not name.startswith("seqlen"))
        if batch is None:
            first, batch = name, count
        elif count != batch:
            raise ValueError(
                f"{name}: got {array.size} entries, expected {array.size - count + batch}: {first} "
                f"is that of {batch} sequences (seqlen_* is (batch,), others are (batch + 1,))"
            )
    return batch


def _on_host(array: Any) -> bool:
    return array is None or isinstance(array, np.ndarray)


def check_maximum(side: str, max_seqlen: int, longest: int, source: str) -> None:
    if max_seqlen < longest:
        raise ValueError(
            f"max_seqlen_{side}: got {max_seqlen}, expected at least {longest}, the longest "
            f"sequence by {source}"
        )
