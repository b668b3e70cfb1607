"""NaN in keys and values reaches only rows that see them (attn/row_alone.cuh)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import paged_attention
from rawattn._kernels.selection import only
from tests import hidden_nan
from tests.gpu.pages import on_gpu

cupy = pytest.importorskip("cupy")

HIDING = hidden_nan.hiding(2, 4, 300, 420)


def moved(options: dict[str, Any]) -> dict[str, Any]:
    return {name: on_gpu(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def attend(given: hidden_nan.Inputs, family: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    with only(family):
        out, lse = rawattn.attention(*map(on_gpu, given), **moved(options), return_lse=True)
    return out.get(), lse.get()


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("family", ["sm90", "portable"])
def test_many_rows(family: str, headdim: int, how: str) -> None:
    shapes = ((2, 300, 4, headdim), (2, 420, 2, headdim), (2, 420, 2, headdim))
    given = hidden_nan.inputs(shapes, hidden_nan.BFLOAT16)
    hidden_nan.check(given, *attend(given, family, **HIDING[how]), **HIDING[how])


@pytest.mark.parametrize("how", HIDING)
def test_float32(how: str) -> None:
    given = hidden_nan.inputs(((2, 300, 4, 40), (2, 420, 2, 40), (2, 420, 2, 72)), np.float32)
    hidden_nan.check(given, *attend(given, "portable", **HIDING[how]), **HIDING[how])


FEW = hidden_nan.hiding(2, 8, 5, 3000)


@pytest.mark.parametrize("how", [how for how in FEW if how != "dropout"])
@pytest.mark.parametrize("headdim", [64, 96, 256])
def test_few_rows_on_many_keys(headdim: int, how: str) -> None:
    """Few rows, whose keys are shared out: parts of NaN are merged."""
    shapes = ((2, 5, 8, headdim), (2, 3000, 2, headdim), (2, 3000, 2, headdim))
    given = hidden_nan.inputs(shapes, hidden_nan.BFLOAT16)
    for family in ("decode", "sm90", "portable"):
        hidden_nan.check(given, *attend(given, family, **FEW[how]), **FEW[how])


@pytest.mark.parametrize("page_size", [16, 24])
@pytest.mark.parametrize("rows", [4, 200])
@pytest.mark.parametrize("how", [{"causal": True}, {"window": (40, 0), "sink": 4}], ids=str)
def test_pages(rows: int, page_size: int, how: dict[str, Any]) -> None:
    keys = 20 * page_size
    given = hidden_nan.inputs(((2, rows, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64)), np.float16)
    pools = [x.reshape(40, page_size, 2, 64) for x in given[1:]]
    out, lse = paged_attention(
        *map(on_gpu, (given[0], *pools)), on_gpu(np.arange(40, dtype=np.int32).reshape(2, 20)),
        seqlen_k=on_gpu(np.full(2, keys, np.int32)), return_lse=True, **how,
    )  # fmt: skip
    hidden_nan.check(given, out.get(), lse.get(), **how)
