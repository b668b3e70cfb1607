"""Small models of `transformers` with random weights, on `rawattn.torch` and on an attention of its own."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import rawattn.torch

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
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_SIZES, **_DECODER, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 8,
        },
    ),
}  # fmt: skip


def model_of(name: str, attention: str, device: str = "cpu", **sizes: Any) -> Any:
    """The same weights each time."""
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
    """A mask, or None: 0 where a token is padding."""
    if side is None:
        return None
    mask = torch.ones(3, rows, dtype=torch.int64, device=device)
    skipped = {"none": (), "right": ((0, slice(10, None)), (2, slice(3, None))),
               "left": ((0, slice(10)), (2, slice(3))),
               "both": ((0, slice(2)), (0, slice(9, None)), (1, slice(4)))}  # fmt: skip
    for sequence, where in skipped[side]:
        mask[sequence, where] = 0
    return mask


def losses(
    model: Any, mask: Any = None, steps: int = 20, ids: Any = None, **given: Any
) -> list[float]:
    """Of a model that learns tokens by heart; padding is not to be learnt."""
    ids = tokens(model.device) if ids is None else ids
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
