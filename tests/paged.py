"""Paged calls, as data: each sequence has its own keys, scattered over a pool that is NaN wherever no key is stored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import rawattn
from rawattn import reference
from tests.tolerance import check, check_lse, low_precision_attention

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
Array = Any


@dataclass(frozen=True, eq=False)
class Paged:
    """A call with all its arrays on the host.

    packed_k, packed_v: the keys and values without pages, sequence after sequence. For 8-bit pages they are float64 and already
    multiplied by the scales.
    """

    q: Array
    k_pages: Array
    v_pages: Array
    block_table: Any
    seqlen_k: Array
    seqs: rawattn.SeqLayout | None
    packed_k: Array
    packed_v: Array
    k_scale: Any = None
    v_scale: Any = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.q, self.k_pages, self.v_pages, self.block_table

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of the call that are not options of attention."""
        names = ("q", "k_pages", "v_pages", "block_table", "seqlen_k")
        return {**{name: getattr(self, name) for name in names}, "validate": False}

    @property
    def lengths(self) -> dict[str, Any]:
        return {"seqlen_k": self.seqlen_k, "seqs": self.seqs}

    @property
    def scales(self) -> dict[str, Any]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    @property
    def rows(self) -> Array:
        """True for the logical rows of q."""
        seqs = self.seqs
        if self.q.ndim == 3:
            assert seqs is not None
            rows = np.zeros(self.q.shape[0], bool)
            ends = (
                seqs.seqstart_q[1:]
                if seqs.seqlen_q is None
                else seqs.seqstart_q[:-1] + seqs.seqlen_q
            )
            for start, end in zip(seqs.seqstart_q[:-1], ends, strict=True):
                rows[start:end] = True
            return rows
        lengths = self.q.shape[1] if seqs is None else seqs.seqlen_q[:, None]
        return np.broadcast_to(np.arange(self.q.shape[1]) < lengths, self.q.shape[:2])

    def without_pages(self) -> tuple[tuple[Array, ...], dict[str, Any]]:
        """Return the same call on packed keys, as `attention` takes it in group mode."""
        rows = self.rows
        if self.q.ndim == 3:
            assert self.seqs is not None
            starts, lengths = self.seqs.seqstart_q, self.seqs.seqlen_q
        else:
            starts = np.arange(self.q.shape[0] + 1) * self.q.shape[1]
            lengths = rows.sum(axis=1)
        layout = rawattn.SeqLayout(
            seqstart_q=starts,
            seqstart_k=np.concatenate(([0], np.cumsum(self.seqlen_k))),
            seqlen_q=lengths,
        )
        q = self.q.reshape(-1, *self.q.shape[-2:])
        return (q, self.packed_k, self.packed_v), {"seqs": layout}


