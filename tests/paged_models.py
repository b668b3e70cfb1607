"""Language models of `transformers` in which `append_kv` and `paged_attention` replace the attention, and nothing else."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import rawattn
from tests.tolerance import check
from tests.transformers_models import model_of

PROMPTS = (5, 23, 1, 40)
STEPS = 64
PAGE_SIZE = 8


class Pages(NamedTuple):
    """The page pools of all layers, and the rows that the current forward pass handles."""

    pools: list[tuple[Any, Any]]  # (k_pages, v_pages) of each layer
    block_table: Any
    seqlen_k: Any  # updated in place after each token
    seqs: list[rawattn.SeqLayout | None]  # of this pass; None: one row each
    rotary: tuple[Any, Any]


class PagedAttention(nn.Module):
    """Replaces a layer's attention and uses its weights."""

    def __init__(self, attention: Any, layer: int, pages: Pages) -> None:
        super().__init__()
        self.attention, self.layer, self.pages = attention, layer, pages

    def forward(self, hidden_states: Any, **others: Any) -> tuple[Any, None]:
        own, pages = self.attention, self.pages
        packed = pages.seqs[0] is not None
        x = hidden_states[0] if packed else hidden_states
        q, k, v = (
            project(x).unflatten(-1, (-1, own.head_dim))
            for project in (own.q_proj, own.k_proj, own.v_proj)
        )
        where = {"seqlen_k": pages.seqlen_k, "seqs": pages.seqs[0]}
        pools = pages.pools[self.layer]
        q = rawattn.append_kv(k, v, *pools, pages.block_table, q=q, rotary=pages.rotary, **where)
        window = getattr(own, "sliding_window", None)
        out = rawattn.paged_attention(
            q,
            *pools,
            pages.block_table,
            **where,
            causal=True,
            # The window of transformers counts the query's own key.
            window=None if window is None else (window - 1, 0),
            sink_logits=getattr(own, "sinks", None),
            scale=own.scaling,
        )
        out = own.o_proj(out.flatten(-2))
        return out[None] if packed else out, None


@torch.no_grad()
def model(name: str, device: str) -> Any:
    """Return a model with random weights, large enough for attention to matter in the logits, and sinks as large as scores."""
    made = model_of(name, "eager", device, num_hidden_layers=4, initializer_range=0.2).eval()
    generator = torch.Generator().manual_seed(1)
    if name == "gpt-oss":
        made.set_experts_implementation("eager")  # the default experts do not support float64
    for layer in made.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            sinks = torch.randn(layer.self_attn.sinks.shape, generator=generator)
            layer.self_attn.sinks.copy_(sinks)
    return made


def pages_of(made: Any, device: str) -> Pages:
    """Return pages for all tokens, filled with NaN. The pages of a sequence are scattered over the pool."""
    config = made.config
    attention = made.model.layers[0].self_attn
    room = -(-(max(PROMPTS) + STEPS) // PAGE_SIZE)
    count = room * len(PROMPTS)
    shape = (count, PAGE_SIZE, config.num_key_value_heads, attention.head_dim)
    pools = [
        (torch.full(shape, torch.nan, device=device), torch.full(shape, torch.nan, device=device))
        for _ in made.model.layers
    ]
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    table = torch.from_numpy(order.reshape(len(PROMPTS), room)).to(device)
    positions = torch.arange(room * PAGE_SIZE, device=device)[None]
    angles = made.model.rotary_emb(torch.zeros(1, device=device), positions)
    # Llama's tables repeat the angles for both halves of a head; keep one copy.
    cos, sin = (x[0, :, : attention.head_dim // 2].contiguous() for x in angles)
    lengths = torch.tensor(PROMPTS, device=device, dtype=torch.int32)
    seqs = rawattn.SeqLayout(seqstart_q=np.cumsum([0, *PROMPTS]))
    return Pages(pools, table, lengths, [seqs], (cos, sin))


def sequences(device: str) -> list[Any]:
    """Return the tokens of each sequence: a prompt (lengths PROMPTS), then STEPS tokens that arrive one by one."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, 97, (n + STEPS,), generator=generator).to(device) for n in PROMPTS]


def through_pages(made: Any, tokens: list[Any], device: str) -> list[Any]:
    """Return the logits of each sequence: all prompts in one packed pass, then one token of each sequence a pass."""
    pages = pages_of(made, device)
    for n, layer in enumerate(made.model.layers):
        layer.self_attn = PagedAttention(layer.self_attn, n, pages)
    packed = torch.cat([x[:n] for x, n in zip(tokens, PROMPTS, strict=True)])
    prompts = made(packed[None], use_cache=False).logits[0].split(PROMPTS)
    pages.seqs[0] = None
    steps = []
    for step in range(STEPS):
        pages.seqlen_k.add_(1)
        newest = torch.stack([x[n + step] for x, n in zip(tokens, PROMPTS, strict=True)])
        steps.append(made(newest[:, None], use_cache=False).logits[:, 0])
    return [torch.cat(x) for x in zip(prompts, torch.stack(steps, 1), strict=True)]


@torch.no_grad()
def verify(name: str, device: str) -> None:
    """Check the logits against the same model in float64.

    They must be about as exact as those of the original model, which sees whole sequences.
    """
    made, tokens = model(name, device), sequences(device)

    def at_once(whole: Any) -> list[Any]:
        return [whole(x[None], use_cache=False).logits[0].cpu().numpy() for x in tokens]

    own, exact = at_once(made), at_once(copy.deepcopy(made).double())
    found = through_pages(made, tokens, device)
    for n, got, low, wanted in zip(PROMPTS, found, own, exact, strict=True):
        assert wanted.std() > 0.5
        for part, rows in (("prompt", slice(n)), ("steps", slice(n, None))):
            what = f"{name}, {part} behind {n}" if part == "steps" else f"{name}, {part} of {n}"
            check(got[rows].cpu().numpy(), wanted[rows], (low[rows],), what=what)
