"""`combine`: partial attention over disjoint keys becomes attention over all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rawattn._call import partials
from rawattn._call.argument_kinds import checks_arguments
from rawattn._call.options import DEFAULTS
from rawattn._interop import dynamo
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._runtime.asked import Asked
from rawattn._runtime.combine import combine_verb
from rawattn._runtime.stacked import stacked
from rawattn._verbs.repeats import repeating


@dynamo.untraced
@checks_arguments("rawattn.combine")
def combine(outs: Any, lses: Any, *, out: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """Merge results of attention over disjoint keys: ``out = sum_i exp(lse_i - lse) * out_i``.

    Parameters
    ----------
    outs : list of arrays, or one array with the partials on a new first axis
        Each as `attention` returns it, (batch, seqlen_q, nheads, Dv) or in group mode (total_q, nheads, Dv);
        all float16, all bfloat16 or all float32; Dv from 1 to 256; at least one. Any framework, one device, any strides.
        A last axis that is not of unit stride is copied, and so are lists of more than 64 or of arrays whose strides differ.
        One array is a stack in any case: a lone (batch, seqlen_q, nheads, Dv) is read as partials of group mode, as many as
        batch, so one partial is given as a list of one.
    lses : list of arrays, or one array with the partials on a new first axis
        Natural logarithms of the sums of exponentials, as `attention` returns them: (batch, nheads, seqlen_q) or
        (nheads, total_q), float32, any strides. A list or not, whatever `outs` is.
    out : array, optional
        Written and returned: the shape of a partial, `dtype`, unit last stride, writable, no overlap with a partial.
    dtype : dtype, optional
        Of the result: float16, bfloat16 or float32, as a dtype of NumPy or torch or by name. Default: that of the
        partials. Partials in float32 lose nothing on the way to a 16-bit result.

    Returns
    -------
    out : array of the framework of the first partial, on its device, in the shape of a partial
    lse : array, float32, (batch, nheads, seqlen_q) or (nheads, total_q)
        The natural logarithm of ``sum_i exp(lse_i)``.

    A partial whose lse is -inf weighs nothing, whatever its out holds, NaN included. Where all are -inf, out is 0 and
    lse -inf. So results of `combine` can be combined again.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is launched.
    RuntimeError
        For a torch tensor that requires a gradient, which would be lost: pass ``x.detach()``.

    Notes
    -----
    The work runs on the current stream of the first partial's framework and never waits for it. NumPy arrays travel to
    a GPU where there is one. Sums are made in float32. Splitting keys and merging what their parts give is what
    Flash-Decoding does (Dao et al. 2023). Another use is a prefix that many sequences share, merged with the keys that
    each has of its own (examples/shared_prefix.py).

    Partials must be disjoint: a key that two of them see counts twice. A `sink_logits` belongs to one partial alone.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, n, 4, 16), dtype=np.float32) for n in (3, 50, 50))
    >>> halves = slice(20), slice(20, 50)
    >>> parts = [rawattn.attention(q, k[:, s], v[:, s], return_lse=True) for s in halves]
    >>> out, lse = rawattn.combine(*zip(*parts))
    >>> bool(np.allclose(out, rawattn.attention(q, k, v), atol=1e-5))
    True
    """
    arrays, *form = read(outs, lses, dtype, out)
    ask = _asking(*form)
    return ask(*arrays) if out is None else ask(*arrays, out=out)


def read(
    outs: Any, lses: Any, dtype: Any, out: Any = None
) -> tuple[tuple[Any, ...], int, int, str | None]:
    """The arrays of a call one by one, how many outs and lses are listed, 0 where they are stacked, and the name of the dtype.

    Lists of more partials than a kernel is told one by one are stacked first.
    """
    dtype = None if dtype is None else partials.result_dtype(dtype).name
    listed_outs, listed_lses = isinstance(outs, (list, tuple)), isinstance(lses, (list, tuple))
    count, count_of_lses = len(outs) if listed_outs else 1, len(lses) if listed_lses else 1
    if not (1 <= count <= MAX_LISTED and 1 <= count_of_lses <= MAX_LISTED):
        sides = partials.given("outs", outs), partials.given("lses", lses)
        return read(*stacked(*sides, dtype, out))
    arrays = (*(outs if listed_outs else (outs,)), *(lses if listed_lses else (lses,)))
    return arrays, count * listed_outs, count_of_lses * listed_lses, dtype


@lru_cache(maxsize=256)
def _asking(outs: int, lses: int, dtype: str | None) -> Callable[..., tuple[Any, Any]]:
    """The calls with so many arrays, which it takes by position."""
    verb = combine_verb(outs, lses, dtype)

    def ask(*arrays: Any, out: Any = None) -> Asked[tuple[Any, Any]]:
        returned: Any = tuple
        return Asked(verb, arrays, (out, None), DEFAULTS, False, None, (), returned)

    ask.__name__ = f"combine of {outs} and {lses} to {dtype}"
    positional = [
        inspect.Parameter(f"array{n}", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for n in range(len(verb.inputs))
    ]
    *_, out = inspect.signature(ask).parameters.values()
    vars(ask)["__signature__"] = inspect.Signature(
        [*positional, out], return_annotation="Asked[tuple[Any, Any]]"
    )
    return repeating(verb, "out")(ask)
