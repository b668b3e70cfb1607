"""`unpack_pages`: converts the vectorized page layout of other libraries into pages of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn._call.argument_kinds import checks_arguments
from rawattn._interop import arrays

_K_AXES = "(num_pages, nheads_kv, D / x, page_size, x)"
_V_AXES = "(num_pages, nheads_kv, Dv, page_size) or (num_pages, nheads_kv, page_size / x, Dv, x)"


@checks_arguments("rawattn.unpack_pages")
def unpack_pages(k_cache: Any, v_cache: Any) -> tuple[Any, Any]:
    """Copy a cache of vectorized pages into pages that `paged_attention` accepts.

    Some libraries store a key in vectors of x neighbouring elements, so that one memory access reads x elements (x is 8 for
    16-bit elements). Within a page, vector n of all keys comes before vector n + 1. No view can turn such a page into rows,
    so the pool is copied. The ``block_table`` stays valid.

    Parameters
    ----------
    k_cache : array, (num_pages, nheads_kv, D / x, page_size, x)
        Any dtype and strides, of any framework, on the host or on a GPU.
    v_cache : array, (num_pages, nheads_kv, Dv, page_size) or (num_pages, nheads_kv, page_size / x, Dv, x)
        The dtype and device of k_cache.

    Returns
    -------
    k_pages : array, (num_pages, page_size, nheads_kv, D)
        In k_cache's framework, on its device, in C order.
    v_pages : array, (num_pages, page_size, nheads_kv, Dv)

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted.

    Examples
    --------
    >>> import numpy as np, rawattn
    >>> k = np.arange(2 * 3 * 16 * 8, dtype=np.float32).reshape(2, 16, 3, 8)  # (num_pages, page_size, nheads_kv, D)
    >>> k_cache = k.reshape(2, 16, 3, 2, 4).transpose(0, 2, 3, 1, 4)  # in vectors of 4
    >>> v_cache = k.transpose(0, 2, 3, 1)
    >>> k_pages, v_pages = rawattn.unpack_pages(k_cache, v_cache)
    >>> bool((k_pages == k).all() and (v_pages == k).all())
    True
    """
    framework = arrays.framework_of(k_cache)
    with arrays.on_stream_of(k_cache, framework) as stream:
        k, v = (
            arrays.import_array(name, x, stream=stream)
            for name, x in (("k_cache", k_cache), ("v_cache", v_cache))
        )
        if v.device != k.device:
            raise ValueError(
                "v_cache: got an array on another device than k_cache; move one of them"
            )
        if v.array.dtype != k.array.dtype:
            raise TypeError(
                f"v_cache: got dtype {v.array.dtype}, expected {k.array.dtype}, that of k_cache"
            )
        if k.array.dtype.kind in "OSU":
            raise TypeError(f"k_cache: got dtype {k.array.dtype}, expected one of numbers")
        pages, nheads, vectors, page_size, width = _checked(k.array.shape, v.array.shape)
        in_vectors = v.array.ndim == 5
        headdim_v = v.array.shape[3 if in_vectors else 2]
        k_rows = k.array.transpose(0, 3, 1, 2, 4)
        v_rows = v.array.transpose((0, 2, 4, 1, 3) if in_vectors else (0, 3, 1, 2))
        found = [
            _copied(rows).reshape(pages, page_size, nheads, headdim)
            for rows, headdim in ((k_rows, vectors * width), (v_rows, headdim_v))
        ]
        k_pages, v_pages = (arrays.export_array(rows, framework, stream) for rows in found)
        return k_pages, v_pages


def _checked(k: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of k_cache, once both shapes have been checked."""
    if len(k) != 5:
        raise ValueError(f"k_cache: got shape {k}, expected {_K_AXES}")
    if len(v) not in (4, 5):
        raise ValueError(f"v_cache: got shape {v}, expected {_V_AXES}")
    if v[:2] != k[:2]:
        raise ValueError(
            f"v_cache: got (num_pages, nheads_kv) = {v[:2]}, expected {k[:2]}, those of k_cache"
        )
    page_size = v[3] if len(v) == 4 else v[2] * v[4]
    if page_size != k[3]:
        raise ValueError(
            f"v_cache: got page_size = {page_size}, expected {k[3]}, that of k_cache, in {_V_AXES}"
        )
    return k


def _copied(rows: Any) -> Any:
    """A copy in C order. Elements are copied as unsigned integers of their size, since CuPy has no kernels for bfloat16."""
    dtype = rows.dtype
    words = np.dtype(f"u{dtype.itemsize}") if dtype.itemsize <= 8 else dtype
    return rows.view(words).copy(order="C").view(dtype)
