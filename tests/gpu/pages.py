"""Checks calls of `paged_attention` on the GPU against the reference; shapes and options that several test modules use."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout, paged_attention
from rawattn._kernels.selection import only
from tests.paged import FLOAT8, Paged, verify

cupy = pytest.importorskip("cupy")

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LENS = (700, 3, 0, 1290)
SHAPES: list[dict[str, Any]] = [
    {"page_size": 1, "rows": 1},
    {"page_size": 16, "rows": 1, "heads": (12, 2), "dims": (128, 128)},
    {"page_size": 24, "rows": 5, "heads": (7, 1), "dtype": F16, "heads_first": True},
    {"page_size": 128, "rows": 16, "dtype": F32, "dims": (64, 64), "pair": True},
    {"page_size": 1000, "rows": 3, "dims": (40, 72), "integers": np.int64},
    {"page_size": 16, "rows": (200, 3, 9, 129), "packed": True, "pair": True, "dims": (256, 256)},
    {"page_size": 64, "rows": (200, 0, 9, 129), "room_q": 210, "dims": (7, 7)},
]
MASKS: list[dict[str, Any]] = [{"causal": True}, {"window": (100, 0), "sink": 4}]
# Chunks that fill a GPU. Page sizes: some divide a key tile, some are multiples of one, some are neither, and some are no
# multiple of a TMA box.
CHUNKS: list[dict[str, Any]] = [
    {"page_size": 16, "dims": (128, 128), "heads": (32, 8)},
    {"page_size": 8, "dims": (64, 64), "heads": (24, 24), "pair": True, "dtype": F16},
    {"page_size": 24, "dims": (96, 96), "heads": (24, 4), "integers": np.int64},
    {"page_size": 128, "dims": (192, 128), "heads": (24, 3), "heads_first": True},
    {"page_size": 1000, "dims": (256, 256), "heads": (32, 1), "shared": 1},
    {"page_size": 64, "dims": (40, 72), "heads": (30, 5)},
    {"page_size": 1, "dims": (128, 128), "heads": (32, 8), "heads_first": True},
    {"page_size": 100, "dims": (80, 200), "heads": (12, 12), "pair": True, "dtype": F16},
]
LIMITS: list[dict[str, Any]] = [
    {"causal": True},
    {},
    {"window": (100, 0), "sink": 4},
    {"window": (300, 20), "align": "top-left"},
]


def on_gpu(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(on_gpu, x))
    if x.dtype == FLOAT8:
        return on_gpu(x.view(np.uint8)).view(FLOAT8)
    order = sorted(range(x.ndim), key=lambda n: -x.strides[n])  # of the axes in memory: it is kept
    return cupy.asarray(x.transpose(order)).transpose(np.argsort(order))


def lengths_of(call: Paged, *, on_device: bool) -> dict[str, Any]:
    if not on_device:
        return call.lengths
    seqs = call.seqs
    if seqs is not None:
        given = {name: getattr(seqs, name) for name in ("seqstart_q", "seqlen_q")}
        seqs = SeqLayout(**{n: cupy.asarray(x) for n, x in given.items() if x is not None})
    return {"seqlen_k": cupy.asarray(call.seqlen_k), "seqs": seqs}


def check_pages(call: Paged, family: str | None = None, **options: Any) -> None:
    """Checks a call against the reference, once with its integers on the GPU and once with them on the host."""
    inputs = [on_gpu(x) for x in call.inputs]
    for device, table in ((True, inputs[3]), (False, call.block_table)):
        lengths = lengths_of(call, on_device=device)
        scales = call.scales
        if device and isinstance(call.k_scale, np.ndarray):
            scales = {name: cupy.asarray(x) for name, x in scales.items()}
        given = {n: on_gpu(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        with only(family) if family else nullcontext():
            out, lse = paged_attention(
                *inputs[:3], table, **lengths, **scales, **given, return_lse=True
            )
        assert isinstance(out, cupy.ndarray)
        verify(call, out.get(), lse.get(), **options)
