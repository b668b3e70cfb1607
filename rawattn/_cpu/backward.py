"""The CPU backend's backward, in float32, with threads over tiles of scores.

Short sequences are computed here: each is one tile, and those of equal lengths are computed together.
A long sequence takes many tiles (`backward_tiles`). Beyond the arrays of the call, memory is a few tiles
for each thread, whatever the lengths. Each tile of a result is written by one thread, which adds in a
fixed order, so every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from rawattn._call.layout import HostLengths
from rawattn._call.problem import NO_ARRAYS, Problem
from rawattn._cpu.backward_tiles import Arrays, tasks_of
from rawattn._cpu.bundles import (
    Bundle,
    divide_batch,
    heads_first,
    heads_last,
    mask_of_bundle,
    multiply_whole,
    where_bundle,
)
from rawattn._cpu.score_gradients import Part, Totals
from rawattn._cpu.scores import scores_of
from rawattn._cpu.softmax_gradient import PLAIN, Options, score_gradient, softmax_gradient
from rawattn._cpu.threads import Task, run
from rawattn._cpu.tiles import Array, Floats


def backward(
    problem: Problem,
    lengths: HostLengths | None,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
    extras: Mapping[str, Any] = NO_ARRAYS,
    gradients: Mapping[str, Any] = NO_ARRAYS,
) -> None:
    """Write the logical rows of dq, dk and dv, and all of `gradients`. Padding rows are neither read nor written.

    All are NumPy arrays; `dlse` None means a gradient of 0. A row whose lse is -inf contributes and gets 0.
    `lengths` may be None if `problem.ragged` is False. extras: arrays of options by name, and the number
    "seed_value". gradients: where the gradients of these arrays are written, by their names with a "d" in front.
    """
    arrays = Arrays(dout, q, k, v, out, lse, dlse, dq, dk, dv)
    options = PLAIN
    if (scores := scores_of(problem, extras)) is not None:
        options = Options(scores, Totals(problem, scores, gradients) if gradients else None)
    bundles, spans = divide_batch(problem, lengths)
    tasks = [
        # The backward has five matrix products where the forward has two of the same size.
        Task(
            bundle.work(problem) * 5 // 2,
            partial(_differentiate_bundle, problem, options, bundle, arrays),
        )
        for bundle in bundles
    ]
    for span in spans:
        tasks += tasks_of(problem, options, span, arrays)
    if options.totals is None:
        run(tasks)
    else:
        run(options.totals.collecting(tasks))
        options.totals.write(gradients)


# NumPy's error state is per thread, so each task sets it. Warnings would be about the caller's NaN or
# infinity, or about a gradient that float16 cannot hold.
@np.errstate(all="ignore")
def _differentiate_bundle(
    problem: Problem, options: Options, bundle: Bundle, arrays: Arrays
) -> Part | None:
    rows, keys, nheads_kv = bundle.rows, bundle.keys, problem.nheads_kv
    q, dout, out = (
        heads_first(rows.read(x), nheads_kv) for x in (arrays.q, arrays.dout, arrays.out)
    )
    k, v = (heads_first(keys.read(x), nheads_kv) for x in (arrays.k, arrays.v))
    q = q * problem.scale
    lse = _of_rows(problem, bundle, arrays.lse)
    delta = np.add.reduce(dout * out, axis=3, keepdims=True)
    if arrays.dlse is not None:
        delta -= _of_rows(problem, bundle, arrays.dlse)
    nothing = lse == -np.inf
    if nothing.any():
        lse = np.where(nothing, np.float32(np.inf), lse)  # exp(s - inf) = 0
        dout, delta = (np.where(nothing, np.float32(0), x) for x in (dout, delta))

    p = np.matmul(q, k.swapaxes(2, 3))
    ds = np.matmul(dout, v.swapaxes(2, 3))
    masked = mask_of_bundle(problem, bundle)
    part = None
    if options.scores is None:
        softmax_gradient(p, ds, lse, delta, masked)
    else:
        where = where_bundle(problem, bundle)
        part = options.part(where)
        masked = score_gradient(options.scores, p, ds, lse, delta, masked, where, part)
        if part is not None:
            part.add_sinks(lse, delta, where)
    masked_rows = None if masked is None else masked.swapaxes(-1, -2)
    dv = multiply_whole(p.swapaxes(2, 3), dout, masked_rows)
    dk = multiply_whole(ds.swapaxes(2, 3), q, masked_rows)
    dq = multiply_whole(ds, k, masked)
    dq *= problem.scale
    rows.write(arrays.dq, heads_last(dq, problem.nheads_q))
    keys.write(arrays.dk, heads_last(dk, nheads_kv))
    keys.write(arrays.dv, heads_last(dv, nheads_kv))
    return part


def _of_rows(problem: Problem, bundle: Bundle, lse: Array) -> Floats:
    """An array with the axes of `lse`, for the rows of a bundle, in the layout of `heads_first`."""
    return heads_first(bundle.rows.read(lse.swapaxes(-1, -2))[..., None], problem.nheads_kv)
