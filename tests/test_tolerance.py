"""The tolerance checks accept good results and refuse all others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rawattn import reference
from tests.tolerance import check, check_lse, low_precision_attention

BFLOAT16 = ml_dtypes.bfloat16


def arrays(dtype: object) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((2, 70, 2, 16)).astype(dtype) for _ in "qkv")


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
def test_low_precision_attention_is_its_own_measure(dtype: object) -> None:
    q, k, v = arrays(dtype)
    exact, exact_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    (low, *_), (low_lse, *_) = orders = low_precision_attention(
        q, k, v, causal=True, return_lse=True
    )
    assert len(orders[0]) == len(orders[1]) == (4 if dtype is np.float32 else 1)
    assert low.dtype == dtype and low_lse.dtype == np.float32
    check(low, exact, (low,))
    check_lse(low_lse, exact_lse, (low_lse,))
    check(exact.astype(dtype), exact, (low,))
    # Rounding scores and probabilities costs something, but not much.
    error, epsilon = np.abs(low - exact).max(), float(ml_dtypes.finfo(dtype).eps)
    assert 0.1 * epsilon < error < 20 * epsilon


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32])
def test_errors_beyond_twice_are_refused(dtype: object) -> None:
    q, k, v = arrays(dtype)
    exact = reference.attention(q, k, v)
    (low, *_), _ = low_precision_attention(q, k, v)
    error = np.abs(low - exact).max()
    one = low.astype(np.float64)
    one[1, 3, 0, 5] = exact[1, 3, 0, 5] + 2.1 * error + 40 * float(ml_dtypes.finfo(dtype).eps)
    with pytest.raises(AssertionError, match=r"out: largest error .*first at \(1, 3, 0, 5\)"):
        check(one.astype(dtype), exact, (low,), what="out")
    # Every element is a little too large: the largest error alone would not show it.
    rms = np.sqrt(np.mean((low - exact) ** 2))
    with pytest.raises(AssertionError, match="root-mean-square error"):
        check((exact + 4 * rms).astype(np.float32), exact, (low,), floor=0.0)


def test_nan_and_infinity_are_refused() -> None:
    exact = np.array([1.0, -np.inf, 2.0])
    check(exact, exact, (exact,))
    for got in ([1.0, -np.inf, np.nan], [1.0, np.nan, 2.0], [1.0, 0.0, 2.0], [1.0, np.inf, 2.0],
                [1.0, -np.inf, np.inf], [-np.inf, -np.inf, 2.0]):  # fmt: skip
        with pytest.raises(AssertionError, match="NaN or infinity"):
            check(np.array(got), exact, (exact,))
    # Expected values that would accept any result are refused.
    with pytest.raises(AssertionError, match="the expected values hold NaN"):
        check(exact, np.array([1.0, -np.inf, np.nan]), (exact,))
    with pytest.raises(AssertionError, match="low precision overflows"):
        check(exact, exact, (np.array([1.0, -np.inf, np.inf]),))
    with pytest.raises(AssertionError, match="shapes differ"):
        check(exact[:2], exact, (exact,))


def test_floor_is_there_when_low_precision_is_lucky() -> None:
    exact = np.array([1.0, 3.0])
    off_by_half_an_ulp = exact.astype(np.float32) * (1 + 2.0**-9)
    check(off_by_half_an_ulp.astype(BFLOAT16), exact, (exact,))
    with pytest.raises(AssertionError, match="largest error"):
        check((exact * 1.02).astype(BFLOAT16), exact, (exact,))
    with pytest.raises(AssertionError, match="largest error"):  # the accuracy of TF32
        check((exact * (1 + 2.0**-11)).astype(np.float32), exact, (exact,))
    near_zero = np.array([1e-9, 2e-9])
    check_lse((near_zero + 1e-6).astype(np.float32), near_zero, (near_zero,))
    with pytest.raises(AssertionError, match="largest error"):
        check((near_zero + 1e-6).astype(np.float32), near_zero, (near_zero,))


def test_nothing_to_compare_passes() -> None:
    empty = np.zeros((0, 3))
    check(empty, empty, (empty,))
    check_lse(empty, empty, (empty,))
    hidden = np.full(3, -np.inf)
    check_lse(hidden, hidden, (hidden,))


def test_the_worst_of_several_evaluations_counts() -> None:
    exact = np.array([1.0, 3.0])
    close, far = exact + 1e-6, exact + 1e-3
    check(exact + 1.9e-3, exact, (close, far, close), floor=0.0)
    with pytest.raises(AssertionError, match="largest error"):
        check(exact + 2.1e-3, exact, (close, far, close), floor=0.0)
    with pytest.raises(AssertionError, match="the expected values hold NaN"):
        check(exact, exact, (close, np.array([1.0, np.nan])))
