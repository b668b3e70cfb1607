"""Keys of layouts: two layouts with the same key are launched alike, so a call with the second one repeats the first.

The functions here take a layout's integers by name, as `SeqLayout` has read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rawattn._call import integers
from rawattn._call.layout import bound_of
from rawattn._eviction import evict_if_full

LayoutKey = tuple[Any, ...]  # the key of a layout
# The values of starts on the host, summed up: the longest sequence, the first start and the last one.
Starts = tuple[int, int, int]
# Those of q and of k; one object if both sides have the same starts.
StartValues = tuple[Starts, Starts]

# By the key of a layout: its number of sequences. A key that is here has passed all checks of the constructor.
batch_by_key: dict[LayoutKey, int | None] = {}
_MAX_KEYS = 4096  # entries of `batch_by_key`


def key_of(
    arrays: Mapping[str, Any], max_seqlen_q: int | None, max_seqlen_k: int | None, same_starts: bool
) -> tuple[LayoutKey | None, StartValues | None]:
    """The key of a layout, which has no addresses and no values, and the `StartValues` if it has only starts, all on the host.

    Both are None for a layout without integers, and for one that needs a full look: host integers beside those on a GPU or
    other than starts, starts with a sequence above its maximum, and JAX tracers.
    """
    key: LayoutKey = max_seqlen_q, max_seqlen_k, same_starts
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
        return (*key, start.size, start_k.size, len(arrays)), (q, k)
    for name, x in arrays.items():
        if type(x) is np.ndarray:
            return None, None
        device = getattr(getattr(x, "data", None), "device_id", None)
        if device is None:  # a JAX tracer
            return None, None
        key += name, x.size, x.dtype, device
    return key if arrays else None, None


def remember(key: LayoutKey, batch: int | None) -> None:
    evict_if_full(batch_by_key, _MAX_KEYS)
    batch_by_key[key] = batch


def addresses_of(arrays: Mapping[str, Any]) -> list[int]:
    """The addresses of integers that are all on GPUs: start_q, length_q, start_k, length_k, 0 for one that is not given.

    Behind them position_q and position_k if one of these is given.
    """
    get = arrays.get
    start_q, start_k = get("seqstart_q"), get("seqstart_k")
    if start_k is None:
        start_k = start_q
    length_q, length_k = get("cu_seqlen_q"), get("cu_seqlen_k")
    if length_q is None:
        length_q = get("seqlen_q")
    if length_k is None:
        length_k = get("seqlen_k")
    found = [
        0 if start_q is None else start_q.data.ptr,
        0 if length_q is None else length_q.data.ptr,
        0 if start_k is None else start_k.data.ptr,
        0 if length_k is None else length_k.data.ptr,
    ]
    if "position_q" in arrays or "position_k" in arrays:
        position_q, position_k = get("position_q"), get("position_k")
        found.append(0 if position_q is None else position_q.data.ptr)
        found.append(0 if position_k is None else position_k.data.ptr)
    return found


def bounds_of(
    start_values: StartValues, arrays: Mapping[str, Any], rows_q: int, rows_k: int
) -> tuple[int, bool, int, bool] | None:
    """The part of starts' values that decides the launches of a call on arrays with so many rows.

    For q, then for k: `bound_of` the longest sequence, and whether there is padding. None if the starts do not fit the rows.
    """
    q, k = start_values
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
