"""The reference on ragged and padded batches computes each sequence as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest

from rawattn import reference
from rawattn.reference import _scores
from tests.reference_rules import (
    GROUPED,
    LENS_K,
    LENS_Q,
    PADDED,
    TILTED,
    Options,
    by_row,
    draw,
    outside,
    scattered,
    spots,
)


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
        "sink_logits": np.ones(2), "dropout_p": 0.3, "seed": 5, "score_mod": TILTED,
    }  # fmt: skip

    def run() -> list[np.ndarray]:
        out, lse = reference.attention(q, k, v, **options, return_lse=True)
        gradients = reference.attention_backward(out, q, k, v, out, lse, **options)
        return [out, lse, *(each for each in gradients if each is not None)]

    whole = run()
    monkeypatch.setattr(_scores, "_BLOCK", 15)
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
