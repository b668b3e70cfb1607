"""`combine`: merges partial results of attention over disjoint keys."""

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
from rawattn._runtime.call_request import CallRequest
from rawattn._runtime.combine import combine_verb
from rawattn._runtime.stacked import stacked
from rawattn._verbs.fast_path import with_fast_path


@dynamo.untraced
@checks_arguments("rawattn.combine")
def combine(outs: Any, lses: Any, *, out: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """Merge results of attention over disjoint keys: ``out = sum_i exp(lse_i - lse) * out_i``.

    Parameters
    ----------
    outs : list of arrays, or one array with the partials on a new first axis
        Each as `attention` returns it, (batch, seqlen_q, nheads, Dv) or in group mode (total_q, nheads, Dv);
        all float16, all bfloat16 or all float32; Dv from 1 to 256; at least one. Any framework, one device, any strides.
        Arrays whose last axis does not have unit stride are copied. So are lists of more than 64 arrays, and lists of
        arrays whose strides differ. A single array is always a stack: one of shape (batch, seqlen_q, nheads, Dv) is read
        as `batch` partials of group mode. Give a single partial as a list of one array.
    lses : list of arrays, or one array with the partials on a new first axis
        Natural logarithms of the sums of exponentials, as `attention` returns them: (batch, nheads, seqlen_q) or
        (nheads, total_q), float32, any strides. May be stacked where `outs` is a list, and a list where `outs` is stacked.
    out : array, optional
        Array that the result is written to; it is returned. It has the shape of a partial, dtype `dtype` and unit stride
        along the last axis, is writable, and does not overlap a partial.
    dtype : dtype, optional
        The dtype of the result: float16, bfloat16 or float32, as a dtype of NumPy or torch or by name. Default: that of
        the partials. With float32 partials, a 16-bit result is rounded only once.

    Returns
    -------
    out : array of the framework of the first partial, on its device, in the shape of a partial
    lse : array, float32, (batch, nheads, seqlen_q) or (nheads, total_q)
        The natural logarithm of ``sum_i exp(lse_i)``.

    A row of a partial whose lse is -inf has weight 0, whatever its out holds, NaN included. Where the lse of all partials
    is -inf, out is 0 and lse is -inf, so results of `combine` can be combined again.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted; before anything is launched.
    ImportError
        For arrays on a GPU where CuPy, which loads the kernels, is not installed.
    RuntimeError
        For a torch tensor that requires a gradient, which would be lost: pass ``x.detach()``.

    Notes
    -----
    The work is enqueued on the current stream of the first partial's framework, and the call does not wait for it. NumPy
    arrays are copied to a GPU where there is one. Sums are computed in float32. Splitting keys and merging the partial
    results is what Flash-Decoding does (Dao et al. 2023). Another use: attention to a prefix that many sequences share is
    merged with the attention of each sequence to its own keys (examples/shared_prefix.py).

    Partials must be over disjoint keys: a key that two of them see counts twice. Pass `sink_logits` to one partial only.

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
    call = _caller_of(*form)
    return call(*arrays) if out is None else call(*arrays, out=out)


def read(
    outs: Any, lses: Any, dtype: Any, out: Any = None
) -> tuple[tuple[Any, ...], int, int, str | None]:
    """The arrays of a call, how many outs and how many lses are listed (0 where stacked), and the name of the dtype.

    Lists of more than MAX_LISTED partials are stacked first.
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
def _caller_of(outs: int, lses: int, dtype: str | None) -> Callable[..., tuple[Any, Any]]:
    """A function that makes calls with so many arrays, which it takes by position."""
    verb = combine_verb(outs, lses, dtype)

    def read_call(*arrays: Any, out: Any = None) -> CallRequest[tuple[Any, Any]]:
        returned: Any = tuple
        return CallRequest(verb, arrays, (out, None), DEFAULTS, False, None, (), returned)

    read_call.__name__ = f"combine of {outs} and {lses} to {dtype}"
    positional = [
        inspect.Parameter(f"array{n}", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for n in range(len(verb.inputs))
    ]
    *_, out = inspect.signature(read_call).parameters.values()
    vars(read_call)["__signature__"] = inspect.Signature(
        [*positional, out], return_annotation="CallRequest[tuple[Any, Any]]"
    )
    return with_fast_path(verb, "out")(read_call)
