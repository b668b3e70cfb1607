"""Peers of `rawattn bench --suite scores` compute what the case means, and are asked for it by their own names."""

from __future__ import annotations

import dataclasses
import sys
import types

import numpy as np
import pytest

from rawattn._bench import measure, peers, score_peers
from rawattn._bench import score_features as features
from tests.bench_scores.features import _FEATURES, _case, _expected, _inputs


@pytest.fixture
def real_torch():
    """Imported before anything pretends to be CuPy."""
    return pytest.importorskip("torch")


@pytest.fixture
def torch_on_cpu(real_torch, on_numpy, monkeypatch):
    torch = real_torch

    def tensors(*arrays):
        return [torch.from_numpy(x.copy()) for x in arrays]

    monkeypatch.setattr(peers, "tensors", tensors)
    monkeypatch.setattr(score_peers, "tensors", tensors)
    monkeypatch.setattr(np, "from_dlpack", lambda x: x.detach().numpy())
    # Uncompiled, torch computes the same.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch, "from_dlpack", lambda x: torch.from_numpy(x.copy()))
    return torch


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("name", "feature", "causal"),
    [
        *(
            (name, feature, causal)
            for name in ("cuDNN", "efficient")
            for feature in ("bias", "shared bias")
            for causal in (True, False)
        ),
        *(("FlexAttention", feature, True) for feature in ("alibi", "softcap")),
        ("FlexAttention", "documents", False),
    ],
)
def test_a_peer_computes_what_the_case_means(torch_on_cpu, name, feature, causal, backward):
    feature, options = _FEATURES[feature]
    heads = (4, 4) if name == "FlexAttention" else (4, 2)
    case = _case(feature, causal=causal, heads=heads, backward=backward)
    inputs = _inputs(case)
    expected = _expected(case, inputs, options(inputs.extras))
    (side,) = (c for c in score_peers.peers() if c.name == name)
    if name != "FlexAttention":
        side._backend = "MATH"  # the others want a GPU
    if name == "FlexAttention" and backward:
        pytest.skip("FlexAttention has no backward on the CPU")
    with side.scope():
        got = side.read(case, side.prepare(case, inputs)())
    # cuDNN has no dbias.
    assert len(got) == (3 if backward and name == "cuDNN" else len(expected))
    assert not measure.disagreement(got, ("reference", expected), 1e-5)


def test_flash_attention_gets_its_keywords(torch_on_cpu, monkeypatch):
    asked = {}
    interface = types.ModuleType("flash_attn.cute.interface")
    interface.flash_attn_func = lambda *args, **options: asked.update(options)
    interface.flash_attn_varlen_func = None
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    (side,) = (c for c in score_peers.peers() if c.name == "FA4")
    case = _case(features.Softcap(30.0))
    side.prepare(case, _inputs(case))()
    assert asked["softcap"] == 30.0
    case = dataclasses.replace(_case(features.Sinks()), window_left=8)
    inputs = _inputs(case)
    side.prepare(case, inputs)()
    assert asked["window_size"] == (8, None)
    assert asked["learnable_sink"].float().numpy() == pytest.approx(
        inputs.extras["sink_logits"], rel=1e-2
    )
    with pytest.raises(NotImplementedError):
        side.prepare(_case(features.Alibi()), inputs)


def test_dropout_goes_to_torchs_flash_attention(torch_on_cpu):
    (side,) = (c for c in score_peers.peers() if c.name == "FA2")
    case = _case(features.Dropout(0.25))
    call = side.prepare(case, _inputs(case))
    assert call.keywords["dropout_p"] == 0.25
    assert call.keywords["is_causal"] is True


def test_flash_sparse_attention_is_listed_where_it_is_installed(torch_on_cpu, monkeypatch):
    assert "flash-sparse-attn" not in [c.name for c in score_peers.peers()]
    package = types.ModuleType("flash_sparse_attn")
    package.__spec__ = types.SimpleNamespace(name=package.__name__)
    module = types.ModuleType("flash_sparse_attn.flash_sparse_attn_triton")
    asked = []
    module.triton_sparse_attn_func = lambda *args, **options: asked.append((args, options))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    side = score_peers.peers()[-1]
    assert side.name == "flash-sparse-attn"
    case = _case(_FEATURES["shared bias"][0])
    side.prepare(case, _inputs(case))()
    ((args, options),) = asked
    assert [x.shape for x in args] == [(2, 256, 4, 16), (2, 256, 2, 16), (2, 256, 2, 16)]
    assert options["is_causal"] is True
    assert options["attn_bias"].shape == (1, 1, 256, 256)
    assert not options["attn_bias"].isinf().any()
