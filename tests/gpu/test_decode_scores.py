"""Few rows on many keys with options that change scores, by decoding's kernels and by those that calls choose."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import reference
from rawattn._kernels.selection import only
from tests.exhaustive import thin
from tests.gpu.pages import F16, F32, check_pages
from tests.gpu.test_masks import on_gpu
from tests.paged import BFLOAT16, paged
from tests.tolerance import check, check_lse, low_precision_attention

cupy = pytest.importorskip("cupy")

BATCH, KEYS = 2, 1501
SHAPES = [
    (1, (8, 2), 128, BFLOAT16),
    (1, (4, 4), 64, F16),
    (1, (34, 1), 96, BFLOAT16),
    (3, (6, 1), 80, F16),
    (16, (4, 2), 64, BFLOAT16),
    (9, (4, 2), 256, F16),
    (2, (6, 2), 40, F32),
]
NAMES = ("bias", "bias-of-keys", "bias-32", "alibi", "line", "text", "softcap", "together")


def options_of(name: str, rows: int, heads: int, dtype: Any, xp: Any = np) -> dict[str, Any]:
    """Options as NumPy arrays, except that the arrays captured by score functions are made by `xp`."""
    rng = np.random.default_rng([rows, heads, NAMES.index(name)])
    slopes = np.linspace(-0.1, 0.3, heads, dtype=F32)
    if name == "bias":
        return {"bias": rng.standard_normal((BATCH, heads, rows, KEYS + 1)).astype(dtype)[..., :-1]}
    if name == "bias-of-keys":
        bias = rng.standard_normal((BATCH, 1, 1, KEYS)).astype(dtype)
        bias[..., 300:900] = -np.inf
        return {"bias": bias}
    if name == "bias-32":
        return {"bias": rng.standard_normal((1, heads, rows, KEYS)).astype(F32)}
    if name == "alibi":
        return {"alibi_slopes": slopes}
    if name == "line":
        mod = rawattn.ScoreMod(
            "score + slope[head] * (kv_idx - 2 * q_idx)", slope=xp.asarray(slopes)
        )
        return {"score_mod": mod}
    if name == "text":
        text = (
            "where(kv_idx % 5 == head % 5, score * slope[head], score - 0.01 * abs(q_idx - kv_idx))"
        )
        return {"score_mod": rawattn.ScoreMod(text, slope=xp.asarray(slopes))}
    if name == "softcap":
        return {"softcap": 3.0}
    found: dict[str, Any] = {"mask": rng.random((BATCH, heads, rows, KEYS)) < 0.8}
    for each in ("bias", "alibi", "text", "softcap"):
        found |= options_of(each, rows, heads, dtype, xp)
    return found | {"sink_logits": slopes}


def put(options: dict[str, Any]) -> dict[str, Any]:
    return {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


@pytest.mark.parametrize(
    ("name", "shape", "family"),
    thin(itertools.product(NAMES, SHAPES, ("decode", None)), 2),
    ids=str,
)
def test_rows(name: str, shape: tuple[int, tuple[int, int], int, Any], family: str | None) -> None:
    rows, heads, headdim, dtype = shape
    rng = np.random.default_rng(1)
    shapes = ((BATCH, rows, heads[0], headdim), *[(BATCH, KEYS, heads[1], headdim)] * 2)
    q, k, v = (rng.standard_normal(each).astype(dtype) for each in shapes)
    options, theirs = (
        options_of(name, rows, heads[0], dtype, xp) | {"causal": rows > 1} for xp in (np, cupy)
    )
    exact, exact_lse = reference.attention(q, k, v, **options, return_lse=True)
    low, low_lse = low_precision_attention(q, k, v, **options)
    with only(family) if family else nullcontext():
        out, lse = rawattn.attention(*on_gpu(q, k, v), **put(theirs), return_lse=True)
    check(out.get(), exact, tuple(low), what="out")
    check_lse(lse.get(), exact_lse, tuple(low_lse))


@pytest.mark.parametrize("name", ["bias", "bias-of-keys", "alibi", "text"])
@pytest.mark.parametrize("page_size", [16, 7])
def test_pages(name: str, page_size: int) -> None:
    """Pages are right both where TMA boxes fetch them and where they are copied row by row."""
    call = paged((KEYS, 70), page_size, rows=3, heads=(6, 2), dims=(128, 128))
    mod = rawattn.ScoreMod(
        "where(kv_idx % 5 == head % 5, -inf, score - 0.01 * head * (q_idx - kv_idx))"
    )
    options = {"score_mod": mod} if name == "text" else options_of(name, 3, 6, BFLOAT16)
    check_pages(call, **options)


@pytest.mark.parametrize("lens", [(300, 20, 0, 255, 31), (4000, 20, 0, 255, 31), (90,)], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (35, 7)], ids=str)
def test_short_sequences(lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    """Short sequences are right where each has its own block, and beside a long sequence."""
    for rows in (1, 3):
        check_pages(paged(lens, 16, rows=rows, heads=heads, dims=(64, 64)), causal=True)
