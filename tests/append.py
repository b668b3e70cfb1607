"""Calls of `append_kv`, as data: the pages before the call, the new rows, and the check of what the call writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rawattn import reference
from tests.paged import BFLOAT16, FLOAT8, Paged, paged

Array = Any


@dataclass(frozen=True, eq=False)
class Appended:
    """One call of `append_kv`.

    pages: the paged call after the append: its pages hold the new rows too, and its q belongs to those rows.
    """

    pages: Paged
    k: Array
    v: Array
    rotary: tuple[Array, Array] | None
    interleaved: bool

    @property
    def q(self) -> Array | None:
        return None if self.rotary is None else self.pages.q

    @property
    def options(self) -> dict[str, Any]:
        named = {"rotary": self.rotary, "interleaved": self.interleaved, "seqs": self.pages.seqs}
        return {**named, **self.pages.scales}

    def pools(self) -> tuple[Array, Array]:
        """Return the pools before the call: NaN in the slots of the new rows, and the strides of the call's own pools."""
        found = []
        for pool in (self.pages.k_pages, self.pages.v_pages):
            copy = _like(pool)
            copy[...] = pool
            for page, at in _slots(self.pages):
                copy[page, at] = np.nan
            found.append(copy)
        return found[0], found[1]

    def verify(self, k_pages: Array, v_pages: Array, out: Array | None) -> None:
        """Check the results against the reference.

        Every other slot of the pages must be unchanged, and padding rows of out must be 0.
        """
        before = self.pools()
        arrays = (self.k, self.v, *before, self.pages.block_table)
        given = {"seqlen_k": self.pages.seqlen_k, "q": self.q, **self.options}
        exact_k, exact_v, exact_q = reference.append_kv(*arrays, **given)
        new = np.zeros(exact_k.shape[:2], bool)
        for slot in _slots(self.pages):
            new[slot] = True
        for pool, was in zip((k_pages, v_pages), before, strict=True):
            assert pool[~new].tobytes() == was[~new].tobytes(), (
                "rows of pages that are not new have changed"
            )
        # The quotient of two float32 numbers, computed in float64 and then rounded to float32, has the bits of a float32
        # division.
        single = exact_v[new].astype(np.float32) if v_pages.dtype == FLOAT8 else exact_v[new]
        assert _bits(v_pages[new]) == _bits(single.astype(v_pages.dtype))
        _close(k_pages[new], exact_k[new])
        assert (out is None) == (exact_q is None)
        if out is not None:
            rows = self.pages.rows
            _close(out[rows], exact_q[rows])
            assert not np.any(out[~rows].astype(np.float32)), "padding rows of out are not 0"


def rounded(dtype: Any) -> Iterator[Appended]:
    """Yield calls that append to 8-bit pages.

    The rows hold every 8-bit number, numbers between neighbours, numbers past the largest, infinity and NaN.
    """
    every = np.arange(127, dtype=np.uint8).view(FLOAT8).astype(np.float32)
    between = (every[:-1] + every[1:]) / 2
    near = np.concatenate([between * x for x in (1, 1 + 2.0**-9, 1 - 2.0**-9)])
    odd = np.array([448, 460, 464, 465, 480, 1000, 6e4, np.inf, np.nan, 2.0**-10, 2.0**-11, 1e-6])
    numbers = np.concatenate((every, near, odd)).astype(dtype)
    numbers = np.concatenate((numbers, -numbers))
    count = -(-numbers.size // 64)
    knobs = {"rows": count, "heads": (1, 1), "dims": (64, 64), "dtype": dtype, "float8": "plain"}
    call = appended((count,), 8, **knobs)
    rows = np.resize(numbers, call.k.shape)
    for scale in (None, 0.3, 2.0**-8):
        pages = replace(call.pages, k_scale=scale, v_scale=scale)
        yield replace(call, k=rows, v=rows[..., ::-1].copy(), pages=pages)


def _bits(x: Array) -> bytes:
    """Return the bits of the numbers and where NaNs are. Which NaN a conversion yields depends on the processor."""
    return np.where(np.isnan(x), x.dtype.type(0), x).tobytes() + np.isnan(x).tobytes()


def appended(
    lens_k: tuple[int, ...],
    page_size: int,
    *,
    rotary_dim: int = 0,
    interleaved: bool = False,
    angles: Any = np.float32,
    **knobs: Any,
) -> Appended:
    """knobs: arguments of `tests.paged.paged`. No sequence has more rows than keys in lens_k."""
    call = paged(lens_k, page_size, **knobs)
    rng = np.random.default_rng([page_size, *lens_k])
    heads = call.k_pages.shape[2]
    shapes = [(*call.q.shape[:-2], heads, pool.shape[-1]) for pool in (call.k_pages, call.v_pages)]
    k, v = (rng.standard_normal(shape).astype(call.q.dtype) for shape in shapes)
    for rows in (k, v):
        rows[~call.rows] = np.nan
    rotary = None
    if rotary_dim:
        phases = np.arange(max(lens_k) + 2)[:, None] * 100.0 ** -np.linspace(0, 1, rotary_dim // 2)
        rotary = np.cos(phases).astype(angles), np.sin(phases).astype(angles)
        call.q[~call.rows] = np.nan
    return Appended(call, k, v, rotary, interleaved and rotary is not None)


def _slots(call: Paged) -> list[tuple[int, int]]:
    """Return the page and the row within that page of every new row."""
    table, starts = call.block_table, None
    if isinstance(table, tuple):
        starts, table = table
    rows = call.rows
    if call.q.ndim == 4:
        lens_q = rows.sum(axis=1)
    else:
        assert call.seqs is not None
        lens_q = call.seqs.seqlen_q
    size = call.k_pages.shape[1]
    found = []
    for n, (new, keys) in enumerate(zip(lens_q, call.seqlen_k, strict=True)):
        ids = table[n] if starts is None else table[starts[n] :]
        found += [(int(ids[p // size]), int(p % size)) for p in range(keys - new, keys)]
    return found


def _like(pool: Array) -> Array:
    """Return an uninitialised array with the shape and axis order in memory of `pool`."""
    order = np.argsort(pool.strides)[::-1]
    return np.empty(np.array(pool.shape)[order], pool.dtype).transpose(np.argsort(order))


def _close(got: Array, exact: Array) -> None:
    """Check within the rounding of the result and of two float32 multiplications."""
    assert got.shape == exact.shape
    step = {BFLOAT16: 2.0**-8, np.dtype(np.float16): 2.0**-11, FLOAT8: 2.0**-4}
    relative = step.get(got.dtype, 2.0**-23) + 2.0**-21
    least = 2.0**-21 + (2.0**-10 if got.dtype == FLOAT8 else 0)
    numbers = ~np.isnan(exact)
    got = got.astype(np.float64)
    assert np.array_equal(numbers, ~np.isnan(got))
    error = np.abs(got[numbers] - exact[numbers])
    assert np.all(error <= relative * np.abs(exact[numbers]) + least)