def paged(
    lens_k: tuple[int, ...],
    page_size: int,
    *,
    rows: int | tuple[int, ...] = 1,
    room_q: int | None = None,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (24, 16),
    dtype: Any = BFLOAT16,
    integers: Any = np.int32,
    pair: bool = False,
    heads_first: bool = False,
    shared: int = 0,
    spare: int = 3,
    junk: int = -1,
    packed: bool = False,
    float8: str = "",
    seed: int = 0,
) -> Paged:
    """Make a paged call.

    rows: query rows, one number for all sequences or one for each. room_q: physical rows of a padded batch.
    float8: "plain" (8-bit pages without scales), "numbers" (one scale for all heads) or "arrays" (a scale for each head).
    shared: leading whole pages that all sequences share.
    spare: table entries past the last page, and pages of the pool that no sequence uses. junk: the value of spare entries.
    heads_first: in memory the pool is (num_pages, nheads_kv, page_size, D).
    """
    rng = np.random.default_rng([seed, page_size, *lens_k])
    batch = len(lens_k)
    counts = [-(-n // page_size) for n in lens_k]
    common = min([shared, *(n // page_size for n in lens_k)])
    num_pages = sum(counts) - common * max(batch - 1, 0) + spare
    order = rng.permutation(num_pages)
    stored = FLOAT8 if float8 else np.dtype(dtype)
    pools = []
    for dim in dims:
        shape = (num_pages, page_size, heads[1], dim)
        inner = (shape[0], shape[2], shape[1], shape[3]) if heads_first else shape
        pool = np.full(inner, np.nan, stored)
        pools.append(pool.swapaxes(1, 2) if heads_first else pool)
    taken = common
    owned: list[list[int]] = []
    unpaged: tuple[list[Array], list[Array]] = ([], [])
    for n, count in zip(lens_k, counts, strict=True):
        own = order[taken : taken + count - common]
        taken += count - common
        ids = [*order[:common], *own]
        owned.append([int(x) for x in ids])
        for pool, dim, out in zip(pools, dims, unpaged, strict=True):
            values = rng.standard_normal((n, heads[1], dim)).astype(stored)
            for page, which in enumerate(ids):
                first = page * page_size
                part = values[first : first + page_size]
                if page < common and owned[0] is not owned[-1]:
                    values[first : first + page_size] = pool[which]
                else:
                    pool[which, : len(part)] = part
            out.append(values)
    table: Any
    if pair:
        flat = [x for ids in owned for x in ids] + [junk] * spare
        ends = np.concatenate(([0], np.cumsum(counts)))
        table = ends.astype(integers), np.array(flat, integers)
    else:
        table = np.full((batch, max(counts, default=0) + spare), junk, integers)
        for b, ids in enumerate(owned):
            table[b, : len(ids)] = ids
    lens_q = (rows,) * batch if isinstance(rows, int) else rows
    seqs = None
    if packed:
        seqs = rawattn.SeqLayout(
            seqstart_q=np.concatenate(([2], 2 + np.cumsum([n + 1 for n in lens_q]))),
            seqlen_q=np.array(lens_q, integers),
        )
        shape = (int(seqs.seqstart_q[-1]) + 1, heads[0], dims[0])
    else:
        room = max(lens_q, default=1) if room_q is None else room_q
        shape = (batch, room, heads[0], dims[0])
        if any(n != room for n in lens_q):
            seqs = rawattn.SeqLayout(seqlen_q=np.array(lens_q, integers))
    q = rng.standard_normal(shape).astype(dtype)
    k, v = (
        np.concatenate([np.empty((0, heads[1], d), stored), *x])
        for x, d in zip(unpaged, dims, strict=True)
    )
    scales: list[Any] = [None, None]
    if float8:
        if float8 != "plain":
            scales = [rng.uniform(0.1, 2, heads[1]).astype(np.float32) for _ in "kv"]
        if float8 == "numbers":
            scales = [float(x[0]) for x in scales]
        factors = [1.0 if x is None else np.reshape(x, (-1, 1)) for x in scales]
        k, v = (x.astype(np.float64) * factor for x, factor in zip((k, v), factors, strict=True))
    return Paged(q, *pools, table, np.array(lens_k, integers), seqs, k, v, *scales)


Expected = tuple[Array, Array, list[Array], list[Array]]
# Results of the last two calls, so that several kernels can be checked against one reference. The calls are kept alive because
# their id is part of the key.
_known: dict[Any, tuple[Paged, Expected]] = {}


def expected(call: Paged, **options: Any) -> Expected:
    """Return the reference's `out` and `lse` on keys without pages, and low-precision evaluations; logical rows only."""
    if not all(isinstance(x, int | float | str | tuple | None) for x in options.values()):
        return _expected(call, options)
    tables = call.block_table if isinstance(call.block_table, tuple) else (call.block_table,)
    content = hashlib.blake2b()
    for array in (call.q, call.packed_k, call.packed_v, call.seqlen_k, *tables):
        content.update(np.ascontiguousarray(array).view(np.uint8))
    key = id(call), content.digest(), *sorted(options.items())
    if key not in _known:
        if len(_known) == 2:
            _known.clear()
        _known[key] = call, _expected(call, options)
    return _known[key][1]


def _expected(call: Paged, options: dict[str, Any]) -> Expected:
    inputs, layout = call.without_pages()
    rows = call.rows.reshape(-1)
    out, lse = reference.attention(*inputs, **layout, **options, return_lse=True)
    low_out, low_lse = low_precision_attention(*inputs, **layout, **options)
    return out[rows], lse.T[rows], [x[rows] for x in low_out], [x.T[rows] for x in low_lse]


def verify(call: Paged, out: Array, lse: Array, **options: Any) -> None:
    """Check a result in arrays that the library allocates: padding rows are 0 in out and -inf in lse."""
    exact_out, exact_lse, low_out, low_lse = expected(call, **options)
    rows = call.rows
    assert out.shape == (*call.q.shape[:-1], call.v_pages.shape[-1])
    check(out[rows], exact_out, tuple(low_out), what="out")
    by_row = lse.swapaxes(-1, -2)
    check_lse(by_row[rows], exact_lse, tuple(low_lse))
    assert not np.any(out[~rows].astype(np.float32)), "padding rows of out are not 0"
    assert np.all(by_row[~rows] == -np.inf), "padding rows of lse are not -inf"


def normal(*shape: int, dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# Score options for up to three sequences of up to 9 rows and 160 keys.
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": normal(3, 4, 9, 160, dtype=BFLOAT16)},
    "bias-of-keys": {"bias": normal(1, 160)},
    "mask": {"mask": normal(3, 1, 9, 150) > -0.5},
    "alibi": {"alibi_slopes": np.abs(normal(3, 4)), "causal": True},
    "softcap": {"softcap": 1.5, "scale": 1.0},
    "sinks": {"sink_logits": normal(4)},
    "dropout": {"dropout_p": 0.3, "seed": 11},
    "score_mod": {"score_mod": rawattn.ScoreMod("where(kv_idx % 3 == 1, -inf, score - batch)")},
}


def two_sequences() -> dict[str, Any]:
    """The arguments of a call of two sequences, by name: 40 and 20 keys in pages of 16."""
    pool = normal(8, 16, 2, 8)
    return {
        "q": normal(2, 3, 4, 8),
        "k_pages": pool,
        "v_pages": pool.copy(),
        "block_table": np.array([[0, 1, 2, -1], [3, 4, -1, -1]]),
        "seqlen_k": np.array([40, 20]),
    }
