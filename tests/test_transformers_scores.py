"""Models of `transformers` whose attention needs options of scores or a mask in memory, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
# ruff: noqa: E402

from rawattn._torch import transformers as ours
from tests import exhaustive
from tests.transformers_models import (
    after_tokens,
    generated,
    losses,
    model_of,
    one_thread,
    padding,
    recorded_calls,
    tokens,
)

pytestmark = pytest.mark.frameworks

masking = transformers.masking_utils


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return recorded_calls(monkeypatch)


def test_options_of_a_layer_reach_the_call(calls: list[Any]) -> None:
    x, bias, sinks = torch.randn(2, 2, 5, 8), torch.zeros(1, 2, 5, 5), torch.zeros(2)
    for given, got, value in (
        ({"softcap": 30.0}, "softcap", 30.0),
        ({"s_aux": sinks}, "sink_logits", sinks),
        ({"position_bias": bias}, "bias", bias),
        ({"attention_mask": bias}, "bias", bias),
        ({"scaling": 0.3}, "scale", 0.3),
        ({"sliding_window": 3}, "window", (2, 0)),
        ({"sliding_window": 3, "is_causal": False}, "window", (2, 2)),
    ):
        layer = torch.nn.Module()
        layer.is_causal = True
        ours.forward(layer, x, x, x, **{"attention_mask": None, **given})
        seen = calls[-1][got]
        if isinstance(value, torch.Tensor):
            assert seen.data_ptr() == value.data_ptr()
            assert seen.shape == value.shape
        else:
            assert seen == value


# The options of rawattn that a model uses, and settings of the model that change these options alone.
_SCORED = {
    "gpt-oss": ("sink_logits", {}),
    "gemma2": ("softcap", {"attn_logit_softcapping": 5.0}),
    "t5": ("bias", {"relative_attention_num_buckets": 4}),
}


@pytest.mark.parametrize(
    ("name", "side"),
    exhaustive.thin(itertools.product(_SCORED, (None, "right", "left", "both")), 3),
)
def test_trains_as_with_eager(name: str, side: str | None, calls: list[Any]) -> None:
    """Models train as with the eager attention if torch's own attention lacks their scores, or has them by a mask in memory."""
    option, other = _SCORED[name]
    mask = padding(side)
    model, exact = model_of(name, "rawattn"), model_of(name, "eager")
    got, expected = (losses(x, mask, labels=after_tokens(mask)) for x in (model, exact))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert got[-1] < 0.9 * got[0]
    assert any(call[option] is not None for call in calls)
    if other:
        assert abs(losses(model_of(name, "eager", **other), mask, steps=1)[0] - got[0]) > 1e-3
    begun = dict(model_of(name, "eager").named_parameters())
    learnt = dict(exact.named_parameters())
    for key, weights in model.named_parameters():
        if key.endswith(("sinks", "relative_attention_bias.weight")):
            assert (weights - begun[key]).abs().max() > 0.002
            torch.testing.assert_close(weights, learnt[key], rtol=0, atol=3e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", _SCORED)
def test_generates_as_with_eager(name: str, side: str | None, cache: str) -> None:
    got, exact = (
        generated(model_of(name, which), padding(side), cache) for which in ("rawattn", "eager")
    )
    assert torch.equal(got, exact)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"attention_dropout": 0.2}),
        ("bert", {"attention_probs_dropout_prob": 0.2}),
        ("gpt-oss", {"attention_dropout": 0.2}),
    ],
)
def test_dropout(name: str, sizes: Any, calls: list[Any]) -> None:
    """The dropout seed comes from torch's generator: the same state, or a recomputed forward, gives the same dropout mask."""
    model = model_of(name, "rawattn", **sizes).train()

    def drawn(seed: int) -> tuple[float, Any]:
        torch.manual_seed(seed)
        model.zero_grad()
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        return loss.item(), next(model.parameters()).grad.clone()

    first, grad = drawn(1)
    assert [call["dropout_p"] for call in calls] == [0.2, 0.2]
    assert not torch.equal(calls[0]["seed"], calls[1]["seed"])
    again, same = drawn(1)
    assert first == again
    assert torch.equal(grad, same)
    assert drawn(2)[0] != first
    model.gradient_checkpointing_enable()
    recomputed, same = drawn(1)
    assert recomputed == first
    torch.testing.assert_close(same, grad, rtol=1e-4, atol=1e-6)
    model.gradient_checkpointing_disable()
    calls.clear()
    exact = model_of(name, "eager").eval()
    torch.testing.assert_close(
        model.eval()(tokens()).logits, exact(tokens()).logits, rtol=1e-4, atol=1e-5
    )
    assert {call["dropout_p"] for call in calls} == {0.0}


