"""The cases of `rawattn bench --suite scores`: what each promises, counts and asks for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rawattn._bench import contender, counters, measure, ours, score_cases
from rawattn._bench import score_features as features
from tests.bench_scores.features import _FEATURES, _case, _draw, _expected, _inputs


def test_the_suite_has_a_bound_for_each_promise_that_is_a_case():
    suite = score_cases.cases()
    by_name = {case.name: case for case in suite}
    assert len(by_name) == len(suite)
    assert all(case.over is None or case.over in by_name for case in suite)
    assert all(bound.peers or case.over for case in suite for bound in case.bounds)
    assert all(set(bound.peers) <= set(case.peers) for case in suite for bound in case.bounds)
    bounds = {
        (case.kind, case.headdim, case.backward, bound.limit, bound.at_most, bound.peers)
        for case in suite
        for bound in case.bounds
    }
    both = ("FlexAttention", "FA4")
    assert bounds == {
        ("bias", 64, False, 2.0, False, ("cuDNN",)),
        ("bias", 128, False, 2.5, False, ("cuDNN",)),
        *(("bias", d, True, 3.0, False, ("efficient", "flash-sparse-attn")) for d in (64, 128)),
        ("broadcast", 128, False, 1.2, True, ()),
        ("broadcast", 128, True, 1.4, True, ()),
        ("blocks", 128, False, 0.13, True, ()),
        ("blocks", 128, True, 0.18, True, ()),
        ("documents", 128, False, 1.7, False, ("FlexAttention",)),
        ("documents", 128, True, 1.2, False, ("FlexAttention",)),
        *(("topk", 128, verb, 1.3, True, ()) for verb in (False, True)),
        *(("alibi", 128, verb, 0.93, False, ()) for verb in (False, True)),
        *(("scoremod", 128, verb, 0.95, False, ()) for verb in (False, True)),
        *(("softcap", 128, verb, 1.3, False, both) for verb in (False, True)),
        ("softcap", 128, False, 2.2, False, ("FlexAttention",)),
        ("dropout", 128, False, 0.6, False, ()),
        ("dropout", 128, False, 1.3, False, ("FA2",)),
    }
    biases = {
        (c.batch, c.nheads_q, c.nheads_kv, c.rows, c.headdim, c.feature.shape[:2])
        for c in suite
        if c.kind == "bias" and c.causal
    }
    assert biases == {
        (1, 2, 1, 4096, 64, (1, 1)),
        (1, 2, 1, 16384, 64, (1, 1)),
        (2, 16, 16, 4096, 128, (2, 16)),
        (2, 16, 4, 4096, 128, (1, 1)),
        (8, 16, 16, 2048, 64, (8, 16)),
    }
    base = by_name["topk-ref D128 B1 H16/16 S32768 keys1024 forward full"]
    assert base.shapes[0][1] == 32768
    assert base.shapes[1][1] == 1024
    assert by_name["topk D128 B1 H16/16 S32768 kept1024 forward full"].flops == base.flops
    quick = score_cases.cases(quick=True)
    assert {case.name for case in quick} < set(by_name)
    assert all(case.over is None or case.over in {c.name for c in quick} for case in quick)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(256, 256), (128, 384), (1, 300)])
@pytest.mark.parametrize("kind", ["tiles", "documents", "topk"])
def test_visible_pairs_against_the_mask_itself(on_numpy, kind, rows, keys, causal):
    feature = {
        "tiles": features.Tiles(0.4),
        "documents": features.Documents(64),
        "topk": features.TopK(30),
    }[kind]
    if kind == "documents" and rows != keys:
        pytest.skip("documents are those of self-attention")
    if kind == "tiles" and (causal or rows == 1):
        pytest.skip("tiles are whole, and alone")
    case = _case(feature, causal=causal, rows=rows, keys=keys)
    (mask,) = feature.options(case, feature.arrays(case, "float32")).values()
    mask = np.broadcast_to(mask, (2, 1, rows, keys))[0, 0]
    if causal:
        mask = mask & np.tri(rows, keys, keys - rows, dtype=bool)
    expected = counters.Visible(mask.sum(), mask.any(1).sum(), mask.any(0).sum())
    assert feature.visible(rows, keys, causal) == expected
    assert case.visible.pairs == 2 * mask.sum()


def test_a_case_with_a_bias_counts_its_bytes():
    plain = _case(features.PLAIN)
    bias = dataclasses.replace(plain, feature=features.Bias((2, 4, 256, 256)))
    assert bias.nbytes(2) - plain.nbytes(2) == 2 * 2 * 4 * 256 * 256
    both = [dataclasses.replace(case, backward=True).nbytes(2) for case in (plain, bias)]
    assert both[1] - both[0] == 2 * 2 * 2 * 4 * 256 * 256
    assert (plain.ngradients, bias.ngradients) == (3, 4)


def test_the_text_of_a_score_function_means_the_built_in_one(on_numpy):
    case = _case(features.Alibi(), backward=True)
    inputs = _inputs(case)
    results = [
        _expected(case, inputs, feature.options(case, inputs.extras))
        for feature in (features.Alibi(), features.AlibiText())
    ]
    assert not measure.disagreement(results[1], ("built-in", results[0]), 1e-12)


@pytest.mark.parametrize("feature", ["alibi", "softcap", "bias"])
def test_who_leaves_a_feature_out_would_be_found_out(on_numpy, feature):
    feature, options = _FEATURES[feature]
    if isinstance(feature, features.Softcap):
        feature = features.Softcap()
        options = lambda extras: {"softcap": 30.0}  # noqa: E731
    case = _case(feature)
    inputs = _inputs(case)
    q, k, v = inputs.qkv
    inputs = dataclasses.replace(inputs, qkv=(q * feature.q_factor, k, v))
    expected = _expected(case, inputs, options(inputs.extras))
    assert measure.disagreement(_expected(case, inputs, {}), ("reference", expected))


def test_two_draws_of_dropout_agree_and_another_mask_does_not(on_numpy):
    case = _case(features.Dropout(0.1), heads=(4, 4))
    q, k, v = (_draw(shape, np.float32) for shape in case.shapes)
    inputs = contender.Inputs((q, k, np.roll(v, 7, axis=1)))
    draws = [_expected(case, inputs, {"dropout_p": 0.1, "seed": seed}) for seed in (1, 2)]
    assert not measure.disagreement(draws[0], ("other", draws[1]), case.feature.agree)
    assert measure.difference(draws[0][0], draws[1][0]) > 0.8 * case.feature.agree
    full = _expected(dataclasses.replace(case, causal=False), inputs, {})
    assert measure.disagreement(full, ("other", draws[1]), case.feature.agree)


def test_ours_is_called_with_the_options_of_the_case(on_numpy, monkeypatch):
    asked = []
    monkeypatch.setattr(
        ours.rawattn, "attention", lambda *args, **options: asked.append(options) or (None, None)
    )
    made = []
    monkeypatch.setattr(
        features._late_rawattn, "ScoreMod", lambda text, **captured: made.append((text, captured))
    )
    wanted = {
        features.Bias((1, 1, 256, 256)): {"bias"},
        features.Alibi(): {"alibi_slopes"},
        features.AlibiText(): {"score_mod"},
        features.Softcap(): {"softcap"},
        features.Dropout(): {"dropout_p", "seed"},
        features.Sinks(): {"sink_logits"},
        features.Tiles(0.5): {"mask"},
        features.Documents(64): {"mask"},
        features.TopK(9): {"mask"},
    }
    for feature, names in wanted.items():
        case = _case(feature)
        ours.Ours("rawattn").prepare(case, _inputs(case))()
        assert set(asked[-1]) == {"seqs", "causal", "window", *names}
    ((text, captured),) = made
    assert text == "score + slope[head] * (kv_idx - q_idx)"
    assert set(captured) == {"slope"}
