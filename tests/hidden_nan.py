"""NaN and infinities in keys and values that only some rows see: calls, and the check of their results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from rawattn import Gradients, ScoreMod, reference

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


def inputs_of_one_query(shapes: tuple[tuple[int, ...], ...], dtype: Any) -> Inputs:
    """Arrays in which one query of one head has a NaN."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    q[-1, q.shape[1] // 2, 1, 3] = np.nan
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


def hiding_in_backward(
    batch: int, heads: int, rows: int, keys: int, dtype: Any = BFLOAT16
) -> dict[str, dict[str, Any]]:
    """As `hiding`, and forms of a bias of this dtype and of a score function of which gradients are made in different ways."""
    rng = np.random.default_rng(6)
    bias = rng.standard_normal((batch, heads, rows, keys)).astype(dtype)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    by_row = rng.standard_normal(rows).astype(np.float32)
    return {
        **hiding(batch, heads, rows, keys),
        "bias-of-scores": {"bias": bias, "causal": True},
        "bias-of-sequences": {"bias": bias[:1]},
        "bias-of-heads": {"bias": bias[:1, :1], "window": (40, 30)},
        "bias-of-keys": {"bias": bias[:1, :, :1], "causal": True},
        "bias-of-rows": {
            "bias": np.where(np.isinf(bias), bias.dtype.type(1), bias)[:, :1, :, :1],
            "causal": True,
        },
        "captured": {"score_mod": ScoreMod("score * x[q_idx]", x=by_row, wrt="x"), "causal": True},
    }


def gradient_inputs(given: Inputs, where: str, **options: Any) -> tuple[np.ndarray, ...]:
    """dout, q, k, v, out and lse of a backward.

    where: whether NaN is in "keys" and values, or in "rows" of q and dout.
    """
    rng = np.random.default_rng(9)
    q, k, v = (x.copy() for x in given)
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    for array in (k, v):
        array[~np.isfinite(array)] = np.nan if where == "keys" else 0
    for n, array in enumerate((q, dout) if where == "rows" else ()):
        for head in range(0, q.shape[2], 2):
            array[n % len(q), int(rng.integers(q.shape[1] // 3)), head, 2 : 3 + 5 * head] = np.nan
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    return dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)


# By name: queries, keys, which array has NaN and at which row or key, and the options, with the shape of a bias. No query sees
# that key, or that row sees no key.
UNSEEN: dict[str, tuple[int, int, str, int, dict[str, Any]]] = {
    "value": (20, 300, "v", 150, {"window": (30, 0), "bias": (2, 20, 1)}),
    "value-by-key": (20, 300, "v", 150, {"window": (30, 0), "bias": (1, 2, 1, 300)}),
    "dout": (180, 64, "dout", 5, {"causal": True, "bias": (2, 1, 64)}),
}


def unseen_inputs(how: str) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """dout, q, k, v, out and lse of a backward of `UNSEEN`, and its options."""
    rng = np.random.default_rng(2)
    rows, keys, which, at, options = UNSEEN[how]
    options = {**options, "bias": rng.standard_normal(options["bias"]).astype(BFLOAT16)}
    shapes = {"dout": rows, "q": rows, "k": keys, "v": keys}
    arrays = {
        name: rng.standard_normal((1, n, 2, 64)).astype(BFLOAT16) for name, n in shapes.items()
    }
    arrays[which][0, at, 0] = np.nan
    out, lse = reference.attention(*list(arrays.values())[1:], **options, return_lse=True)
    return (*arrays.values(), out.astype(BFLOAT16), lse.astype(np.float32)), options


def dropped_inputs(dtype: Any) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """dout, q, k, v, out and lse of a backward with dropout, and its options. Row 5 alone sees the value that is infinite."""
    rng = np.random.default_rng(0)
    dout, q, k, v = (rng.standard_normal((1, 40, 1, 64)).astype(dtype) for _ in range(4))
    v[0, 5, 0, 0] = np.inf
    options = {"window": (0, 0), "dropout_p": 0.35, "seed": 1}
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    assert np.isinf(out[0, 5]).any(), "the seed drops it"
    return (dout, q, k, v, out.astype(dtype), lse.astype(np.float32)), options


def check_dropped(gradients: Gradients) -> None:
    """Check that the infinite value of `dropped_inputs` reaches only what sees it."""
    for name in ("dq", "dk", "dv"):
        finite = np.isfinite(getattr(gradients, name).astype(np.float64)).all(axis=-1)
        assert np.delete(finite[0, :, 0], 5).all(), name


def check_gradients(given: tuple[np.ndarray, ...], got: Gradients, **options: Any) -> None:
    """Check that gradients have NaN in the rows in which the reference's have some, and are right elsewhere.

    Elements of dbias are compared one by one.
    """
    exact = reference.attention_backward(*given, **options)
    wanted_by_name, found_by_name = (
        {k: x for k, x in (each._asdict() | (each.captured or {})).items() if k != "captured"}
        for each in (exact, got)
    )
    for name, wanted in wanted_by_name.items():
        ours = found_by_name[name]
        assert (wanted is None) == (ours is None), name
        if wanted is None:
            continue
        ours, nan, found = ours.astype(np.float64), np.isnan(wanted), np.isnan(ours)
        if name in ("dq", "dk", "dv"):
            nan, found = nan.any(axis=-1), found.any(axis=-1)
        if "dropout_p" in options:  # what is dropped may come to nothing instead
            assert not np.any(found & ~nan), name
        else:
            np.testing.assert_array_equal(found, nan, err_msg=name)
        assert name != ("dk" if np.isnan(given[0]).any() else "dq") or not nan.all(), name
        error = np.linalg.norm(ours[~nan] - wanted[~nan])
        # Terms of a bias of rows cancel: nothing but their errors is left.
        assert error <= 0.02 * np.linalg.norm(wanted[~nan]) + 1e-4, (name, error)
