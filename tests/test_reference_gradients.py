"""The reference's gradients against finite differences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn import reference
from tests import exhaustive
from tests.reference_rules import (
    GROUPED,
    SQUARED,
    TILTED,
    Options,
    arrays_of,
    draw,
    outside,
)


def check_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options, *, with_dlse: bool = True
) -> Any:
    """Checks gradients against directional derivatives of <dout, out> + <dlse, lse>, for every input that has one."""
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    dout = draw(*out.shape, seed=7)
    dlse = draw(*lse.shape, seed=8) if with_dlse else None
    gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)

    def loss(**changed: np.ndarray) -> float:
        arrays = [changed.pop(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
        out, lse = reference.attention(*arrays, **{**options, **changed}, return_lse=True)
        total = float((dout * out).sum())
        if dlse is not None:
            total += float((dlse * np.where(np.isfinite(lse), lse, 0)).sum())
        return total

    inputs = {"q": q, "k": k, "v": v}
    for name in ("bias", "sink_logits"):
        gradient = getattr(gradients, f"d{name}")
        assert (gradient is None) == (name not in options)
        if name in options:
            inputs[name] = options[name]
    step = 1e-5
    for name, x in inputs.items():
        gradient = getattr(gradients, f"d{name}")
        assert gradient.shape == x.shape and gradient.dtype == np.float64
        for trial in range(4):
            direction = draw(*x.shape, seed=20 + trial)
            ahead, back = (
                loss(**{name: np.asarray(x + sign * step * direction)}) for sign in (1, -1)
            )
            measured = (ahead - back) / (2 * step)
            assert measured == pytest.approx((gradient * direction).sum(), rel=1e-7, abs=1e-8), name
    return gradients


EVERYTHING: Options = {
    "window": (3, 1), "sink": 1, "scale": -0.7, "bias": draw(2, 2, 5, 7),
    "mask": draw(1, 4, 5, 7) > -1, "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4]), "softcap": 1.5,
    "score_mod": SQUARED, "sink_logits": draw(4), "dropout_p": 0.4, "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize("with_dlse", [True, False], ids=["dlse", ""])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "align": "top-left"},
        {"window": (1, 1), "sink": 2},
        {"scale": 0.0},
        {"scale": -1.3},
        {"softcap": 0.8},
        {"score_mod": TILTED},
        {"score_mod": SQUARED, "softcap": 2.0},
        {"bias": draw(2, 4, 5, 7)},
        {"mask": draw(2, 1, 5, 7) > 0},
        {"alibi_slopes": draw(2, 4)},
        {"sink_logits": draw(4)},
        {"dropout_p": 0.5, "seed": 1},
        {"dropout_p": 0.5, "seed": 1, "bias": draw(7), "sink_logits": draw(4)},
        EVERYTHING,
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_finite_differences(options, with_dlse) -> None:
    check_gradients(*arrays_of(), options, with_dlse=with_dlse)


def test_finite_differences_with_more_rows_than_keys() -> None:
    q, k, v = arrays_of(rows=7, keys=4)
    gradients = check_gradients(q, k, v, {"causal": True})
    assert not gradients.dq[:, :3].any()
    gradients = check_gradients(q, k, v, {"causal": True, "sink_logits": draw(4)})
    assert not gradients.dq[:, :3].any()


def test_finite_differences_in_group_mode() -> None:
    q, k, v = draw(16, 4, 3), draw(25, 2, 3, seed=1), draw(25, 2, 6, seed=2)
    options = dict(EVERYTHING, seqs=GROUPED, bias=draw(4, 2, 6, 9), mask=draw(1, 4, 5, 8) > -1)
    gradients = check_gradients(q, k, v, options)
    assert not outside(GROUPED, "k", gradients.dk).any()
    # No sequence has more than 5 rows or 7 keys.
    assert not gradients.dbias[:, :, 5:].any() and not gradients.dbias[..., 7:].any()


BIAS_SHAPES = [
    *itertools.product((1, 2), (1, 2, 4), (1, 5), (1, 7)),
    (4, 5, 7), (2, 1, 7), (5, 7), (1, 7), (5, 1), (7,), (1,), (),
]  # fmt: skip


@pytest.mark.parametrize("shape", exhaustive.thin(zip(BIAS_SHAPES), 3), ids=str)
def test_bias_of_every_shape(shape) -> None:
    q, k, v = arrays_of()
    bias = np.asarray(draw(*shape))
    options: Options = {"bias": bias, "causal": True, "dropout_p": 0.2, "seed": 9}
    gradients = check_gradients(q, k, v, options)
    full = np.broadcast_to(bias, np.broadcast_shapes(shape, (2, 1, 5, 7)))
    if full.shape[1] == 2:
        full = np.repeat(full, 2, axis=1)
    full = np.broadcast_to(full, (2, 4, 5, 7)).copy()
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    expected = reference.attention(q, k, v, **dict(options, bias=full), return_lse=True)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])

    # A mask of this shape gives the same result as a bias of -inf where the mask is False.
    mask = np.asarray(bias > -0.3)
    np.testing.assert_array_equal(
        reference.attention(q, k, v, mask=mask),
        reference.attention(q, k, v, bias=np.where(mask, 0.0, -np.inf)),
    )
    assert gradients.dbias.shape == shape


def test_dbias_is_the_sum_over_broadcast_axes() -> None:
    q, k, v = arrays_of()
    out, lse = reference.attention(q, k, v, bias=np.zeros((2, 4, 5, 7)), return_lse=True)
    dout = draw(*out.shape, seed=7)

    def dbias(shape: tuple[int, ...]) -> np.ndarray:
        return reference.attention_backward(dout, q, k, v, out, lse, bias=np.zeros(shape)).dbias

    full = dbias((2, 4, 5, 7))
    np.testing.assert_allclose(dbias((1, 1, 1, 7)), full.sum(axis=(0, 1, 2), keepdims=True))
    np.testing.assert_allclose(dbias((2, 1, 5, 1)), full.sum(axis=(1, 3), keepdims=True))
    by_group = full.reshape(2, 2, 2, 5, 7).sum(axis=2)
    np.testing.assert_allclose(dbias((2, 2, 5, 7)), by_group)
    np.testing.assert_allclose(dbias(()), full.sum(), atol=1e-12)


def test_dbias_only_where_wanted() -> None:
    q, k, v = arrays_of()
    bias = draw(5, 7)
    out, lse = reference.attention(q, k, v, bias=bias, return_lse=True)

    def backward(**options: Any) -> Any:
        return reference.attention_backward(out, q, k, v, out, lse, **options)

    assert backward(bias=bias).dbias is not None
    assert backward(bias=bias, want_dbias=True, deterministic=True).dbias is not None
    assert backward(bias=bias, want_dbias=False).dbias is None
    assert backward().dbias is None and backward().dsink_logits is None
    with pytest.raises(ValueError, match=r"^want_dbias"):
        backward(want_dbias=True)


def test_gradients_of_part_of_the_keys() -> None:
    """The gradients of two halves of the keys, with the out and lse of all keys, add up to the whole gradients."""
    q, k, v = arrays_of()
    out, lse = reference.attention(q, k, v, return_lse=True)
    dout = draw(*out.shape, seed=7)
    whole = reference.attention_backward(dout, q, k, v, out, lse)
    first, second = (
        reference.attention_backward(dout, q, k[:, part], v[:, part], out, lse)
        for part in (np.s_[:3], np.s_[3:])
    )
    np.testing.assert_allclose(first.dq + second.dq, whole.dq)
    np.testing.assert_allclose(np.concatenate([first.dk, second.dk], axis=1), whole.dk)
    np.testing.assert_allclose(np.concatenate([first.dv, second.dv], axis=1), whole.dv)


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    q, k, v = arrays_of(rows=7, keys=4)
    sinks = np.array([-np.inf, 0.3, -np.inf, 0.2])
    out, lse = reference.attention(q, k, v, causal=True, sink_logits=sinks, return_lse=True)
    gradients = reference.attention_backward(
        draw(*out.shape), q, k, v, out, lse, causal=True, sink_logits=sinks
    )
    assert np.all(gradients.dsink_logits[[0, 2]] == 0) and np.all(gradients.dsink_logits[[1, 3]])
    assert np.isfinite(gradients.dq).all() and np.all(lse[:, 0, :3] == -np.inf)


@pytest.mark.parametrize("name", ["q", "k"])
def test_nan_of_a_row_reaches_no_key_that_the_row_does_not_see(name) -> None:
    arrays = dict(zip("qkv", arrays_of(), strict=True))
    arrays[name][:, 3] = np.nan
    options: Options = {"window": (1, 1), "align": "top-left"}
    out, lse = reference.attention(**arrays, **options, return_lse=True)
    gradients = reference.attention_backward(
        np.ones_like(out), **arrays, out=out, lse=lse, **options
    )
    # Row i sees keys i - 1 to i + 1, of 7. Rows 2 to 4 see a key of NaN.
    for gradient in (gradients.dk, gradients.dv):
        reached = np.isnan(gradient).any(axis=(0, 2, 3))
        expected = [False, False, True, True, True, False, False]
        if name == "k":
            expected[1] = expected[5] = True
        assert reached.tolist() == expected
