"""The reference against definitions written out pair by pair, and the mistakes it refuses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import ScoreMod, SeqLayout, _philox, reference
from tests.reference_rules import (
    GROUPED,
    TILTED,
    arrays_of,
    by_definition,
    draw,
    visible_by_rule,
)


def visible_in_reference(seqlen_q: int, seqlen_k: int, **options: Any) -> np.ndarray:
    """Which keys each row sees. With equal scores and v the identity, out is 1 / (number of visible keys) at visible keys."""
    q, k = np.zeros((1, seqlen_q, 1, 1)), np.zeros((1, seqlen_k, 1, 1))
    v = np.eye(seqlen_k).reshape(1, seqlen_k, 1, seqlen_k)
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    seen = out[0, :, 0] > 0
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(seen.sum(axis=1)))
    return seen


def test_what_a_star_import_brings() -> None:
    names: dict[str, Any] = {}
    exec("from rawattn.reference import *", names)
    functions = {"attention", "attention_backward", "paged_attention", "append_kv", "combine"}
    assert names.keys() - {"__builtins__"} == functions


@pytest.mark.parametrize(
    ("size", "align", "window", "sink", "counts"),
    [
        ((8, 8), "top-left", (2, 0), 2, [1, 2, 3, 4, 5, 5, 5, 5]),
        ((5, 8), "top-left", (0, 3), 2, [4, 5, 6, 6, 6]),
        ((5, 8), "bottom-right", (1, 0), 2, [4, 4, 4, 4, 4]),
        ((6, 6), "bottom-right", (2, 0), 2, [1, 2, 3, 4, 5, 5]),
        # More queries than keys: late rows see the sinks too.
        ((16, 8), "bottom-right", (1, 0), 2, [0] * 8 + [1, 2, 3] + [4] * 5),
        ((3, 5), "bottom-right", (None, 0), 0, [3, 4, 5]),
        ((3, 5), "top-left", (None, 0), 0, [1, 2, 3]),
        ((5, 3), "bottom-right", (None, 0), 0, [0, 0, 1, 2, 3]),
        ((5, 3), "top-left", (None, 0), 0, [1, 2, 3, 3, 3]),
    ],
)
def test_number_of_visible_keys(size, align, window, sink, counts) -> None:
    seen = visible_in_reference(*size, align=align, window=window, sink=sink)
    assert seen.sum(axis=1).tolist() == counts


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("size", [(1, 1), (1, 6), (6, 1), (5, 5), (4, 7), (7, 4)])
def test_visible_is_the_rule(size, align) -> None:
    ends = (None, 0, 1, 3, 9)
    for left, right, sink, causal in itertools.product(ends, ends, (0, 1, 3, 9), (False, True)):
        expected = visible_by_rule(
            *size, left=left, right=0 if causal else right, sink=sink, align=align
        )
        seen = visible_in_reference(
            *size, window=(left, right), sink=sink, causal=causal, align=align
        )
        np.testing.assert_array_equal(seen, expected, err_msg=f"{left} {right} {sink} {causal}")


def test_every_score_option_in_its_order() -> None:
    q, k, v = draw(1, 5, 4, 3), draw(1, 7, 2, 3, seed=1), draw(1, 7, 2, 6, seed=2)
    bias, slopes, mask = draw(1, 2, 5, 7), np.array([0.5, 0.25, 0.1, 0.0]), draw(1, 4, 5, 7) > -1
    seed, p = 11, 0.4

    def score(s: float, h: int, i: int, j: int) -> float | None:
        s = 3 * math.tanh(0.7 * s / 3)
        s = s * (1 + 0.1 * h) + 0.01 * i * j
        s += bias[0, h // 2, i, j] - slopes[h] * abs(i + 2 - j)
        hidden = j > i + 2 + 1 or (j < i + 2 - 1 and j >= 1) or not mask[0, h, i, j]
        return None if hidden else s

    def keep(h: int, i: int, j: int) -> float:
        return float(_philox.kept(seed, p, 0, h, [i], [j])[0, 0]) / (1 - p)

    out, lse = reference.attention(
        q, k, v, window=(1, 1), sink=1, scale=0.7, bias=bias, mask=mask, alibi_slopes=slopes,
        softcap=3.0, score_mod=TILTED, dropout_p=p, seed=seed, return_lse=True,
    )  # fmt: skip
    expected, expected_lse = by_definition(q[0], k[0], v[0], score, keep)
    np.testing.assert_allclose(out[0], expected, rtol=1e-12)
    np.testing.assert_allclose(lse[0], expected_lse, rtol=1e-12)
    assert out.dtype == lse.dtype == np.float64


def test_default_scale_and_scale_of_zero() -> None:
    q, k, v = draw(1, 3, 1, 16), draw(1, 4, 1, 16, seed=1), draw(1, 4, 1, 2, seed=2)
    out, lse = reference.attention(q, k, v, return_lse=True)
    expected, expected_lse = by_definition(q[0], k[0], v[0], lambda s, *_: s / 4)
    np.testing.assert_allclose(out[0], expected, rtol=1e-12)
    np.testing.assert_allclose(lse[0], expected_lse, rtol=1e-12)
    out, lse = reference.attention(q, k, v, scale=0.0, return_lse=True)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=1, keepdims=True), out.shape))
    np.testing.assert_allclose(lse, np.full(lse.shape, math.log(4)))


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 2, 1, 1), 1000.0)
    k = np.array([1.0, 2.0]).reshape(1, 2, 1, 1)
    out, lse = reference.attention(q, k, k, scale=1.0, return_lse=True)
    np.testing.assert_allclose(out, 2.0)
    np.testing.assert_allclose(lse, 2000.0)


def test_alibi_slopes_of_every_sequence() -> None:
    q, k, v = draw(2, 3, 2, 4), draw(2, 5, 2, 4, seed=1), draw(2, 5, 2, 4, seed=2)
    slopes = np.array([[0.5, 0.25], [0.1, 2.0]])
    for align, offset in (("bottom-right", 2), ("top-left", 0)):
        out = reference.attention(q, k, v, alibi_slopes=slopes, align=align)
        for b in range(2):

            def score(s: float, h: int, i: int, j: int, b: int = b, offset: int = offset) -> float:
                return s / 2 - slopes[b, h] * abs(i + offset - j)

            np.testing.assert_allclose(out[b], by_definition(q[b], k[b], v[b], score)[0])


def test_sink_logit_joins_the_denominator() -> None:
    q, k, v = draw(1, 3, 2, 4), draw(1, 5, 2, 4, seed=1), draw(1, 5, 2, 4, seed=2)
    sinks = np.array([0.7, -np.inf])
    plain, plain_lse = reference.attention(q, k, v, return_lse=True)
    out, lse = reference.attention(q, k, v, sink_logits=sinks, return_lse=True)
    np.testing.assert_allclose(lse, np.logaddexp(plain_lse, sinks[None, :, None]))
    share = np.exp(plain_lse - lse).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(out, plain * share)


def test_rows_that_see_no_key() -> None:
    q, k, v = draw(1, 5, 2, 4), draw(1, 3, 2, 4, seed=1), draw(1, 3, 2, 4, seed=2)
    sinks = np.array([0.7, -1.0])
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    assert not out[0, :2].any() and np.all(lse[0, :, :2] == -np.inf)
    assert np.all(out[0, 2:] != 0) and np.isfinite(lse[0, :, 2:]).all()
    out, lse = reference.attention(q, k, v, causal=True, sink_logits=sinks, return_lse=True)
    assert not out[0, :2].any()
    np.testing.assert_array_equal(lse[0, :, :2], np.repeat(sinks[:, None], 2, axis=1))


def test_infinitely_low_bias_is_a_mask() -> None:
    q, k, v = draw(1, 4, 2, 3), draw(1, 6, 2, 3, seed=1), draw(1, 6, 2, 3, seed=2)
    mask = draw(4, 6) > 0
    mask[1] = mask[:, 5] = False
    v[:, 5] = np.nan
    bias = np.where(mask, 0.0, -np.inf)
    for a, b in zip(
        reference.attention(q, k, v, mask=mask, return_lse=True),
        reference.attention(q, k, v, bias=bias, return_lse=True),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    out, lse = reference.attention(q, k, v, bias=bias, return_lse=True)
    gradients = reference.attention_backward(draw(*out.shape), q, k, v, out, lse, bias=bias)
    assert np.isfinite(gradients.dq).all() and np.isfinite(gradients.dk).all()
    assert not gradients.dbias[~mask].any() and gradients.dbias[mask].any()
    assert not gradients.dq[0, 1].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_inputs_are_read_exactly(dtype) -> None:
    q, k, v = (draw(2, 3, 2, 4, seed=n).astype(dtype) for n in range(3))
    wide = (x.astype(np.float64) for x in (q, k, v))
    for x in (q, k, v):
        x.flags.writeable = False
    narrow = reference.attention(q, k, v, causal=True)
    assert narrow.dtype == np.float64
    np.testing.assert_array_equal(narrow, reference.attention(*wide, causal=True))


@pytest.mark.frameworks
def test_arrays_of_other_frameworks() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (draw(1, 3, 2, 4, seed=n).astype(np.float32) for n in range(3))
    bias = draw(3, 3).astype(np.float32)
    expected = reference.attention(q, k, v, bias=bias)
    tensors = (torch.from_numpy(x).requires_grad_() for x in (q, k, v))
    got = reference.attention(*tensors, bias=torch.from_numpy(bias))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"q": np.ones((2, 5, 4, 3), np.int32)}, TypeError, "q: got int32"),
        ({"q": "q"}, TypeError, "q"),
        ({"q": draw(2, 5, 3, 3)}, ValueError, "q: .*multiple"),
        ({"k": draw(2, 7, 2, 4)}, ValueError, "k: "),
        ({"align": "left"}, ValueError, "align"),
        ({"window": (-1, 2)}, ValueError, "window"),
        ({"sink": -1}, ValueError, "sink"),
        ({"scale": math.nan}, ValueError, "scale"),
        ({"softcap": 0.0}, ValueError, "softcap"),
        ({"softcap": math.inf}, ValueError, "softcap"),
        ({"dropout_p": 1.0, "seed": 1}, ValueError, "dropout_p"),
        ({"dropout_p": 0.5}, ValueError, "seed: got None"),
        ({"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed"),
        ({"dropout_p": 0.5, "seed": np.array([1, 2])}, ValueError, "seed: got shape"),
        ({"bias": np.ones((5, 7), bool)}, TypeError, "bias: got dtype bool"),
        ({"bias": draw(5, 6)}, ValueError, r"bias: got shape \(5, 6\)"),
        ({"bias": draw(3, 1, 5, 7)}, ValueError, "bias"),
        ({"bias": draw(1, 3, 5, 7)}, ValueError, "bias: .*nheads_kv"),
        ({"bias": draw(1, 1, 1, 5, 7)}, ValueError, "bias: .*four axes"),
        ({"mask": draw(5, 7)}, TypeError, "mask: got dtype float64"),
        ({"mask": np.ones((5, 8), bool)}, ValueError, "mask"),
        ({"alibi_slopes": draw(2)}, ValueError, "alibi_slopes"),
        ({"sink_logits": draw(2)}, ValueError, "sink_logits"),
        ({"score_mod": "score * 2"}, TypeError, r"score_mod: got 'score \* 2' .*rawattn.ScoreMod"),
        (
            {"score_mod": ScoreMod("score *= 2;", language="cuda")},
            NotImplementedError,
            "score_mod: .*expression dialect",
        ),
        ({"num_splits": 0}, ValueError, "num_splits"),
        ({"seqs": [1, 2]}, TypeError, "seqs"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_mistakes_are_refused(change, error, says) -> None:
    call = dict(zip("qkv", arrays_of(), strict=True), **change)
    with pytest.raises(error, match=f"^{says}"):
        reference.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_short_bias_in_group_mode_is_refused() -> None:
    q, k, v = draw(16, 4, 3), draw(25, 2, 3), draw(25, 2, 3)
    for shape in ((4, 7), (5, 6), (1, 6)):
        with pytest.raises(ValueError, match=r"^bias: .*longest sequence"):
            reference.attention(q, k, v, seqs=GROUPED, bias=draw(*shape))


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_backward_refuses_wrong_shapes(name) -> None:
    q, k, v = arrays_of()
    out, lse = reference.attention(q, k, v, return_lse=True)
    arrays = {"dout": out, "out": out, "lse": lse, "dlse": lse}
    arrays[name] = arrays[name][:, 1:]
    with pytest.raises(ValueError, match=f"^{name}: got shape"):
        reference.attention_backward(
            arrays["dout"], q, k, v, arrays["out"], arrays["lse"], dlse=arrays["dlse"]
        )


def test_it_takes_the_options_of_the_product() -> None:
    """The reference takes the options of `rawattn`'s own calls: backend changes nothing, and given arrays are written, except
    their padding."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 5, 2, 8))
    bias = rng.standard_normal((5, 5))
    seqs = SeqLayout(seqlen_q=[3, 5], seqlen_k=[5, 2])
    options = {"seqs": seqs, "causal": True, "bias": bias, "backend": "cuda"}
    exact, lse = reference.attention(q, k, v, **options, return_lse=True)
    out = np.full(q.shape, 7, np.float32)
    assert reference.attention(q, k, v, **options, out=out) is out
    np.testing.assert_allclose(out[0, :3], exact[0, :3], rtol=1e-6)
    assert np.all(out[0, 3:] == 7)
    into = rawattn.Gradients(dk=np.full(k.shape, 7.0), dbias=np.empty_like(bias))
    given = (dout, q, k, v, exact, lse)
    found = reference.attention_backward(*given, **options, into=into)
    expected = reference.attention_backward(*given, **options)
    assert found.dk is into.dk and found.dbias is into.dbias
    np.testing.assert_array_equal(found.dq, expected.dq)
    np.testing.assert_array_equal(into.dbias, expected.dbias)
    np.testing.assert_array_equal(into.dk[1, :2], expected.dk[1, :2])
    assert np.all(into.dk[1, 2:] == 7)
    pages = np.concatenate([k, v])
    options = {"seqlen_k": [3, 1], "seqs": SeqLayout(seqlen_q=[3, 5]), "backend": "cpu"}
    paged = reference.paged_attention(q, pages, pages, [[0], [3]], **options)
    out = np.full(q.shape, 7.0)
    assert reference.paged_attention(q, pages, pages, [[0], [3]], **options, out=out) is out
    np.testing.assert_array_equal(out[1], paged[1])
    assert np.all(out[0, 3:] == 7)


