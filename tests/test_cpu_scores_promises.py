"""Promises of the CPU backend for score options beside their values: hidden NaN, empty rows, seeds, memory."""

from __future__ import annotations

import functools
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, ScoreMod, reference
from rawattn._cpu import threads
from tests import exhaustive
from tests.cpu_score_calls import OPTIONS, SMALL, Form, gradients_of, options_of


@pytest.mark.parametrize("nkeys", [12, 700])
@pytest.mark.parametrize("hidden_by", ["mask", "bias", "score_mod"])
def test_nan_in_a_hidden_key_stays_away(nkeys: int, hidden_by: str) -> None:
    """NaN in a hidden key and its value does not reach the head that hides it, whatever hides it; other heads see it."""
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 2, nkeys, 2, 8), np.float32)
    bad = 5
    mask = np.ones((2, 2, nkeys, nkeys), bool)
    mask[1, 0, :, bad] = False
    mask[1, 1, : nkeys // 2, bad] = False
    options: dict[str, Any] = {
        "mask": {"mask": mask},
        "bias": {"bias": np.where(mask, 0, -np.inf).astype(np.float32)},
        "score_mod": {
            "score_mod": ScoreMod("where(seen[batch, head, q_idx, kv_idx], score, -inf)", seen=mask)
        },
    }[hidden_by]

    def results() -> tuple[Any, ...]:
        out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
        found = rawattn.attention_backward(dout, q, k, v, out, lse, **options, backend="cpu")
        return out, lse, found

    clean, clean_lse, clean_gradients = results()
    v[1, bad] = np.nan
    k[1, bad] = np.nan
    out, lse, found = results()
    seen = np.zeros(out.shape[:3], bool)
    seen[1, nkeys // 2 :, 1] = True
    assert np.isnan(out[seen]).all()
    np.testing.assert_allclose(out[~seen], clean[~seen], atol=1e-6)
    by_row = lse.swapaxes(1, 2)
    np.testing.assert_array_equal(by_row[~seen], clean_lse.swapaxes(1, 2)[~seen])
    assert np.isnan(found.dq[seen]).all()
    np.testing.assert_allclose(found.dq[~seen], clean_gradients.dq[~seen], atol=1e-5)
    # Rows of head 1 of the second sequence see the NaN, and every key there is seen by such rows, so only head 0 is compared.
    for name in ("dk", "dv"):
        got, expected = getattr(found, name), getattr(clean_gradients, name)
        np.testing.assert_allclose(got[0], expected[0], atol=1e-5)
        np.testing.assert_allclose(got[1, :, 0], expected[1, :, 0], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "value", "nkeys"),
    exhaustive.thin(
        itertools.product(
            ({}, {"softcap": 2.0}, {"score_mod": "score * 2"}), (np.nan, np.inf, -np.inf), (12, 700)
        ),
        5,
    ),
    ids=str,
)
def test_a_bias_of_minus_infinity_hides_whatever_the_score_is(
    options: dict[str, Any], value: float, nkeys: int
) -> None:
    """Results and gradients are those of zeros in the hidden key and value, on the CPU and in the reference."""
    rng = np.random.default_rng(3)
    q, k, v, dout = rng.standard_normal((4, 1, nkeys, 2, 8), np.float32)
    bias = rng.standard_normal((2, nkeys, nkeys), np.float32)
    bias[..., 5] = -np.inf
    if "score_mod" in options:
        options = {"score_mod": ScoreMod("score * g[head]", g=np.ones(2, np.float32), wrt="g")}
    options = {**options, "bias": bias}
    k[:, 5] = v[:, 5] = 0
    clean = k.copy(), v.copy()
    k[:, 5] = v[:, 5] = value
    cpu = rawattn.attention, rawattn.attention_backward, {"backend": "cpu"}
    oracle = reference.attention, reference.attention_backward, {}
    for forward, backward, where in (cpu, oracle):
        found = []
        for keys, values in (clean, (k, v)):
            out, lse = forward(q, keys, values, **options, **where, return_lse=True)
            given = dout, q, keys, values, out, lse
            gradients = backward(*given, **options, **where)
            captured = gradients.captured or {}
            found.append([out, lse, *gradients[:4], *captured.values()])
        for expected, got in zip(*found, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("seqlen", [12, 700])
def test_rows_without_keys(seqlen: int) -> None:
    """Rows emptied by -inf or a mask have out 0, lse -inf or the sink, and gradients 0, whatever dout holds."""
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 1, seqlen, 2, 8), np.float32)
    bias = np.zeros((seqlen, seqlen), np.float32)
    bias[::3] = -np.inf
    sinks = np.array([-np.inf, 1.5], np.float32)
    dead = np.arange(seqlen) % 3 == 0
    dout[0, dead] = np.nan
    for options in ({"bias": bias}, {"mask": bias == 0}, {"bias": bias, "sink_logits": sinks}):
        out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
        assert not out[0, dead].any() and np.isfinite(out).all()
        has_sinks = "sink_logits" in options
        np.testing.assert_array_equal(lse[0, 0, dead], -np.inf)
        np.testing.assert_array_equal(lse[0, 1, dead], 1.5 if has_sinks else -np.inf)
        found = rawattn.attention_backward(dout, q, k, v, out, lse, **options, backend="cpu")
        for gradient in found[:3]:
            assert np.isfinite(gradient).all()
        assert not found.dq[0, dead].any()
        if "bias" in options:
            assert np.isfinite(found.dbias).all() and not found.dbias[dead].any()
        if has_sinks:
            assert found.dsink_logits[0] == 0


