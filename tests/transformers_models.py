"""Small models of `transformers` with random weights, on `rawattn.torch` and on their own attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import rawattn.torch
from rawattn._torch import transformers as ours

rawattn.torch.register_transformers()

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_DECODER}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_SIZES, **_DECODER, "sliding_window": 7}),
    "bert": ("BertForMaskedLM", "BertConfig", {**_SIZES, **_NO_DROPOUT}),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**_SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": None,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_SIZES, **_DECODER, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 8,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_SIZES, **_DECODER, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 0.5, "initializer_range": 0.2,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0,
            "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None,
        },
    ),
}  # fmt: skip


def model_of(name: str, attention: str, device: str = "cpu", **sizes: Any) -> Any:
    """Return a model with the same weights each time."""
    model, config, given = _MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**given, **sizes})
    made._attn_implementation = attention
    model = getattr(transformers, model)(made).to(device)
    assert model.config._attn_implementation == attention
    return model


def tokens(device: str = "cpu", rows: int = 17) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 97, (3, rows), generator=generator).to(device)


def padding(side: str | None, device: str = "cpu", rows: int = 17) -> Any:
    """Return a padding mask, 0 where a token is padding, or None."""
    if side is None:
        return None
    mask = torch.ones(3, rows, dtype=torch.int64, device=device)
    skipped = {"none": (), "right": ((0, slice(10, None)), (2, slice(3, None))),
               "left": ((0, slice(10)), (2, slice(3))),
               "both": ((0, slice(2)), (0, slice(9, None)), (1, slice(4)))}  # fmt: skip
    for sequence, where in skipped[side]:
        mask[sequence, where] = 0
    return mask


def after_tokens(mask: Any) -> Any:
    """Return labels without tokens that padding would predict.

    There "eager" differs: a query that sees no key attends to all keys equally.
    """
    if mask is None:
        return tokens()
    before = torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1)
    return tokens().masked_fill((mask == 0) | (before == 0), -100)


def losses(
    model: Any,
    mask: Any = None,
    steps: int = 20,
    ids: Any = None,
    labels: Any = None,
    **given: Any,
) -> list[float]:
    """Train the model to memorise the tokens; return the losses. Padding is not a label."""
    ids = tokens(model.device) if ids is None else ids
    if labels is None:
        labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for _ in range(steps):
        loss = model(ids, attention_mask=mask, labels=labels, **given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def generated(model: Any, mask: Any, cache: str, **given: Any) -> Any:
    ids = tokens(model.device)
    return model.eval().generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        cache_implementation=cache,
        **given,
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to one thread: its matrix products are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the options of every later call of `rawattn.torch.attention`."""
    seen: list[dict[str, Any]] = []

    def attention(*x: Any, **options: Any) -> Any:
        seen.append(options)
        return rawattn.torch.attention(*x, **options)

    monkeypatch.setattr(ours, "attention", attention)
    return seen
