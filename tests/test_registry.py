"""Which family of kernels a call takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rawattn._call.problem import describe
from rawattn._kernels import registry
from rawattn._kernels.operands import Operands
from rawattn._kernels.target import without_device

H200 = replace(without_device("sm_90a"), multiprocessors=132)


@pytest.mark.parametrize(
    ("rows", "keys", "batch", "heads", "dtype", "family"),
    [
        (1, 8192, 1, (32, 8), "float16", "decode"),
        (1, 1024, 64, (32, 32), "float16", "decode"),
        (4, 2048, 64, (32, 8), "float16", "decode"),
        (5, 2048, 64, (32, 8), "float16", "sm90"),  # 20 rows share keys
        (1, 1023, 64, (32, 8), "float16", "sm90"),
        (16, 8192, 1, (64, 8), "float16", "decode"),  # 8 tiles for 132 multiprocessors
        (17, 8192, 1, (64, 8), "float16", "sm90"),
        (16, 8192, 8, (64, 8), "float16", "sm90"),
        (16, 128, 1, (64, 8), "float32", "decode"),
        (64, 128, 1, (64, 8), "float32", "portable"),
    ],
)
def test_few_rows_on_many_keys_are_decoded(
    rows: int, keys: int, batch: int, heads: tuple[int, int], dtype: str, family: str
) -> None:
    def array(seqlen: int, nheads: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), (batch, seqlen, nheads, 128))

    q, k = array(rows, heads[0]), array(keys, heads[1])
    problem, _ = describe(q, k, k, causal=True)
    assert registry.choose("attention", problem, H200, Operands()).name == family
