"""`combine`: partial attention over disjoint keys becomes attention over all of them."""

from __future__ import annotations

from typing import Any

from rawattn._call.places import says_places
from rawattn._interop.written import tell_written
from rawattn._runtime import combine as runtime
from rawattn._runtime.read_lengths import ANEW
from rawattn._verbs import combine_repeats


@says_places("rawattn.combine")
def combine(outs: Any, lses: Any, *, out: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """Merge results of attention over disjoint keys: ``out = sum_i exp(lse_i - lse) * out_i``.

    Parameters
    ----------
    outs : list of arrays, or one array with the partials on a new first axis
        Each as `attention` returns it, (batch, seqlen_q, nheads, Dv) or in group mode (total_q, nheads, Dv);
        all float16, all bfloat16 or all float32; Dv from 1 to 256; at least one. Any framework, one device, any strides.
        A last axis that is not of unit stride is copied, and so are lists of more than 64 or of arrays whose strides differ.
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
    found = combine_repeats.find(outs, lses, out, dtype)
    if found is not None and found.repeat is not None:
        results = found.repeat(found.addresses, out)
        if results is not ANEW:
            if out is not None:
                tell_written(out)
            return results  # type: ignore[no-any-return]
    made = runtime.run(outs, lses, out, dtype)
    if found is not None and found.repeat is None:
        combine_repeats.keep(found, outs, lses, out, dtype)
    return made
