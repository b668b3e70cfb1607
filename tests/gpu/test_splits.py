"""`num_splits` on the GPU: any number of pieces, the same bits, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._kernels.selection import only
from tests.cases import Case, dense, padded, ragged
from tests.frameworks import CuPy
from tests.gpu.pages import check_pages
from tests.paged import paged
from tests.verify import verify

cupy = pytest.importorskip("cupy")

HEADS: dict[str, Any] = {"nheads_q": 6, "nheads_kv": 2}
LENS = (40, 0, 3, 129), (30, 9, 5000, 700)
CASES = [
    dense("few-queries", 2, 3, 9000, **HEADS, headdim=128),
    dense("causal", 2, 300, 2100, **HEADS, headdim=64, causal=True, give_out=True, layout="gaps"),
    dense("window", 1, 200, 5000, **HEADS, headdim=96, window=(900, 0), sink=5),
    dense("d256", 1, 20, 3000, **HEADS, headdim=256, sink_logits="normal"),
    dense("odd", 1, 20, 3000, **HEADS, headdim=33, headdim_v=70, softcap=3.0),
    ragged("ragged", *LENS, **HEADS, headdim=128, causal=True, on_device=True),
    ragged("ragged-host", *LENS, **HEADS, headdim=64, tail=9),
    padded("padded", *LENS, 130, 5000, **HEADS, headdim=64, on_device=True, dropout_p=0.2),
    dense("no-keys", 2, 9, 0, **HEADS),
]  # fmt: skip


@pytest.mark.parametrize("family", ["decode", "portable"])
@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number(case: Case, dtype: str, num_splits: int | None, family: str) -> None:
    with only(family):
        verify(replace(case, dtype=dtype, num_splits=num_splits), CuPy())


def test_a_request_is_followed_on_every_gpu() -> None:
    """A given number of pieces is used without forcing a family of kernels."""
    for num_splits in (1, 5):
        verify(replace(CASES[0], num_splits=num_splits), CuPy())


@pytest.mark.parametrize("family", ["decode", "portable"])
@pytest.mark.parametrize("num_splits", [None, 3, 64])
def test_the_same_bits_in_every_run_and_replay(num_splits: int | None, family: str) -> None:
    """Blocks arrive in another order in each run, but the bits are the same, and the counters return to zero each time."""
    rng = cupy.random.default_rng(0)
    q = rng.standard_normal((2, 5, 8, 64), dtype=np.float32).astype(np.float16)
    k, v = rng.standard_normal((2, 2, 20000, 2, 64), dtype=np.float32).astype(np.float16)

    def run() -> Any:
        return rawattn.attention(q, k, v, num_splits=num_splits, return_lse=True)

    with only(family), cupy.cuda.Stream(non_blocking=True) as stream:
        first = [x.get() for x in run()]
        for _ in range(20):
            for got, wanted in zip(run(), first, strict=True):
                np.testing.assert_array_equal(got.get(), wanted)
        stream.begin_capture()
        results = run()
        graph = stream.end_capture()
        for _ in range(20):
            graph.launch(stream)
        stream.synchronize()
        for got, wanted in zip(results, first, strict=True):
            np.testing.assert_array_equal(got.get(), wanted)


@pytest.mark.parametrize("page_size", [16, 24])
def test_one_long_sequence_among_short_ones(page_size: int) -> None:
    lens = (20000, *(9 * n for n in range(20)))
    check_pages(paged(lens, page_size, rows=1, heads=(8, 2), dims=(128, 128)))
