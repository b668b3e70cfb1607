"""`rawattn.torch.register_transformers`: models of `transformers` on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
# ruff: noqa: E402

import rawattn.torch
from rawattn._torch import transformers as ours
from tests import exhaustive
from tests.transformers_models import (
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


@pytest.mark.parametrize(
    ("name", "side"),
    exhaustive.thin(
        itertools.product(
            ("llama", "mistral", "bert", "modernbert"), (None, "none", "right", "left", "both")
        ),
        3,
    ),
)
def test_trains_as_with_torchs_own(name: str, side: str | None, calls: list[Any]) -> None:
    mask = padding(side)
    got = losses(model_of(name, "rawattn"), mask)
    assert len(calls) == 2 * 20
    exact = losses(model_of(name, "sdpa"), mask)
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-4)
    assert got[-1] < 0.9 * got[0]


def test_eight_layers_train_as_with_torchs_own() -> None:
    got, exact = (
        losses(model_of("llama", which, num_hidden_layers=8)) for which in ("rawattn", "sdpa")
    )
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-3)
    assert got[-1] < 0.9 * got[0]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_logits_are_those_of_eager(name: str) -> None:
    mask = padding("left")
    got, exact = (
        model_of(name, which)(tokens(), attention_mask=mask).logits
        for which in ("rawattn", "eager")
    )
    torch.testing.assert_close(got[mask == 1], exact[mask == 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_queries_that_are_padding_on_the_right(name: str) -> None:
    """Queries that are padding on the right see the same keys as with torch's own attention, so a loss over them is equal."""
    mask = padding("right")
    got, exact = (
        model_of(name, which)(tokens(), attention_mask=mask).logits for which in ("rawattn", "sdpa")
    )
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_generates_as_with_torchs_own(
    name: str, side: str | None, cache: str, calls: list[Any]
) -> None:
    """Models generate as with torch's own attention: 12 tokens after 17, which is past mistral's sliding window of 7."""
    got = generated(model_of(name, "rawattn"), padding(side), cache)
    assert len(calls) == 2 * 12
    assert torch.equal(got, generated(model_of(name, "sdpa"), padding(side), cache))


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_pieces(name: str, side: str | None) -> None:
    """A prompt may come in pieces: several queries after cached keys, causal and aligned to the bottom right."""
    results = []
    for which in ("rawattn", "sdpa"):
        model, cache = model_of(name, which), transformers.DynamicCache()
        pieces, mask = [], padding(side)
        for begin, end in ((0, 5), (5, 12), (12, 17)):
            seen = None if mask is None else mask[:, :end]
            logits = model(
                tokens()[:, begin:end], attention_mask=seen, past_key_values=cache
            ).logits
            pieces.append(logits)
        results.append(torch.cat(pieces, 1))
    real = slice(None) if side is None else padding(side) == 1
    torch.testing.assert_close(results[0][real], results[1][real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences(name: str, calls: list[Any]) -> None:
    """Where positions start anew a new sequence begins, and no sequence sees another."""
    starts = torch.cat([torch.arange(n) for n in (5, 9, 3)])[None].expand(3, -1)
    got, exact = (
        losses(model_of(name, which), position_ids=starts, use_cache=False, steps=5)
        for which in ("rawattn", "sdpa")
    )
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-4)
    assert calls[0]["seqs"].batch == 9
    assert not np.allclose(got, losses(model_of(name, "rawattn"), steps=5), rtol=0, atol=1e-3)


def test_layers_share_a_layout(calls: list[Any]) -> None:
    model_of("llama", "rawattn")(tokens(), attention_mask=padding("left"))
    assert calls[0]["seqs"] is not None and calls[0]["seqs"] is calls[1]["seqs"]


def test_lengths_go_with_the_layers_to_their_devices() -> None:
    made = ours.mask_spec(batch_size=3, q_length=17, kv_length=17, attention_mask=padding("left"))
    assert made.seqs is not None
    moved = made.to("meta", non_blocking=True)
    assert moved.layout["seqlen_k"].device.type == "meta" and moved.layout["max_seqlen_k"] == 17
    assert (moved.window, moved.align, moved.packed) == (made.window, made.align, made.packed)
    assert "seqs" not in vars(moved) and made.layout["seqlen_k"].device.type == "cpu"


def test_no_padding_needs_no_lengths(calls: list[Any]) -> None:
    model_of("llama", "rawattn")(tokens(), attention_mask=padding("none"))
    assert calls[0]["seqs"] is None


def test_under_autocast() -> None:
    results = []
    for which in ("rawattn", "sdpa"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model_of("llama", which)(tokens(), labels=tokens()).loss
        loss.backward()
        results.append(loss.item())
    assert abs(results[0] - results[1]) < 1e-2


def test_gradient_checkpointing() -> None:
    plain, saving = model_of("llama", "rawattn"), model_of("llama", "rawattn")
    saving.gradient_checkpointing_enable()
    np.testing.assert_allclose(losses(plain, steps=3), losses(saving, steps=3), atol=1e-6)


@pytest.mark.parametrize("side", exhaustive.thin([None, "left"], 2))
def test_compiled(side: str | None) -> None:
    """A model compiles with one graph break, where the mask is made."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, exact = model_of("llama", "rawattn"), model_of("llama", "sdpa")
    model.forward = torch.compile(model.forward, backend="aot_eager")
    np.testing.assert_allclose(
        losses(model, padding(side), steps=3),
        losses(exact, padding(side), steps=3),
        rtol=0,
        atol=1e-4,
    )
    assert len(counters["graph_break"]) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", [None, "left"])
def test_compiled_with_a_static_cache(side: str | None) -> None:
    """With a static cache a decoding step compiles without a graph break."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, exact = model_of("llama", "rawattn"), model_of("llama", "sdpa")
    assert torch.equal(
        generated(model, padding(side), "static"), generated(exact, padding(side), "static")
    )
    assert not counters["graph_break"]


def _even(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return kv % 2 == 0


_IDS = torch.tensor([[0, 0, 0, 1, 1]])


@pytest.mark.parametrize(
    "function",
    [
        _even,
        masking.and_masks(masking.causal_mask_function, _even),
        masking.or_masks(masking.causal_mask_function, _even),
        masking.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        masking.and_masks(
            masking.packed_sequence_mask_function(_IDS), masking.packed_sequence_mask_function(_IDS)
        ),
    ],
    ids=["even", "and", "or", "chunked", "packed-twice"],
)
def test_mask_functions_that_are_not_known_become_a_mask(function: Any) -> None:
    call = {"batch_size": 1, "q_length": 5, "kv_length": 5, "mask_function": function}
    got = ours.mask_spec(**call)
    assert torch.equal(got, masking.sdpa_mask(**call, allow_is_causal_skip=False))
    assert got.shape == (1, 1, 5, 5)


@pytest.mark.parametrize("lead", [0, 4])
@pytest.mark.parametrize("side", ["none", "right", "left", "both"])
@pytest.mark.parametrize(
    "function",
    [
        masking.causal_mask_function,
        masking.sliding_window_causal_mask_function(4),
        masking.bidirectional_mask_function,
        masking.sliding_window_bidirectional_mask_function(3),
    ],
    ids=["causal", "causal-window", "full", "window"],
)
def test_the_mask_is_the_one_of_transformers(function: Any, side: str, lead: int) -> None:
    """Key by key: every value is a unit vector of its own, so that the result shows what was seen. From the fourth
    query on in a cache of more keys than there are yet."""
    mask = padding(side)
    diagonal = function is not masking.bidirectional_mask_function
    free = 3 if lead and function is masking.causal_mask_function else 0
    call = {
        "batch_size": 3, "q_length": 17 - lead, "kv_length": 17 + free, "q_offset": lead,
        "mask_function": function, "attention_mask": mask.bool(),
    }  # fmt: skip
    exact = masking.sdpa_mask(**call, allow_is_causal_skip=False)
    q, k = torch.zeros(3, 2, 17 - lead, 8), torch.zeros(3, 1, 17 + free, 8)
    v = torch.eye(17 + free).expand(3, 1, -1, -1)
    out, _ = ours.forward(torch.nn.Module(), q, k, v, ours.mask_spec(**call))
    seen = (out > 0).transpose(1, 2)[:, :1]
    real = mask.bool()[:, lead:] if diagonal else torch.ones(3, 17 - lead, dtype=torch.bool)
    assert torch.equal(seen[:, 0][real], exact[:, 0][real])


def test_what_it_cannot_give_is_refused() -> None:
    model = model_of("llama", "rawattn")
    with pytest.raises(ValueError, match="output_attentions: got True"):
        model(tokens(), output_attentions=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q: got it without position_ids"):
        model(tokens(), cu_seq_lens_q=torch.tensor([0, 51]))


def test_another_name() -> None:
    rawattn.torch.register_transformers("rawattn-again")
    model = model_of("llama", "sdpa")
    exact = model(tokens()).logits
    model.set_attn_implementation("rawattn-again")
    torch.testing.assert_close(model(tokens()).logits, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "got"), [(3, r"3 \(int\)"), (None, r"None \(NoneType\)")])
def test_a_name_is_text(name: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"^name: got {got}, expected a str"):
        rawattn.torch.register_transformers(name)
