"""The reference against definitions written out pair by pair, and against finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn import SeqLayout, reference
from rawattn.reference import _philox

Options = dict[str, Any]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def visible_by_rule(
    seqlen_q: int,
    seqlen_k: int,
    *,
    left: int | None = None,
    right: int | None = None,
    sink: int = 0,
    align: str = "bottom-right",
) -> np.ndarray:
    """The rule of the contract, one pair at a time."""
    offset = seqlen_k - seqlen_q if align == "bottom-right" else 0
    seen = np.zeros((seqlen_q, seqlen_k), bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            past_right = right is not None and j > i + offset + right
            before_left = left is not None and j < i + offset - left
            seen[i, j] = not past_right and (not before_left or j < sink)
    return seen


def visible_in_reference(seqlen_q: int, seqlen_k: int, **options: Any) -> np.ndarray:
    """With equal scores and v the identity, out is 1 / (number of keys seen) where seen."""
    q, k = np.zeros((1, seqlen_q, 1, 1)), np.zeros((1, seqlen_k, 1, 1))
    v = np.eye(seqlen_k).reshape(1, seqlen_k, 1, seqlen_k)
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    seen = out[0, :, 0] > 0
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(seen.sum(axis=1)))
    return seen


# Visible


@pytest.mark.parametrize(
    ("size", "align", "window", "sink", "counts"),
    [
        ((8, 8), "top-left", (2, 0), 2, [1, 2, 3, 4, 5, 5, 5, 5]),
        ((5, 8), "top-left", (0, 3), 2, [4, 5, 6, 6, 6]),
        ((5, 8), "bottom-right", (1, 0), 2, [4, 4, 4, 4, 4]),
        ((6, 6), "bottom-right", (2, 0), 2, [1, 2, 3, 4, 5, 5]),
        # More queries than keys: sinks are there for late rows too.
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


# Forward


def by_definition(q, k, v, s_of, keep=None) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: q (rows, nheads_q, D). `s_of(s, h, i, j)` is the score, None where hidden."""
    nheads_q, group = q.shape[1], q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], nheads_q, v.shape[2]))
    lse = np.full((nheads_q, q.shape[0]), -np.inf)
    for h, i in itertools.product(range(nheads_q), range(q.shape[0])):
        scores = {
            j: s
            for j in range(k.shape[0])
            if (s := s_of(float(q[i, h] @ k[j, h // group]), h, i, j)) is not None
        }
        if scores:
            total = math.fsum(math.exp(s) for s in scores.values())
            lse[h, i] = math.log(total)
            for j, s in scores.items():
                factor = 1.0 if keep is None else keep(h, i, j)
                out[i, h] += math.exp(s) / total * factor * v[j, h // group]
    return out, lse


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
        softcap=3.0, score_mod=Tilted(), dropout_p=p, seed=seed, return_lse=True,
    )  # fmt: skip
    expected, expected_lse = by_definition(q[0], k[0], v[0], score, keep)
    np.testing.assert_allclose(out[0], expected, rtol=1e-12)
    np.testing.assert_allclose(lse[0], expected_lse, rtol=1e-12)
    assert out.dtype == lse.dtype == np.float64


class Tilted:
    """s * (1 + h / 10) + i * j / 100"""

    def reference_forward(self, s, b, h, i, j):
        return s * (1 + 0.1 * h) + 0.01 * i * j

    def reference_backward(self, ds, s, b, h, i, j):
        return ds * (1 + 0.1 * h)


class Squared:
    """A derivative that depends on the score: s + s * s / 4, and nothing of key 1 for row 2."""

    def reference_forward(self, s, b, h, i, j):
        return np.where((i == 2) & (j == 1), -np.inf, s + 0.25 * s * s + 0.1 * b)

    def reference_backward(self, ds, s, b, h, i, j):
        return ds * (1 + 0.5 * s)


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


# Lengths

LENS_Q, LENS_K = (3, 0, 5, 2), (4, 6, 0, 7)
GROUPED = SeqLayout(
    seqstart_q=[1, 5, 7, 12, 14],
    seqstart_k=[2, 6, 13, 15, 24],
    seqlen_q=LENS_Q,
    cu_seqlen_k=np.cumsum([3, *LENS_K]),
)
PADDED = SeqLayout(seqlen_q=LENS_Q, seqlen_k=LENS_K)


def spots(seqs: SeqLayout, side: str) -> list[Any]:
    """Where the rows of each sequence lie in an array of (..., rows, heads[, dim])."""
    lens = LENS_Q if side == "q" else LENS_K
    if seqs is PADDED:
        return [np.s_[b, :n] for b, n in enumerate(lens)]
    starts = (1, 5, 7, 12) if side == "q" else (2, 6, 13, 15)
    return [np.s_[start : start + n] for start, n in zip(starts, lens, strict=True)]


def scattered(seqs: SeqLayout, side: str, pieces: list[np.ndarray]) -> np.ndarray:
    """Pieces (rows, ...) of every sequence in an array that is NaN elsewhere."""
    rooms = ((4, 6) if side == "q" else (4, 8)) if seqs is PADDED else (16 if side == "q" else 25,)
    array = np.full((*rooms, *pieces[0].shape[1:]), np.nan)
    for spot, piece in zip(spots(seqs, side), pieces, strict=True):
        array[spot] = piece
    return array


def outside(seqs: SeqLayout, side: str, array: np.ndarray) -> np.ndarray:
    """The rows of padding."""
    rows = np.ones(array.shape[: 2 if seqs is PADDED else 1], bool)
    for spot in spots(seqs, side):
        rows[spot] = False
    return array[rows]


def by_row(lse: np.ndarray) -> np.ndarray:
    """(..., heads, rows) <-> (..., rows, heads)"""
    return lse.swapaxes(-1, -2)


@pytest.mark.parametrize("seqs", [GROUPED, PADDED], ids=["group", "batch"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (1, 1), "sink": 1, "align": "top-left"},
        {"sink_logits": np.array([0.1, -0.5, 2.0, 0.0]), "softcap": 2.0, "causal": True},
        {"bias": draw(1, 2, 5, 7), "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4])},
        {"mask": draw(4, 5, 7) > 0, "bias": draw(7)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_sequences_among_padding_are_those_alone(seqs, options) -> None:
    alone = []
    for b, (n, m) in enumerate(zip(LENS_Q, LENS_K, strict=True)):
        q, k, v = draw(1, n, 4, 3, seed=b), draw(1, m, 2, 3, seed=b), draw(1, m, 2, 6, seed=b)
        own = {
            name: x[..., :n, :m] if name in ("bias", "mask") and x.ndim > 1 else x
            for name, x in options.items()
        }
        if own.get("bias") is not None and own["bias"].ndim == 1:
            own["bias"] = own["bias"][:m]
        out, lse = reference.attention(q, k, v, **own, return_lse=True)
        dout, dlse = np.cos(out), np.sin(lse, where=np.isfinite(lse), out=np.ones_like(lse))
        gradients = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **own)
        alone.append((q, k, v, out, by_row(lse), dout, by_row(dlse), *gradients[:3]))
    q, k, v, out, lse, dout, dlse, dq, dk, dv = (
        [x[0] for x in column] for column in zip(*alone, strict=True)
    )

    whole = dict(options, seqs=seqs)
    for name, fill in (("bias", np.nan), ("mask", True)):
        if name in options and options[name].ndim > 1:
            whole[name] = np.full((*options[name].shape[:-2], 6, 8), fill)
            whole[name][..., :5, :7] = options[name]
        elif name in options:
            whole[name] = np.append(options[name], np.nan)
    arrays = scattered(seqs, "q", q), scattered(seqs, "k", k), scattered(seqs, "k", v)
    got_out, got_lse = reference.attention(*arrays, **whole, return_lse=True)
    gradients = reference.attention_backward(
        scattered(seqs, "q", dout),
        *arrays,
        scattered(seqs, "q", out),
        by_row(scattered(seqs, "q", lse)),
        dlse=by_row(scattered(seqs, "q", dlse)),
        **whole,
    )
    for name, side, got, expected, padding in (
        ("out", "q", got_out, out, 0),
        ("lse", "q", by_row(got_lse), lse, -np.inf),
        ("dq", "q", gradients.dq, dq, 0),
        ("dk", "k", gradients.dk, dk, 0),
        ("dv", "k", gradients.dv, dv, 0),
    ):
        for spot, piece in zip(spots(seqs, side), expected, strict=True):
            np.testing.assert_allclose(got[spot], piece, rtol=1e-12, atol=1e-14, err_msg=name)
        assert np.all(outside(seqs, side, got) == padding), name
    if gradients.dbias is not None:
        assert np.isfinite(gradients.dbias).all()
        assert gradients.dbias.shape == whole["bias"].shape


def test_nothing_at_all() -> None:
    for shape_q, shape_k in (
        ((0, 3), (0, 4)),
        ((2, 0), (2, 4)),
        ((2, 3), (2, 0)),
        ((2, 0), (2, 0)),
    ):
        q, k = draw(*shape_q, 2, 4), draw(*shape_k, 2, 4)
        out, lse = reference.attention(q, k, k, return_lse=True)
        assert out.shape == q.shape and lse.shape == (shape_q[0], 2, shape_q[1])
        assert not out.any() and np.all(lse == -np.inf)
        gradients = reference.attention_backward(out, q, k, k, out, lse)
        for x, gradient in zip((q, k, k), gradients, strict=False):
            assert gradient.shape == x.shape and not gradient.any()


def test_long_sequences_are_cut_in_blocks(monkeypatch) -> None:
    q, k, v = draw(2, 9, 2, 3), draw(2, 7, 2, 3, seed=1), draw(2, 7, 2, 3, seed=2)
    options: Options = {
        "causal": True, "bias": draw(1, 2, 9, 7), "mask": draw(2, 1, 9, 1) > -1,
        "sink_logits": np.ones(2), "dropout_p": 0.3, "seed": 5, "score_mod": Tilted(),
    }  # fmt: skip

    def run() -> list[np.ndarray]:
        out, lse = reference.attention(q, k, v, **options, return_lse=True)
        return [out, lse, *reference.attention_backward(out, q, k, v, out, lse, **options)]

    whole = run()
    monkeypatch.setattr(reference, "_BLOCK", 15)
    for a, b in zip(run(), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nan_reaches_only_the_rows_that_see_it(softcap) -> None:
    options: Options = {"causal": True, "softcap": softcap, "bias": draw(6, 6, seed=3)}
    q, k, v = draw(1, 6, 2, 3), draw(1, 6, 2, 3, seed=1), draw(1, 6, 2, 3, seed=2)
    k[0, 4, 0], v[0, 3, 0], v[0, 4, 0] = np.nan, np.inf, np.nan
    clean_k, clean_v = np.nan_to_num(k, nan=9.0), np.nan_to_num(v, nan=9.0, posinf=9.0)
    out, lse = reference.attention(q, k, v, **options, return_lse=True)
    clean, clean_lse = reference.attention(q, clean_k, clean_v, **options, return_lse=True)
    np.testing.assert_allclose(out[0, :3], clean[0, :3])
    np.testing.assert_allclose(lse[0, :, :4], clean_lse[0, :, :4])
    np.testing.assert_allclose(out[0, :, 1], clean[0, :, 1])
    assert np.all(out[0, 3, 0] == np.inf) and np.isnan(out[0, 4:, 0]).all()
    dout = draw(*out.shape, seed=4)
    dout[0, 3:, 0] = 0
    gradients = reference.attention_backward(dout, q, k, v, clean, clean_lse, **options)
    expected = reference.attention_backward(dout, q, clean_k, clean_v, clean, clean_lse, **options)
    np.testing.assert_allclose(gradients.dq[0, :3], expected.dq[0, :3])
    np.testing.assert_allclose(gradients.dq[0, :, 1], expected.dq[0, :, 1])
    np.testing.assert_allclose(gradients.dv[0, :, 1], expected.dv[0, :, 1])
    np.testing.assert_allclose(gradients.dbias[:3], expected.dbias[:3])


# Gradients


def check_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options, *, with_dlse: bool = True
) -> Any:
    """Directional derivatives of <dout, out> + <dlse, lse> for every input that has a gradient."""
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


def arrays_of(
    batch: int = 2, rows: int = 5, keys: int = 7, nheads_q: int = 4, nheads_kv: int = 2
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        draw(batch, rows, nheads_q, 3),
        draw(batch, keys, nheads_kv, 3, seed=1),
        draw(batch, keys, nheads_kv, 6, seed=2),
    )


EVERYTHING: Options = {
    "window": (3, 1), "sink": 1, "scale": -0.7, "bias": draw(2, 2, 5, 7),
    "mask": draw(1, 4, 5, 7) > -1, "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4]), "softcap": 1.5,
    "score_mod": Squared(), "sink_logits": draw(4), "dropout_p": 0.4, "seed": 3,
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
        {"score_mod": Tilted()},
        {"score_mod": Squared(), "softcap": 2.0},
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


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
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

    # What a mask of this shape keeps is what an infinitely low bias of it leaves.
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
    """With the out and lse of all keys, the gradients of two halves of them add up."""
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


# Dropout


def test_philox_known_answers() -> None:
    """The vectors published with Random123."""
    for counter, key, expected in (
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            0xFFFFFFFF_FFFFFFFF,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        assert tuple(int(word) for word in _philox.philox4x32(counter, key)) == expected


def test_random_bits_are_those_of_the_definition() -> None:
    """docs/notes/dropout.md, one element at a time."""
    seed, batch, head = 0x0123_4567_89AB_CDEF, 3, 5
    rows, keys = np.array([0, 1, 7, 8, 9, 15, 16, 40, 100_003]), np.arange(3, 45)
    bits = _philox.random16(seed, batch, head, rows, keys)
    for (i, row), (j, key) in itertools.product(enumerate(rows.tolist()), enumerate(keys.tolist())):
        counter = (4 * (key // 16) + key % 8 // 2, 8 * (row // 16) + row % 8, head, batch)
        words = _philox.philox4x32(counter, seed)
        word = int(words[2 * (key // 8 % 2) + row // 8 % 2])
        assert bits[i, j] == (word >> 16 if key % 2 else word & 0xFFFF)


def test_every_pair_has_bits_of_its_own() -> None:
    """Each call of the generator serves 8 pairs, no two of them the same bits."""
    places: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    for row, key in itertools.product(range(48), range(48)):
        call = (4 * (key // 16) + key % 8 // 2, 8 * (row // 16) + row % 8)
        half = (2 * (key // 8 % 2) + row // 8 % 2, key % 2)
        places.setdefault((*call, *half), []).append((row, key))
    assert all(len(pairs) == 1 for pairs in places.values())
    assert len({call[:2] for call in places}) == 48 * 48 // 8


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_kept_share(p) -> None:
    n = 2048
    kept = _philox.kept(42, p, 1, 2, np.arange(n), np.arange(n))
    deviation = math.sqrt(p * (1 - p)) / n
    assert abs(kept.mean() - (1 - p)) <= 5 * deviation + 2**-17
    for axis in (0, 1):  # every row and every key is like the others
        share = kept.mean(axis=axis)
        assert abs(share - (1 - p)).max() <= 6 * math.sqrt(p * (1 - p) / n) + 2**-17


def test_kept_sets_are_independent() -> None:
    rows = np.arange(512)
    base = _philox.kept(1, 0.5, 0, 0, rows, rows)
    others = [
        _philox.kept(2, 0.5, 0, 0, rows, rows),
        _philox.kept(1 + (1 << 32), 0.5, 0, 0, rows, rows),
        _philox.kept(1, 0.5, 1, 0, rows, rows),
        _philox.kept(1, 0.5, 0, 1, rows, rows),
        _philox.kept(1, 0.5, 0, 0, rows + 1, rows),
        _philox.kept(1, 0.5, 0, 0, rows, rows + 1),
        base.T,
    ]
    for other in others:
        assert abs((base == other).mean() - 0.5) <= 5 * 0.5 / 512
    for step in (1, 2, 8, 16):  # nor do neighbours agree more often than by chance
        for a, b in ((base[step:], base[:-step]), (base[:, step:], base[:, :-step])):
            assert abs((a == b).mean() - 0.5) <= 5 * 0.5 / 500


def test_seed_counts_modulo_two_to_the_64() -> None:
    rows = np.arange(64)
    np.testing.assert_array_equal(
        _philox.kept(-1, 0.5, 0, 0, rows, rows), _philox.kept(2**64 - 1, 0.5, 0, 0, rows, rows)
    )
    assert _philox.threshold(0.0) == 0 and _philox.threshold(math.nextafter(1, 0)) == 65535
    assert _philox.threshold(0.5) == 32768


def test_dropout_in_attention() -> None:
    q, k = np.zeros((2, 300, 2, 4)), np.zeros((2, 200, 1, 4))
    v = np.broadcast_to(np.eye(200)[None, :, None], (2, 200, 1, 200))
    p, seed = 0.25, 99
    plain, plain_lse = reference.attention(q, k, v, return_lse=True)
    out, lse = reference.attention(q, k, v, dropout_p=p, seed=seed, return_lse=True)
    np.testing.assert_array_equal(lse, plain_lse)
    for b, h in itertools.product(range(2), range(2)):
        kept = _philox.kept(seed, p, b, h, np.arange(300), np.arange(200))
        np.testing.assert_allclose(out[b, :, h], np.where(kept, plain[b, :, h] / (1 - p), 0))
    for same in (np.int32(seed), np.array(seed), np.array([seed], np.int32)):
        again = reference.attention(q, k, v, dropout_p=p, seed=same)
        np.testing.assert_array_equal(again, out)
    assert np.any(reference.attention(q, k, v, dropout_p=p, seed=seed + 1) != out)


def test_dropout_counts_positions_in_the_sequence() -> None:
    q, k, v = arrays_of()
    dropped: Options = {"dropout_p": 0.5, "seed": 4}
    out = reference.attention(q, k, v, **dropped)
    layout = SeqLayout(seqstart_q=[0, 5, 10], seqstart_k=[0, 7, 14])
    packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    grouped = reference.attention(*packed, seqs=layout, **dropped)
    np.testing.assert_array_equal(grouped.reshape(out.shape), out)


# Mistakes


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
        ({"bias": np.ones((5, 7), bool)}, TypeError, "bias: got bool"),
        ({"bias": draw(5, 6)}, ValueError, r"bias: got shape \(5, 6\)"),
        ({"bias": draw(3, 1, 5, 7)}, ValueError, "bias"),
        ({"bias": draw(1, 3, 5, 7)}, ValueError, "bias: .*nheads_kv"),
        ({"bias": draw(1, 1, 1, 5, 7)}, ValueError, "bias: .*four axes"),
        ({"mask": draw(5, 7)}, TypeError, "mask: got float64"),
        ({"mask": np.ones((5, 8), bool)}, ValueError, "mask"),
        ({"alibi_slopes": draw(2)}, ValueError, "alibi_slopes"),
        ({"sink_logits": draw(2)}, ValueError, "sink_logits"),
        ({"score_mod": lambda s, *_: s}, TypeError, "score_mod: .*reference_forward"),
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