def test_arrays_to_write_that_are_refused() -> None:
    q = np.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match=r"^out: got shape"):
        reference.attention(q, q, q, out=np.empty((1, 2, 2, 4)))
    with pytest.raises(ValueError, match=r"^backend: got 'gpu'"):
        reference.attention(q, q, q, backend="gpu")
    out, lse = reference.attention(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match=r"^into\.dbias: got an array, but"):
        reference.attention_backward(q, q, q, q, out, lse, into=rawattn.Gradients(dbias=q))


def test_gradients_into_one_array_are_refused() -> None:
    """Two gradients into one array are refused: one would overwrite the other."""
    q = np.ones((1, 3, 2, 4))
    out, lse = reference.attention(q, q, q, return_lse=True)
    rows = np.zeros((4, 3, 2, 4))
    for dk, dv in ((rows[:1], rows[:1]), (rows[:1], rows[:1, ::-1])):
        with pytest.raises(ValueError, match=r"^into\.dk: shares memory with into\.dv"):
            reference.attention_backward(q, q, q, q, out, lse, into=rawattn.Gradients(dk=dk, dv=dv))
    apart = rawattn.Gradients(dk=rows[:1], dv=rows[1:2])
    reference.attention_backward(q, q, q, q, out, lse, into=apart)


def test_masked_arrays_are_refused() -> None:
    """Masked arrays are refused, as by `rawattn.attention`: their masks would be ignored."""
    q = np.ones((1, 3, 2, 4))
    with pytest.raises(TypeError, match=r"^k: got a masked array"):
        reference.attention(q, np.ma.masked_array(q), q)
    with pytest.raises(TypeError, match=r"^bias: got a masked array"):
        reference.attention(q, q, q, bias=np.ma.masked_array(np.ones((3, 3))))