@pytest.mark.parametrize("seqlen", [12, 700])
def test_rows_without_keys_give_sinks_nothing(seqlen: int) -> None:
    """Rows without keys add nothing to dsink_logits, whatever dout and dlse hold there.

    A sink of -inf gets gradient 0, whatever any row holds. The reference does the same.
    """
    rng = np.random.default_rng(4)
    q, k, v, dout = rng.standard_normal((4, 1, seqlen, 2, 8), np.float32)
    dlse = rng.standard_normal((1, 2, seqlen), np.float32)
    dead = np.arange(seqlen) % 3 == 0
    options: dict[str, Any] = {"mask": np.broadcast_to(~dead[:, None], (seqlen, seqlen))}
    options["sink_logits"] = np.array([-np.inf, 1.5], np.float32)
    cpu = rawattn.attention, rawattn.attention_backward, {"backend": "cpu"}
    oracle = reference.attention, reference.attention_backward, {}
    found = []
    for value in (0, np.nan):
        dout[0, dead, 0] = dlse[0, 0, dead] = value
        for forward, backward, where in (cpu, oracle):
            out, lse = forward(q, k, v, **options, **where, return_lse=True)
            gradients = backward(dout, q, k, v, out, lse, dlse=dlse, **options, **where)
            assert gradients.dsink_logits[0] == 0
            found.append(gradients.dsink_logits)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-4)
    dout[0, 1, 0] = np.nan  # in a row that sees keys
    for forward, backward, where in (cpu, oracle):
        out, lse = forward(q, k, v, **options, **where, return_lse=True)
        gradients = backward(dout, q, k, v, out, lse, **options, **where)
        assert gradients.dsink_logits[0] == 0


def test_want_dbias_false_and_into() -> None:
    form = SMALL[1]
    options = options_of(form, ("bias", "sink_logits", "score_mod"))
    expected, arrays = gradients_of(form, options)
    q, k, v, dout, dlse = (arrays[name] for name in ("q", "k", "v", "dout", "dlse"))
    out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
    into = Gradients(
        dbias=np.full_like(options["bias"], 7),
        dsink_logits=np.full_like(options["sink_logits"], 7),
        captured={"gain": np.full_like(options["score_mod"].arrays["gain"], 7)},
    )
    call = (dout, q, k, v, out, lse)
    found = rawattn.attention_backward(*call, dlse=dlse, into=into, **options, backend="cpu")
    assert found.dbias is into.dbias and found.dsink_logits is into.dsink_logits
    assert found.captured["gain"] is into.captured["gain"]
    np.testing.assert_array_equal(found.dbias, expected.dbias)
    np.testing.assert_array_equal(found.captured["gain"], expected.captured["gain"])
    np.testing.assert_array_equal(found.captured["slope"], expected.captured["slope"])
    lean = rawattn.attention_backward(*call, dlse=dlse, want_dbias=False, **options, backend="cpu")
    assert lean.dbias is None
    np.testing.assert_array_equal(lean.dq, expected.dq)


