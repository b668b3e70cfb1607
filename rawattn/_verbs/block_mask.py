"""`block_mask`: a mask made of bools, from ranges of keys, or from a predicate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.options import shown
from rawattn._call.options import whole as whole_number
from rawattn._interop import arrays, dynamo
from rawattn._interop.advice import cast
from rawattn._interop.arrays import HOST
from rawattn._interop.xla import is_traced
from rawattn._masks import host
from rawattn._masks.block_mask import BlockMask, buffers, finished, map_of, shaped
from rawattn._masks.layout import GRANULE_ROWS, Shape

_INT32_MAX = 2**31 - 1
# The names of the axes in FlexAttention.
_FLEX = {"B": "batch", "H": "nheads", "Q_LEN": "seqlen_q", "KV_LEN": "seqlen_k"}
_AXES = ("batch", "nheads", "seqlen_q", "seqlen_k")


@dynamo.untraced
@checks_arguments("rawattn.block_mask")
def block_mask(
    mask: Any = None,
    *,
    predicate: str | None = None,
    ranges: Any = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    batch: int = 1,
    nheads: int = 1,
    **captured: Any,
) -> BlockMask:
    """A mask that is made once, and used by many calls as `mask=`, forward and backward.

    Its bits take an eighth of the memory of bools. Tiles in which no key is seen are neither loaded nor computed, and those
    in which all are need no test. It is made of exactly one of `mask`, `predicate` and `ranges`; where that, or an array
    that the predicate captures, lies on a GPU, it is made there.

    Parameters
    ----------
    mask : bool array of any framework
        True keeps a key. Of at most four axes that broadcast to (batch, nheads, seqlen_q, seqlen_k); nheads is 1, that of the
        keys or that of the queries. In group and paged mode the last two axes count from the beginning of each sequence.
    predicate : str
        An expression that gives a bool, in the language of `rawattn.ScoreMod` without `score`: over batch, head, kv_head,
        q_idx, kv_idx, seqlen_q, seqlen_k and what is captured, as in ``"q_idx // 128 == kv_idx // 128 and head != slow"``. head
        counts up to `nheads`, and kv_head is the same. seqlen_q and seqlen_k are the lengths given here, not those that
        sequences of a ragged or padded call have.
    ranges : integer array, (batch, seqlen_q, n, 2)
        The keys [begin, end) that each row sees: any number of ranges, in any order; one that ends where it begins, or
        before, is empty. For documents, trees and prefixes.
    seqlen_q, seqlen_k, batch, nheads : int
        The shape, of a predicate; of ranges seqlen_k alone, what the array says need not be said again.
    captured
        Arrays and numbers of the predicate, by name.

    >>> import numpy as np, rawattn
    >>> documents = np.repeat([[0, 4], [4, 6]], [4, 2], axis=0).reshape(1, 6, 1, 2)
    >>> rawattn.block_mask(ranges=documents, seqlen_k=6).to_bool()[0, 0].sum(axis=1)
    array([4, 4, 4, 4, 2, 2])
    """
    if isinstance(mask, str) or (callable(mask) and not hasattr(mask, "__dlpack__")):
        fix = "predicate=" if isinstance(mask, str) else "its text, predicate='q_idx >= kv_idx'"
        raise TypeError(f"mask: got {shown(mask)}, expected an array of bool; write {fix}")
    given = [
        name
        for name, x in (("mask", mask), ("predicate", predicate), ("ranges", ranges))
        if x is not None
    ]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise TypeError(f"block_mask: expected one of mask, predicate and ranges, got {got}")
    if captured and predicate is None:
        name = next(iter(captured))
        raise TypeError(
            f"block_mask: got {name}=, which is no argument, and without a predicate nothing is captured"
        )
    shape = (
        _extent("batch", batch),
        _extent("nheads", nheads),
        None if seqlen_q is None else _extent("seqlen_q", seqlen_q),
        None if seqlen_k is None else _extent("seqlen_k", seqlen_k),
    )
    refuse_tracers({"mask": mask, "ranges": ranges, **captured})
    if mask is not None:
        return _of_bools(mask, shape)
    if ranges is not None:
        return _of_ranges(ranges, shape)
    from rawattn._verbs.predicate_mask import of_predicate

    assert predicate is not None
    for name in captured:
        if name in _FLEX:
            raise TypeError(
                f"{name}: rawattn.block_mask has no such argument; write {_FLEX[name]}="
            )
    for name, value in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        of = "rows" if name == "seqlen_q" else "keys"
        if value is None:
            raise TypeError(f"{name}: got None, expected an int, the {of} that the predicate is of")
    whole: Shape = shape  # type: ignore[assignment]
    return of_predicate(predicate, whole, captured)


def refuse_tracers(given: Mapping[str, Any]) -> None:
    for name, x in given.items():
        if is_traced(x):
            raise TypeError(
                f"{name}: got a JAX tracer, expected an array with values, of which a BlockMask is made; make it outside of "
                "the traced function, or pass bools as mask= of rawattn.jax.attention, which may be traced"
            )


def _extent(name: str, value: Any) -> int:
    """As Python's int: sizes that are computed from NumPy's would wrap around."""
    accepted = f"an int from 0 to {_INT32_MAX}"
    size = whole_number(name, value, accepted)
    if size > _INT32_MAX:
        raise ValueError(f"{name}: got {size}, expected {accepted}")
    return size


def _of_bools(given: Any, shape: tuple[int | None, ...]) -> BlockMask:
    with arrays.on_stream_of(given, arrays.framework_of(given)) as stream:
        imported = arrays.import_array("mask", given, stream=stream)
        keep = imported.array
        if keep.dtype != np.bool_:
            raise TypeError(
                f"mask: got dtype {keep.dtype}, expected bool, where True keeps a key; convert it, as by mask != 0"
            )
        if keep.ndim > 4:
            raise ValueError(
                f"mask: got shape {keep.shape}, expected at most four axes that broadcast to (batch, nheads, seqlen_q, "
                "seqlen_k)"
            )
        whole: Shape = (1,) * (4 - keep.ndim) + keep.shape
        for axis, (name, wanted) in enumerate(zip(_AXES, shape, strict=True)):
            said = wanted is not None and (axis >= 2 or wanted != 1)
            if said and whole[axis] not in (1, wanted):
                raise ValueError(
                    f"mask: got {name} = {whole[axis]} in shape {keep.shape}, expected 1 or {wanted}, the {name} that "
                    "was given beside it"
                )
        if imported.device != HOST:
            from rawattn._runtime import pack_masks

            return pack_masks.of_bools(keep, whole)
        words = buffers(whole)
        bits, found, _ = words
        four = keep.reshape(whole)
        for n in np.ndindex(whole[:2]):
            host.write_rows(four[n], shaped(bits, whole)[n], map_of(found, whole)[n])
        return finished(words, whole)


def _of_ranges(given: Any, shape: tuple[int | None, ...]) -> BlockMask:
    accepted = "integers of shape (batch, seqlen_q, n, 2): the keys [begin, end) of each row"
    if not hasattr(given, "__dlpack__"):
        try:
            given = np.asarray(given)
        except ValueError:
            raise ValueError(
                f"ranges: got lists of unequal lengths, expected {accepted}; give each row as many ranges as the one with "
                "most has, [0, 0] being an empty one"
            ) from None
    with arrays.on_stream_of(given, arrays.framework_of(given)) as stream:
        imported = arrays.import_array("ranges", given, stream=stream)
        ranges = imported.array
        if ranges.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            fix = cast(imported.framework, "ranges", "int32")
            raise TypeError(
                f"ranges: got dtype {ranges.dtype}, expected int32 or int64; convert it, as by {fix}"
            )
        if ranges.ndim != 4 or ranges.shape[3] != 2:
            raise ValueError(f"ranges: got shape {ranges.shape}, expected {accepted}")
        batch, heads, rows, keys = shape
        if heads != 1:
            raise ValueError(
                f"nheads: got {heads} beside ranges, which are the same for all heads, expected 1; for heads that differ pass "
                "mask= or predicate="
            )
        for name, wanted, got in (
            ("batch", None if batch == 1 else batch, ranges.shape[0]),
            ("seqlen_q", rows, ranges.shape[1]),
        ):
            if wanted is not None and got not in (1, wanted):
                raise ValueError(
                    f"ranges: got {name} = {got} in shape {ranges.shape}, expected 1 or {wanted}, the {name} that was "
                    "given beside it"
                )
        if keys is None:
            raise TypeError("seqlen_k: got None, expected how many keys the ranges are of")
        if imported.device != HOST:
            from rawattn._runtime import pack_masks

            return pack_masks.of_ranges(ranges, keys)
        whole: Shape = (ranges.shape[0], 1, ranges.shape[1], keys)
        words = buffers(whole)
        bits, found, _ = words
        for n in range(whole[0]):
            # A band at a time: bools of a whole mask are eight times its bits.
            for first in range(0, whole[2], GRANULE_ROWS):
                rows_of = slice(first, first + GRANULE_ROWS)
                keep = _rows_of_ranges(ranges[n, rows_of], keys)
                band = slice(first // GRANULE_ROWS, first // GRANULE_ROWS + 1)
                host.write_rows(
                    keep, shaped(bits, whole)[n, 0, rows_of], map_of(found, whole)[n, 0, band]
                )
        return finished(words, whole)


def _rows_of_ranges(ranges: NDArray[Any], keys: int) -> NDArray[np.bool_]:
    """ranges: (rows, count, 2)"""
    begin, end = (np.clip(ranges[..., n], 0, keys) for n in (0, 1))
    end = np.maximum(begin, end)
    rows = np.broadcast_to(np.arange(len(ranges))[:, None], begin.shape)
    # How many ranges are open at a key.
    steps = np.zeros((len(ranges), keys + 1), np.int32)
    np.add.at(steps, (rows, begin), 1)
    np.add.at(steps, (rows, end), -1)
    opened: NDArray[np.bool_] = steps.cumsum(axis=1)[:, :keys] > 0
    return opened
