"""Masks and score options on pages: windows and sinks of every size, and all options at once."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from rawattn import paged_attention
from rawattn._kernels.selection import only
from tests.exhaustive import thin
from tests.gpu.pages import F16, F32, check_pages, lengths_of, on_gpu
from tests.paged import BFLOAT16, paged, verify

cupy = pytest.importorskip("cupy")

_SEEN: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    *({"window": (left, 0)} for left in (32, 128, 256, 1024)),
)
_GRID = itertools.product((BFLOAT16, F16, F32), (512, 1024, 2048, 4096), _SEEN, (0, 1, 8, 128))


@pytest.mark.parametrize(("dtype", "seqlen", "seen", "sink"), thin(_GRID, 23), ids=str)
def test_windows_and_sinks(dtype: Any, seqlen: int, seen: dict[str, Any], sink: int) -> None:
    """Windows and sinks of every size are right, with lse and without."""
    lens = (seqlen, seqlen // 2 + 3)
    call = paged(lens, 16, rows=3, heads=(4, 2), dims=(64, 64), dtype=dtype)
    options: dict[str, Any] = {**seen, "sink": sink}
    check_pages(call, **options)
    inputs = [on_gpu(x) for x in call.inputs]
    options |= lengths_of(call, on_device=True)
    out = paged_attention(*inputs, **options)
    _, lse = paged_attention(*inputs, **options, return_lse=True)
    verify(call, out.get(), lse.get(), **seen, sink=sink)


@pytest.mark.parametrize(
    ("page_size", "dims", "keys"),
    [
        (16, (64, 64), 800),
        (16, (64, 64), 801),
        (1, (96, 64), 801),
        (64, (128, 128), 801),
        (32, (192, 192), 803),
    ],
    ids=str,
)
def test_options_of_scores(page_size: int, dims: tuple[int, int], keys: int) -> None:
    """Options of scores are right, also where rows of a bias begin at addresses that are no multiples of 16 bytes."""
    rng = np.random.default_rng(0)
    call = paged((700, 130), page_size, rows=20, dims=dims)
    options: dict[str, Any] = {
        "bias": rng.standard_normal((2, 4, 20, keys)).astype(BFLOAT16),
        "mask": rng.random((2, 1, 20, 700)) < 0.8,
        "alibi_slopes": rng.random(4).astype(F32),
        "sink_logits": rng.standard_normal(4).astype(F32),
        "softcap": 5.0,
        "dropout_p": 0.2,
        "seed": 3,
        "window": (300, 2),
        "sink": 2,
    }
    arrays = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    inputs = [on_gpu(x) for x in call.inputs]
    for splits in (None, 1):  # by the kernel for few rows, and by Hopper's forward
        with only("sm90") if splits else nullcontext():
            out, lse = paged_attention(
                *inputs,
                **lengths_of(call, on_device=True),
                **arrays,
                num_splits=splits,
                return_lse=True,
            )
        verify(call, out.get(), lse.get(), **options)
