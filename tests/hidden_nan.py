"""NaN and infinities in keys and values that only some rows see: calls, and the check of their results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from rawattn import ScoreMod, reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]


def hiding(batch: int, heads: int, rows: int, keys: int) -> dict[str, dict[str, Any]]:
    """What hides keys from some rows of a tile, and with it the other options of which a score is made."""
    rng = np.random.default_rng(5)
    keep = rng.random((batch, heads, rows, keys)) < 0.7
    bias = rng.standard_normal((1, heads, rows, keys)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    slopes = (0.02 * np.arange(1, heads + 1)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    return {
        "causal": {"causal": True},
        "window": {"window": (20, 9), "sink": 3},
        "top-left": {"causal": True, "align": "top-left", "sink_logits": sinks},
        "mask": {"mask": keep},
        "mask-of-rows": {"mask": keep[:1, :1], "causal": True, "alibi_slopes": slopes},
        "mask-of-keys": {"mask": keep[:, :1, :1], "causal": True},
        "bias": {"bias": bias},
        "bias-of-both": {"bias": bias[:, :1], "causal": True, "softcap": 3.0},
        "score_mod": {"score_mod": ScoreMod("where((q_idx + kv_idx) % 3 == 1, -inf, score)")},
        "line": {"score_mod": ScoreMod("score + 0.1 * (kv_idx - q_idx)"), "causal": True},
        "dropout": {"dropout_p": 0.3, "seed": 11, "window": (None, 4)},
    }


def inputs(shapes: tuple[tuple[int, ...], ...], dtype: Any) -> Inputs:
    """Arrays of which a key has a NaN and some values have a NaN or an infinity, in one column or in all.

    One or two in each head of each sequence, where causal rows and windows end or begin: some rows of the head see it.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    batch, keys, heads, _ = k.shape
    of_diagonal = min(q.shape[1], keys) // 2
    places = [
        (v, keys - 1),
        (k, keys - 2),
        (v, of_diagonal),
        (v, keys - 23),
        (v, keys - 3),
        (v, keys // 2),
    ]
    for n, (array, key) in enumerate(places):
        columns = slice(None) if n == 2 else slice(3, 4)
        array[n % batch, key, n // batch % heads, columns] = np.inf if n == 4 else np.nan
    return q, k, v


def check(given: Inputs, out: np.ndarray, lse: np.ndarray, **options: Any) -> None:
    """Check that results are NaN or infinite where the reference's are, and right elsewhere."""
    exact, exact_lse = reference.attention(*given, **options, return_lse=True)
    numbers = np.isfinite(exact)
    rows = numbers.all(axis=-1)
    assert (rows.any(axis=1) & ~rows.all(axis=1)).any(), "no head has rows of both kinds"
    np.testing.assert_array_equal(np.isfinite(out.astype(np.float64)), numbers)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(exact_lse))
    error = np.abs(out.astype(np.float64)[numbers] - exact[numbers]).max()
    assert error <= (2e-5 if given[0].dtype == np.float32 else 0.03), error
    known = np.isfinite(exact_lse)
    np.testing.assert_allclose(lse[known], exact_lse[known], atol=1e-2)
