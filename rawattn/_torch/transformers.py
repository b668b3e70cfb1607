"""Models of `transformers` on `rawattn.torch.attention`: the attention of a layer, and its mask.

transformers makes the mask of a forward pass once, by the function registered here, and passes it to every layer. It
describes the mask by a function of positions and by which tokens are padding. The function registered here returns a
`MaskSpec`: the same keys, expressed by the options of `rawattn.attention` without a mask in memory. What a window and lengths
cannot express becomes a bool mask, the one that transformers makes for torch's own attention.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, masking_utils

from rawattn import SeqLayout
from rawattn._call.hints import short
from rawattn._torch.attention import attention


class MaskSpec:
    """Which keys the queries of a forward pass see."""

    ndim = 4  # models pass a mask of 4 axes on as it is, and read one of 2 axes as padding

    def __init__(
        self,
        window: tuple[int | None, int | None],
        layout: dict[str, Any] | None = None,
        *,
        top_left: bool = False,
        packed: bool = False,
    ) -> None:
        self.window = window
        self.layout = layout  # the arguments of a `SeqLayout`
        self.align = "top-left" if top_left else "bottom-right"
        self.packed = packed  # the layout is for tensors of shape (batch * seqlen, nheads, D)
        self.mask: Callable[[], Any] | None = (
            None  # the same as a bool mask (batch, 1, seqlen_q, seqlen_k)
        )

    def contiguous(self) -> MaskSpec:
        """`generate` calls it on every mask."""
        return self

    def to(self, device: Any, non_blocking: bool = False) -> MaskSpec:
        """accelerate calls it on every argument of a layer if layers are spread over devices."""
        if self.layout is None:
            return self
        moved = {
            name: x.to(device, non_blocking=non_blocking) if isinstance(x, torch.Tensor) else x
            for name, x in self.layout.items()
        }
        other = copy.copy(self)
        other.__dict__.pop("seqs", None)
        other.layout = moved
        return other

    @functools.cached_property
    def seqs(self) -> SeqLayout | None:
        """Made once for all layers."""
        return None if self.layout is None else SeqLayout(**self.layout)


def register(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"name: got {short(name)} ({type(name).__name__}), expected a str, as in "
            'register_transformers("rawattn")'
        )
    AttentionInterface.register(name, forward)
    masking_utils.AttentionMaskInterface.register(name, mask_spec)


def forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    **others: Any,
) -> tuple[Any, None]:
    """The attention of a layer. query, key, value: (batch, heads, seqlen, D); the result: (batch, seqlen, heads, Dv)."""
    if others.get("output_attentions"):
        raise ValueError(
            "output_attentions: got True, but rawattn never has the probabilities in memory; expected False, or "
            "attn_implementation='eager'"
        )
    if others.get("cache") is not None:
        raise NotImplementedError(
            "cache: got a paged one (continuous batching), which this attention implementation does not read; use "
            "model.generate, or attn_implementation='sdpa'"
        )
    bias, mask = position_bias, None
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        reach = None if sliding_window is None else sliding_window - 1
        attention_mask = MaskSpec((reach, 0 if causal else reach))
    elif bias is not None and isinstance(attention_mask, MaskSpec) and attention_mask.packed:
        # The bias has the axes of the batch, while a packed call would index it by positions inside each packed sequence. So
        # the call is made dense, with the mask in memory.
        assert attention_mask.mask is not None
        attention_mask = attention_mask.mask().to(query.device)
    packed = isinstance(attention_mask, MaskSpec) and attention_mask.packed
    if others.get("cu_seq_lens_q") is not None and not packed:
        raise ValueError(
            "cu_seq_lens_q: got it without position_ids that start anew with each sequence; expected both, as "
            "DataCollatorWithFlattening makes them"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # torch's own attention converts q, k and v under autocast
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    if not isinstance(attention_mask, MaskSpec):
        mask, bias = _in_memory(attention_mask, key.shape[2], bias)
        attention_mask = MaskSpec((None, None))
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.float()
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    seed = None
    if dropout:
        seed = torch.randint(2**31 - 1, (1,), device=q.device)
    if (
        torch.compiler.is_compiling()
    ):  # making one is free when compiled, and a cached property would break the graph
        layout = attention_mask.layout
        seqs = None if layout is None else SeqLayout(**layout)
    else:
        seqs = attention_mask.seqs
    out = attention(
        q,
        k,
        v,
        seqs=seqs,
        window=attention_mask.window,
        align=attention_mask.align,
        scale=scaling,
        bias=bias,
        mask=mask,
        softcap=softcap,
        sink_logits=s_aux,
        dropout_p=float(dropout),
        seed=seed,
    )
    return out.view(query.shape[0], query.shape[2], *out.shape[-2:]), None


def _in_memory(given: Any, seqlen_k: int, bias: Any) -> tuple[Any, Any]:
    """(mask, bias) of a mask (batch, 1 or heads, seqlen_q, seqlen_k), which is bool, True for a key that is seen, or numbers
    to add to the scores.
    """
    if not isinstance(given, torch.Tensor) or given.ndim != 4:
        raise TypeError(
            f"attention_mask: got {type(given).__name__} of shape {tuple(getattr(given, 'shape', ()))}, expected a Tensor "
            "of (batch, seqlen), or one of four axes (batch, heads, seqlen_q, seqlen_k), bool or of numbers to add"
        )
    given = given[..., :seqlen_k]
    if given.dtype == torch.bool:
        return given, bias
    return None, given if bias is None else bias + given


def mask_spec(*, attention_mask: Any = None, **call: Any) -> Any:
    """The mask of a forward pass, for transformers: a `MaskSpec`, or a bool mask. call: what transformers says of the mask."""
    if isinstance(attention_mask, MaskSpec):  # made by `generate` before the pass
        return attention_mask
    return _mask_spec(attention_mask=attention_mask, **call)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads positions of padding back
def _mask_spec(*, device: Any = "cpu", use_vmap: bool = False, **call: Any) -> Any:
    needed = {name: call[name] for name in _OF_MASKS if name in call}
    # Without the shortcuts of sdpa_mask, which return None where torch's is_causal, or no mask, does.
    mask = functools.partial(
        masking_utils.sdpa_mask,
        **needed,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    found = _as_mask_spec(**needed, device=device)
    if found is None:
        return mask()
    found.mask = mask
    return found


_OF_MASKS = (
    *("batch_size", "q_length", "kv_length", "q_offset", "kv_offset"),
    *("mask_function", "attention_mask"),
)


def _as_mask_spec(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    device: Any,
) -> MaskSpec | None:
    """The mask as a `MaskSpec`; None if only a mask in memory can express it."""
    pattern = _pattern(mask_function)
    if pattern is None:
        return None
    window, sequence_ids = pattern.window, pattern.sequence_ids
    if sequence_ids is not None:
        return MaskSpec(window, _packed_layout(sequence_ids), packed=True)

    cached_keys = int(q_offset) - kv_offset  # keys before the first query's own
    # In a causal pass no query sees the keys behind the last query: the free end of a static cache.
    reachable_keys = min(kv_length, cached_keys + q_length) if window[1] == 0 else kv_length
    spans = _spans(attention_mask, batch_size, kv_offset, reachable_keys)
    if spans is None:
        return None
    first, end = spans
    diagonal = window != (None, None)
    top_left = diagonal and (cached_keys == 0 or reachable_keys - q_length != cached_keys)
    if top_left and cached_keys != 0:
        return None
    # Queries that are padding behind their sequence are computed, as torch's own attention does. Where keys come before the
    # first query they are cut off instead: the bottom-right diagonal needs the last query and the last key of a sequence to be
    # those of one token.
    rows = torch.full_like(first, q_length)
    if diagonal and cached_keys:
        rows = (end - cached_keys).clamp(min=0)
    if bool((first == 0).all()):
        lengths = {}
        if bool((rows < q_length).any()):
            lengths["seqlen_q"] = rows
        if bool((end < kv_length).any()):
            lengths["seqlen_k"] = end
        layout = _on(device, lengths) or None
        return MaskSpec(window, layout, top_left=top_left)

    each = torch.arange(batch_size)
    skipped = (first - cached_keys).clamp(min=0) if diagonal else torch.zeros_like(first)
    lengths = {
        "seqstart_q": torch.cat([each * q_length + skipped, torch.tensor([batch_size * q_length])]),
        "seqlen_q": (rows - skipped).clamp(min=0),
        "seqstart_k": torch.cat([each * kv_length + first, torch.tensor([batch_size * kv_length])]),
        "seqlen_k": end - first,
    }
    layout = {
        **_on(device, lengths),
        "max_seqlen_q": q_length,
        "max_seqlen_k": kv_length,
    }
    return MaskSpec(window, layout, top_left=top_left, packed=True)


def _on(device: Any, lengths: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device=device, dtype=torch.int32) for name, x in lengths.items()}


def _spans(mask: Any, batch: int, kv_offset: int, reachable_keys: int) -> tuple[Any, Any] | None:
    """The first key of each sequence and the one past its last, on the host; None if padding lies between tokens."""
    if mask is None:
        return torch.zeros(batch, dtype=torch.int64), torch.full((batch,), reachable_keys)
    mask = mask[:, kv_offset : kv_offset + reachable_keys].bool()
    position = torch.arange(mask.shape[1], device=mask.device)
    spans = torch.stack(
        [
            torch.where(mask, position, mask.shape[1]).amin(1),
            torch.where(mask, position + 1, 0).amax(1),
            mask.sum(1),
        ]
    )
    first, end, count = spans.cpu()
    first = first.clamp(max=end)  # for a sequence that is all padding
    if bool((end - first != count).any()):
        return None
    return first, end


def _packed_layout(sequence_ids: Any) -> dict[str, Any]:
    """The arguments of a `SeqLayout`: neighbouring tokens of equal id are one sequence, and each batch row starts a new one."""
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    total = starts.new_tensor([sequence_ids.numel()])
    longest = sequence_ids.shape[1]
    return {
        "seqstart_q": torch.cat([starts, total]).int(),
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


class _Pattern(NamedTuple):
    window: tuple[int | None, int | None] = (None, None)
    sequence_ids: Any = None


def _pattern(function: Any) -> _Pattern | None:
    """What a mask function of transformers means; None if it is not one of those known here.

    Mask functions are compositions of closures. A closure is recognised by its code object, and the variables that it closes
    over are its parameters.
    """
    if function is masking_utils.causal_mask_function:
        return _Pattern((None, 0))
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern()
    maker = _makers().get(getattr(function, "__code__", None))
    if maker is None:
        return None
    given = {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }
    if maker == "sliding_window_overlay":
        return _Pattern((given["sliding_window"] - 1, None))
    if maker == "sliding_window_bidirectional_overlay":
        return _Pattern((given["sliding_window"], given["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return _Pattern(sequence_ids=given["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # distances of positions stay the same
        return _pattern(given["mask_function"])
    merged = _Pattern()
    for part in map(_pattern, given["mask_functions"]):  # and_masks
        if part is None or (merged.sequence_ids is not None and part.sequence_ids is not None):
            return None
        ends = (
            min((end for end in pair if end is not None), default=None)
            for pair in zip(merged.window, part.window, strict=True)
        )
        ids = part.sequence_ids if merged.sequence_ids is None else merged.sequence_ids
        merged = _Pattern((next(ends), next(ends)), ids)
    return merged


@functools.cache
def _makers() -> dict[Any, str]:
    """The names of transformers' functions that make mask functions, by the code object of what they make."""
    causal = masking_utils.causal_mask_function
    samples = {
        "and_masks": (causal,),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "packed_sequence_mask_function": (None,),
        "remap_positions_for_packed_sequence": (causal, None),  # absent before transformers 5.18
    }
    return {
        getattr(masking_utils, name)(*given).__code__: name
        for name, given in samples.items()
        if hasattr(masking_utils, name)
    }
