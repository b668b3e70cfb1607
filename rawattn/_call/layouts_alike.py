"""What tells layouts apart: of those that are alike nothing is found out twice, and a call with one is found by that.

Layouts are given by their integers here: by name, as `SeqLayout` has read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rawattn._call import integers
from rawattn._call.layout import bound_of
from rawattn._forgetting import make_room

Told = tuple[Any, ...]
# What starts on the host come to: the longest way from one to the next, the first and the last.
Starts = tuple[int, int, int]
# Of the starts of q and of k; one object, where these are one array.
Values = tuple[Starts, Starts]

# How many sequences layouts are of, by what tells them.
batches: dict[Told, int | None] = {}
_MAX_TOLD = 4096


def what_tells(
    arrays: Mapping[str, Any], max_seqlen_q: int | None, max_seqlen_k: int | None, joined: bool
) -> tuple[Told | None, Values | None]:
    """What tells a layout apart but for addresses and values, and of starts alone, all on the host, what these come to.

    Neither, where there is more to look at: integers of the host that are not starts alone, or are above a maximum, and those
    that JAX traces; nor where there are no integers.
    """
    told: Told = max_seqlen_q, max_seqlen_k, joined
    start = arrays.get("seqstart_q")
    if type(start) is np.ndarray:
        start_k = arrays.get("seqstart_k", start)
        if len(arrays) > 1 + ("seqstart_k" in arrays) or type(start_k) is not np.ndarray:
            return None, None
        q = k = integers.most_between("seqstart_q", start)
        if start_k is not start:
            k = integers.most_between("seqstart_k", start_k)
        if (max_seqlen_q is not None and max_seqlen_q < q[0]) or (
            max_seqlen_k is not None and max_seqlen_k < k[0]
        ):
            return None, None
        return (*told, start.size, start_k.size, len(arrays)), (q, k)
    for name, x in arrays.items():
        if type(x) is np.ndarray:
            return None, None
        device = getattr(getattr(x, "data", None), "device_id", None)
        if device is None:  # of a function of JAX under transformation
            return None, None
        told += name, x.size, x.dtype, device
    return told if arrays else None, None


def remember(told: Told, batch: int | None) -> None:
    make_room(batches, _MAX_TOLD)
    batches[told] = batch


def addresses_of(arrays: Mapping[str, Any]) -> list[int]:
    """Of integers that are all on GPUs: starts and lengths of queries, then of keys, 0 for those that are not given."""
    get = arrays.get
    start_q, start_k = get("seqstart_q"), get("seqstart_k")
    if start_k is None:
        start_k = start_q
    length_q, length_k = get("cu_seqlen_q"), get("cu_seqlen_k")
    if length_q is None:
        length_q = get("seqlen_q")
    if length_k is None:
        length_k = get("seqlen_k")
    return [
        0 if start_q is None else start_q.data.ptr,
        0 if length_q is None else length_q.data.ptr,
        0 if start_k is None else start_k.data.ptr,
        0 if length_k is None else length_k.data.ptr,
    ]


def bounds_of(
    values: Values, arrays: Mapping[str, Any], rows_q: int, rows_k: int
) -> tuple[int, bool, int, bool] | None:
    """What a call on arrays of these rows looks at of starts' values: a bound of each side's lengths, and whether it has
    padding. None where they do not fit.
    """
    q, k = values
    longest, first, last = q
    if last > rows_q:
        return None
    most, padded = bound_of(longest, rows_q), last - first != rows_q
    if rows_k == rows_q and k is q:
        return most, padded, most, padded
    longest, first, last = k
    if last > rows_k or len(arrays) == 1:
        return None
    return most, padded, bound_of(longest, rows_k), last - first != rows_k