def test_memory_that_is_shared_is_told_by_the_callers_names() -> None:
    room = np.zeros(200, np.float32)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), np.float32)
    score_mod = ScoreMod(
        "score * gain[head] + shift[head]", gain=room[:2], shift=room[:2], wrt="gain"
    )
    out = room[:80].reshape(q.shape)
    with pytest.raises(ValueError, match=r"^out: shares memory with gain, expected"):
        rawattn.attention(q, k, v, score_mod=score_mod, out=out, backend="cpu")
    out, lse = rawattn.attention(q, k, v, score_mod=score_mod, return_lse=True, backend="cpu")
    given = out, q, k, v, out, lse
    for into, message in (
        (
            Gradients(captured={"gain": room[:2]}),
            r"into\.captured\['gain'\]: shares memory with gain",
        ),
        (Gradients(captured={"gain": room[:3]}), r"into\.captured\['gain'\]: got shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            rawattn.attention_backward(*given, score_mod=score_mod, into=into, backend="cpu")


def test_seed_on_the_host_or_in_an_array() -> None:
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, 40, 2, 8), np.float32)
    for seed in (5, -1, 2**63 + 3):
        out = rawattn.attention(q, k, v, dropout_p=0.4, seed=seed, backend="cpu")
        same = [seed % 2**64, seed - 2**64]
        if -(2**63) <= seed < 2**63:
            same += [np.array([seed]), np.array(seed)]
        for other in same:
            again = rawattn.attention(q, k, v, dropout_p=0.4, seed=other, backend="cpu")
            np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("option", exhaustive.thin(OPTIONS, 10))
def test_memory_is_a_few_tiles(option: str) -> None:
    """A thread needs the memory of a few tiles, whatever the lengths; the scores of a head would take 64 MiB."""
    form = Form("dense", (4096,), (4096,), nheads_q=2, nheads_kv=2, headdim=8, headdim_v=8)
    options = (
        options_of(form, ())
        | {
            "softcap": {"softcap": 2.0},
            "bias": {"bias": np.zeros(4096, np.float32)},
            "mask": {"mask": np.ones((4096, 1), bool)},
            "alibi_slopes": {"alibi_slopes": np.ones(2, np.float32)},
            "sink_logits": {"sink_logits": np.ones(2, np.float32)},
            "dropout_p": {"dropout_p": 0.5, "seed": 1},
            "score_mod": {
                "score_mod": ScoreMod("score * g[head]", g=np.ones(2, np.float32), wrt="g")
            },
            "window": {"window": (2000, 0)},
        }[option]
    )
    q, k, v = form.arrays()
    out, lse = rawattn.attention(q, k, v, **options, return_lse=True, backend="cpu")
    tracemalloc.start()
    try:
        rawattn.attention(q, k, v, **options, backend="cpu")
        rawattn.attention_backward(out, q, k, v, out, lse, **options, backend="cpu")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (16 << 20) * threads.available_threads()


def test_the_gradient_of_one_number_is_written_to_an_array_without_axes() -> None:
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 8), np.float32)
    bias, into = np.array(0.5, np.float32), np.full((), np.nan, np.float32)
    out, lse = rawattn.attention(q, q, q, bias=bias, return_lse=True, backend="cpu")
    call = functools.partial(
        rawattn.attention_backward, q, q, q, q, out, lse, bias=bias, backend="cpu"
    )
    found = call(into=Gradients(dbias=into))
    assert found.dbias is into
    np.testing.assert_array_equal(into, call().dbias)


@pytest.mark.parametrize("functions", [rawattn, reference], ids=["cpu", "reference"])
def test_the_error_state_of_numpy_is_not_the_callers_business(functions: Any) -> None:
    """Probabilities that underflow, and sums that float16 cannot hold, raise nothing under `np.seterr(all="raise")`."""
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 2, 6, 2, 8)).astype(np.float16)
    options: dict[str, Any] = {
        "bias": np.where(np.arange(6) < 3, 0, -3e4).astype(np.float16),
        "sink_logits": np.array([-1e3, 1], np.float16),
        "score_mod": ScoreMod("score * slope[head]", slope=np.ones(2, np.float16), wrt="slope"),
    }
    dout = np.full(q.shape, 6e4, np.float16)
    with np.errstate(all="raise"):
        out, lse = functions.attention(q, k, v, **options, return_lse=True)
    with np.errstate(all="ignore"):  # of the reference, float64
        out, lse = out.astype(np.float16), lse.astype(np.float32)
    with np.errstate(all="raise"):
        gradients = functions.attention_backward(dout, q, k, v, out, lse, **options)
        functions.combine([out.astype(np.float32)] * 2, [lse, lse - np.float32(1e5)])
    assert np.abs(gradients.dbias.astype(np.float64)).max() > 65504  # inf in float16
