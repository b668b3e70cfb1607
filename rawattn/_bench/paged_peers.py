"""Attention of other libraries on keys in pages, causal, aligned so that the last row sees every key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from rawattn._bench.grids import FA4_PAGED, FLASHINFER
from rawattn._bench.peers import first_of, flash4_splits, tensors
from rawattn._bench.timing import Call

# For FlashInfer's partial results. It asks for 128 MiB, but 71 query heads on one kv head take 1.1 GiB.
_SCRATCH_BYTES = 2 << 30


class Pages(NamedTuple):
    """CuPy arrays: q (batch, rows, heads, D), pages (pages, page size, heads, D), a block table with -1 behind the last page of
    a sequence, and the number of keys of each sequence, int32."""

    q: Any
    k: Any
    v: Any
    table: Any
    lengths: Any


def _flash4(pages: Pages) -> Call:
    from flash_attn.cute.interface import flash_attn_varlen_func

    q, k, v, table, lengths = tensors(*pages)
    options = {"page_table": table, "seqused_k": lengths, "causal": True, **flash4_splits()}

    def call() -> Any:
        return first_of(flash_attn_varlen_func(q, k, v, **options))

    return call


def _flashinfer(pages: Pages) -> Call:
    """A call that FlashInfer has planned for these lengths, as it does once for all layers of a model."""
    import cupy
    import flashinfer
    import torch

    q, k, v = tensors(pages.q, pages.k, pages.v)
    table, lengths = (torch.from_numpy(cupy.asnumpy(x)) for x in (pages.table, pages.lengths))
    batch, rows, nheads_q, headdim = q.shape
    page_size, nheads_kv = k.shape[1:3]
    counts = -(-lengths // page_size)
    starts = torch.zeros(batch + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    in_pages = (starts, table[table >= 0].cuda(), lengths - (counts - 1) * page_size)
    heads = (nheads_q, nheads_kv, headdim, page_size)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    if rows == 1:
        # Its choice for groups of heads: a warp's 16 rows are worth filling from four on.
        kind = {"use_tensor_cores": nheads_q >= 4 * nheads_kv}
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_scratch(), "NHD", **kind)
        wrapper.plan(*in_pages, *heads, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_scratch(), "NHD")
        row_starts = torch.arange(batch + 1, dtype=torch.int32) * rows
        wrapper.plan(row_starts, *in_pages, *heads, causal=True, **dtypes)
    joined = q.view(batch * rows, nheads_q, headdim)

    def call() -> Any:
        return wrapper.run(joined, (k, v)).view(q.shape)

    return call


@functools.cache
def _scratch() -> Any:
    """Memory for partial results. All calls share it, since they run in turns on one stream."""
    import torch

    return torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device="cuda")


PEERS: dict[str, Callable[[Pages], Call]] = {FA4_PAGED: _flash4, FLASHINFER: _flashinfer}
