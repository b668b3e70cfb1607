"""`block_mask`: a mask made of bools, from ranges of keys, or from a predicate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.integers import LONGEST
from rawattn._call.options import for_message, nonnegative_int
from rawattn._interop import arrays, dynamo
from rawattn._interop.advice import cast
from rawattn._interop.arrays import HOST
from rawattn._interop.integers import INTEGERS
from rawattn._interop.xla import is_traced
from rawattn._masks import host
from rawattn._masks.block_mask import BlockMask, bits_view, from_filled, map_view, zeroed_buffers
from rawattn._masks.layout import GRANULE_ROWS, Shape

# Names of axes in FlexAttention, and what they are called here.
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
    """Build a mask once, for many calls that take it as `mask=`, forward and backward.

    Its bits take an eighth of the memory of bools. Tiles in which no row sees a key are neither loaded nor computed, and
    tiles in which all rows see all keys need no test of elements. Give exactly one of `mask`, `predicate` and `ranges`. The
    mask is built on the GPU if this argument, or an array that the predicate captures, is there; a predicate without arrays
    is evaluated on the current GPU where there is one.

    Parameters
    ----------
    mask : bool array of any framework, optional
        True keeps a key. At most four axes that broadcast to (batch, nheads, seqlen_q, seqlen_k), where nheads is 1,
        nheads_kv or nheads_q of the calls. In group mode and with pages the last two axes count positions inside each
        sequence.
    predicate : str, optional
        An expression with a bool value, in the language of `rawattn.ScoreMod` without `score`. Its variables are batch, head,
        kv_head, q_idx, kv_idx, seqlen_q, seqlen_k and what is captured, as in
        ``"q_idx // 128 == kv_idx // 128 and head != slow"``. head is below `nheads`, and kv_head equals head. seqlen_q and
        seqlen_k are the arguments of this call, not the lengths of sequences in a ragged or padded batch.
    ranges : integer array, (batch, seqlen_q, n, 2), optional
        int32 or int64, of any framework, or nested lists. Each row sees the keys of its n ranges [begin, end), in any order. A
        range that ends where it begins, or before, is empty. Ends outside of the keys are cut. For documents, trees and
        prefixes. The mask is the same for all heads.
    seqlen_q, seqlen_k : int, optional
        The lengths of the mask. A predicate needs both, ranges need seqlen_k. Lengths that the array has need not be given.
    batch, nheads : int
        The other axes of a predicate's mask. Beside an array they need not be given.
    **captured
        Arrays and numbers of the predicate, by name, as in `rawattn.ScoreMod`.

    Returns
    -------
    BlockMask
        (batch, nheads, seqlen_q, seqlen_k). Axes of an array that are 1 stay 1.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted. TypeError for none or several of `mask`, `predicate` and
        `ranges`, and for a JAX tracer. ValueError for a text that the language does not have, naming the piece of it.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> documents = np.repeat([[0, 4], [4, 6]], [4, 2], axis=0).reshape(1, 6, 1, 2)
    >>> rawattn.block_mask(ranges=documents, seqlen_k=6).to_bool()[0, 0].sum(axis=1)
    array([4, 4, 4, 4, 2, 2])
    """
    if isinstance(mask, str) or (callable(mask) and not hasattr(mask, "__dlpack__")):
        fix = "predicate=" if isinstance(mask, str) else "its text, predicate='q_idx >= kv_idx'"
        raise TypeError(f"mask: got {for_message(mask)}, expected an array of bool; write {fix}")
    if isinstance(mask, BlockMask):
        raise TypeError(
            f"mask: got {for_message(mask)}, expected an array of bool; calls take a BlockMask as it is"
        )
    given = [
        name
        for name, x in (("mask", mask), ("predicate", predicate), ("ranges", ranges))
        if x is not None
    ]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        advice = "".join(
            f"; {name}= is an argument, so what the predicate reads as {name!r} is captured by another name"
            for name in given
            if name != "predicate" and re.search(rf"\b{name}\b", str(predicate))
        )
        words = {"mask_mod": "predicate", **_FLEX}
        unknown = "".join(
            f"; {name}= is no argument" + (f", write {words[name]}=" if name in words else "")
            for name in (() if given else captured)
        )
        raise TypeError(
            f"block_mask: expected one of mask, predicate and ranges, got {got}{unknown}{advice}"
        )
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
    """The extent of an axis as a Python int: arithmetic on NumPy integers could wrap around."""
    accepted = f"an int from 0 to {LONGEST}"
    size = nonnegative_int(name, value, accepted)
    if size > LONGEST:
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
        if max(whole) > LONGEST:
            raise ValueError(
                f"mask: got shape {keep.shape}, expected at most {LONGEST} along each axis"
            )
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
        buffers = zeroed_buffers(whole)
        bits, found, _ = buffers
        four = keep.reshape(whole)
        for n in np.ndindex(whole[:2]):
            host.write_rows(four[n], bits_view(bits, whole)[n], map_view(found, whole)[n])
        return from_filled(buffers, whole)


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
        if ranges.dtype not in INTEGERS:
            fix = cast(imported.framework, "ranges", "int32")
            raise TypeError(
                f"ranges: got dtype {ranges.dtype}, expected int32 or int64; convert it, as by {fix}"
            )
        if ranges.ndim != 4 or ranges.shape[3] != 2:
            raise ValueError(f"ranges: got shape {ranges.shape}, expected {accepted}")
        if max(ranges.shape) > LONGEST:
            raise ValueError(
                f"ranges: got shape {ranges.shape}, expected at most {LONGEST} along each axis"
            )
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
        buffers = zeroed_buffers(whole)
        bits, found, _ = buffers
        for n in range(whole[0]):
            # A band of 64 rows at a time, since bools take eight times the memory of bits.
            for first in range(0, whole[2], GRANULE_ROWS):
                rows_of = slice(first, first + GRANULE_ROWS)
                keep = _rows_of_ranges(ranges[n, rows_of], keys)
                band = slice(first // GRANULE_ROWS, first // GRANULE_ROWS + 1)
                host.write_rows(
                    keep, bits_view(bits, whole)[n, 0, rows_of], map_view(found, whole)[n, 0, band]
                )
        return from_filled(buffers, whole)


def _rows_of_ranges(ranges: NDArray[Any], keys: int) -> NDArray[np.bool_]:
    """The keys that each row sees, (rows, keys). ranges: (rows, count, 2)."""
    begin, end = (np.clip(ranges[..., n], 0, keys) for n in (0, 1))
    end = np.maximum(begin, end)
    rows = np.broadcast_to(np.arange(len(ranges))[:, None], begin.shape)
    # Steps of the number of ranges that contain a key: +1 at each begin, -1 at each end.
    steps = np.zeros((len(ranges), keys + 1), np.int32)
    np.add.at(steps, (rows, begin), 1)
    np.add.at(steps, (rows, end), -1)
    opened: NDArray[np.bool_] = steps.cumsum(axis=1)[:, :keys] > 0
    return opened