def test_dropout_keeps_the_mean() -> None:
    layer = torch.nn.Module()
    q, k, v = torch.randn(1, 4, 64, 8), torch.randn(1, 4, 64, 8), torch.ones(1, 4, 64, 8)
    torch.manual_seed(0)
    out, _ = ours.forward(layer, q, k, v, None, dropout=0.3, is_causal=False)
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.03


@pytest.mark.exhaustive
def test_compiled_with_a_soft_cap() -> None:
    torch._dynamo.reset()
    model, exact = model_of("gemma2", "rawattn"), model_of("gemma2", "eager")
    model.forward = torch.compile(model.forward, backend="aot_eager")
    np.testing.assert_allclose(losses(model, steps=3), losses(exact, steps=3), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "bert", "gemma2"])
def test_padding_between_tokens(name: str, calls: list[Any]) -> None:
    """Padding between tokens works, with a mask in memory."""
    mask = padding("left")
    mask[1, 4] = 0
    got, exact = (
        losses(model_of(name, which), mask, steps=5, labels=after_tokens(mask))
        for which in ("rawattn", "eager")
    )
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-4)
    assert all(call["mask"].dtype == torch.bool for call in calls)


def test_generates_from_prompts_padded_on_the_right() -> None:
    mask = padding("right")
    got, exact = (
        generated(model_of("llama", which), mask, "dynamic") for which in ("rawattn", "eager")
    )
    assert torch.equal(got, exact)


def _prefix(dtype: Any) -> Any:
    """A mask of four axes: the first tokens see each other, later tokens see what comes before them."""
    kept = torch.tril(torch.ones(17, 17, dtype=torch.bool))
    kept[:5, :5] = True
    kept = kept.expand(3, 1, -1, -1)
    if dtype == torch.bool:
        return kept
    return torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_mask_of_four_axes(name: str, dtype: Any, calls: list[Any]) -> None:
    got = model_of(name, "rawattn")(tokens(), attention_mask=_prefix(dtype)).logits
    exact = model_of(name, "eager")(tokens(), attention_mask=_prefix(torch.float32)).logits
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    assert all((call["mask"] is None) == (dtype != torch.bool) for call in calls)
    assert all((call["bias"] is None) == (dtype == torch.bool) for call in calls)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_bias_beside_a_mask_of_four_axes(dtype: Any) -> None:
    q, k, v = torch.randn(3, 3, 4, 17, 8)
    bias = torch.randn(1, 4, 17, 17)
    mask = _prefix(dtype)
    got, _ = ours.forward(torch.nn.Module(), q, k, v, mask, position_bias=bias)
    added = bias + _prefix(torch.float32)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, added).transpose(1, 2)
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


def test_a_bias_is_indexed_in_the_batch_where_padding_comes_first() -> None:
    """Where padding comes first, a bias is indexed by positions in the padded batch, not in sequences without their padding."""
    real = padding("left").bool()
    call = {"batch_size": 3, "q_length": 17, "kv_length": 17, "attention_mask": real}
    call["mask_function"] = masking.bidirectional_mask_function
    mask = ours.mask_spec(**call)
    assert mask.packed
    q, k, v = torch.randn(3, 3, 4, 17, 8)
    bias = torch.randn(1, 4, 17, 17)
    got, _ = ours.forward(torch.nn.Module(), q, k, v, mask, position_bias=bias)
    added = bias.masked_fill(~masking.sdpa_mask(**call), -torch.inf)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, added).transpose(1, 2)
    torch.testing.assert_close(got[real], exact[real], rtol=1e-4, atol=1e-5)


def test_what_is_no_mask_is_refused() -> None:
    x = torch.randn(2, 2, 5, 8)
    for given in (torch.ones(2, 5), [1.0]):
        with pytest.raises(
            TypeError, match=r"^attention_mask: got (Tensor|list) of shape .*four axes"
        ):
            ours.forward(torch.nn.Module(), x, x, x, given)
