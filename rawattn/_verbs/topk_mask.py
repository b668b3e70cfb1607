"""`topk_mask`: a mask of the keys with the largest scores in each row."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from rawattn._call import options
from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.options import DEFAULTS
from rawattn._interop import arrays, dynamo
from rawattn._interop.advice import cast
from rawattn._interop.arrays import HOST
from rawattn._masks.block_mask import BlockMask
from rawattn._masks.layout import Shape
from rawattn._verbs.block_mask import block_mask, refuse_tracers

# Scores that are processed at a time. Each takes some 20 bytes of temporary memory.
_AT_ONCE = 1 << 25


@dynamo.untraced
@checks_arguments("rawattn.topk_mask")
def topk_mask(
    scores: Any, k: int, *, causal: bool = False, align: str = "bottom-right"
) -> BlockMask:
    """Build a mask that keeps each row's `k` largest finite scores, among the keys that the row may see.

    Of equal scores the one with the lower key index is kept.

    Parameters
    ----------
    scores : array, of one to four axes that broadcast to (batch, nheads, seqlen_q, seqlen_k)
        Of any framework; integers, float16, bfloat16, float32 or float64. nheads is 1, nheads_kv or nheads_q of the calls.
        NaN, inf and -inf are never kept. A torch tensor that requires a gradient is read as its ``detach()``.
    k : int
        At least 0. With 0 no key is seen. If a row may see fewer than k keys of finite scores, all of these are kept, so k may
        exceed the number of keys.
    causal, align
        As in `rawattn.attention`: which keys a row may see. They do not replace `causal` and `align` of a call.

    Returns
    -------
    BlockMask
        On the device of the scores, in their shape, with axes of 1 in front up to four.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted. TypeError for scores of bool or of 8-bit floats, for lists,
        and for a JAX tracer.

    Notes
    -----
    If seqlen_q of the scores is 1, all rows of a call share their keys, and `BlockMask.kept` lists these. `causal` then
    treats the scores as those of a single query: with the default alignment it may see all keys, with "top-left" only the
    first. A call on a GPU gathers the listed keys and values and computes attention over these only, forward and backward,
    also with `causal` and windows. It does so if k is at most half of the keys, nheads is 1 or nheads_kv, and the call has no
    `seqs`, `bias`, `alibi_slopes`, `score_mod` or `dropout_p`. Other calls use the mask's bits.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> rawattn.topk_mask(np.array([[1.0, 3.0, 3.0, -np.inf, 2.0]]), 2).to_bool()[0, 0, 0]
    array([False,  True,  True, False, False])
    """
    settings = DEFAULTS._replace(causal=causal, align=align)
    is_causal, top_left = options.causal(settings), options.top_left(settings)
    count = options.nonnegative_int("k", k, "an int >= 0")
    refuse_tracers({"scores": scores})
    with arrays.on_stream_of(scores, arrays.framework_of(scores)) as stream:
        imported = arrays.import_array("scores", scores, stream=stream)
        given = imported.array
        if given.dtype.kind not in "fiu" and given.dtype.name != "bfloat16":
            fix = cast(imported.framework, "scores", "float32")
            raise TypeError(
                f"scores: got dtype {given.dtype}, expected numbers; convert it, as by {fix}"
            )
        if not 1 <= given.ndim <= 4:
            raise ValueError(
                f"scores: got shape {given.shape}, expected one to four axes that broadcast to (batch, nheads, seqlen_q, "
                "seqlen_k)"
            )
        whole: Shape = (1,) * (4 - given.ndim) + given.shape
        module: Any = np if imported.device == HOST else sys.modules["cupy"]
        rows, keys = whole[2:]
        # `last`: the last key that each row may see.
        offset = 0 if top_left else keys - rows
        last = module.arange(rows)[:, None] + offset if is_causal else None
        four = given.reshape(whole)
        keep = module.empty(whole, bool)
        step = max(1, _AT_ONCE // max(keys, 1))
        for n in np.ndindex(whole[:2]):
            for first in range(0, rows, step):
                part = slice(first, first + step)
                limit = None if last is None else last[part]
                keep[n][part] = _largest(four[n][part], count, limit, module)
        found = block_mask(keep)
        if rows == 1:
            found.kept = _indices(keep, min(count, keys), module)
        return found


def _largest(scores: Any, count: int, last: Any, module: Any) -> Any:
    keys = scores.shape[1]
    if scores.dtype.kind in "iu":
        # Integers beyond 2**53 would not stay distinct as floats.
        values = scores.astype(np.int64 if scores.dtype.kind == "i" else np.uint64)
        lowest: float = np.iinfo(values.dtype).min
        candidates = module.ones(scores.shape, bool)
    else:
        small = scores.dtype.itemsize <= 2 or scores.dtype == np.float32
        values = scores.astype(np.float32 if small else np.float64)
        lowest = -np.inf
        candidates = module.isfinite(values)
    if last is not None:
        candidates &= module.arange(keys) <= last
    if count >= keys:
        return candidates
    if count == 0:
        return module.zeros(scores.shape, bool)
    values = module.where(candidates, values, values.dtype.type(lowest))
    least = module.partition(values, keys - count, axis=1)[:, keys - count, None]
    above = values > least
    equal = (values == least) & candidates
    left = count - above.sum(axis=1, keepdims=True)
    return above | (equal & (equal.cumsum(axis=1) <= left))


def _indices(keep: Any, count: int, module: Any) -> Any:
    """The indices of True elements along the last axis, ascending, padded with -1 to `count`."""
    keys = keep.shape[3]
    found = module.sort(module.where(keep, module.arange(keys), keys), axis=-1)[..., :count]
    return module.where(found == keys, -1, found).astype(np.int32)
