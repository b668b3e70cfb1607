"""`rawattn.attention` as a function of PyTorch: autograd, torch.compile, and models of `transformers`.

The only module beside `rawattn.jax` that imports a framework, and only when it is imported itself.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

import rawattn
from rawattn import ScoreMod, SeqLayout
from rawattn._call.hints import NoOthers, hides_unknown, no_attribute, refuse_unknown
from rawattn._call.options import flag
from rawattn._masks.block_mask import BlockMask
from rawattn._torch import eager, ops
from rawattn._torch.captured import checked

if TYPE_CHECKING:  # type checkers bring it: nothing is installed for it
    from typing_extensions import Unpack

__all__ = ["attention", "register_transformers"]


@eager.repeating
@hides_unknown
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    seqs: SeqLayout | None = None,
    causal: bool = False,
    align: Literal["bottom-right", "top-left"] = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    sink: int = 0,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    score_mod: Any = None,
    sink_logits: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    deterministic: bool = False,
    backend: Literal["cuda", "cpu"] | None = None,
    **unknown: Unpack[NoOthers],
) -> Any:
    """`rawattn.attention` of torch tensors, differentiable by autograd and fit for torch.compile.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        float16, bfloat16 or float32. Autocast does not convert it: q, k and v are of the one dtype they come with.
        Of torch's own (batch, heads, seqlen, D), pass ``q.transpose(1, 2)``: nothing is copied.
    k : Tensor, (batch, seqlen_k, nheads_kv, D), or (total_k, nheads_kv, D)
    v : Tensor, (batch, seqlen_k, nheads_kv, Dv), or (total_k, nheads_kv, Dv)
    seqs : SeqLayout, optional
        Of torch tensors, NumPy arrays or lists. In a compiled function: of host integers.
    causal, align, window, sink, scale, num_splits, backend
        As in `rawattn.attention`. Where seqlen_q differs from seqlen_k, `causal` is aligned to the bottom right;
        torch's ``is_causal`` is ``align="top-left"``.
    return_lse : bool
        Also return lse, float32, (batch, nheads_q, seqlen_q) or (nheads_q, total_q). It is differentiable too.
    out : Tensor, optional
        Written and returned. Only where no gradient is recorded, and not in a compiled function.
    deterministic : bool
        Of the backward: the same bits run after run.
    bias, sink_logits : Tensor, optional
        As in `rawattn.attention`, with gradients.
    mask, alibi_slopes, softcap, dropout_p, seed
        As in `rawattn.attention`; constants. Slopes that require grad are a RuntimeError. A `seed` in a tensor is read by the
        kernels: one on the GPU that is counted up between calls draws anew in every replay of a CUDA graph. Counted up between
        a call and its backward it is autograd's error for tensors changed in place.
    score_mod : rawattn.ScoreMod, optional
        Tensors that it captures get gradients where its ``wrt`` names them; others that require grad are a RuntimeError. In a
        compiled function: one that was made before, and lives as long; so does a `BlockMask`.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : Tensor, only with ``return_lse``

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rawattn.attention`, before anything is launched; double precision is a TypeError.
    RuntimeError
        From torch, when the gradient itself is differentiated: there are first derivatives alone.

    Notes
    -----
    q, k, v, out and lse are kept for the backward, by `save_for_backward`: saved-tensor hooks, activation checkpointing
    and the check for tensors changed in place work. Nothing is kept where no input requires grad or grad mode is off.
    Work runs on torch's current stream and takes its memory from torch.

    In a function under torch.compile the call is the operator ``rawattn::attention`` of the graph, also with
    ``fullgraph=True``.

    Examples
    --------
    >>> import torch
    >>> from rawattn.torch import attention
    >>> q = torch.randn(2, 5, 4, 16, requires_grad=True)
    >>> k, v = torch.randn(2, 2, 7, 2, 16)
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> (out.sum() + lse.sum()).backward()
    >>> q.grad.shape
    torch.Size([2, 5, 4, 16])
    """
    if unknown:
        if torch.compiler.is_compiling():  # which cannot follow what finds the name that is meant
            raise TypeError(f"{next(iter(unknown))}: rawattn.torch.attention has no such argument")
        refuse_unknown("rawattn.torch.attention", unknown, inspect.signature(attention).parameters)
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        _refuse_others(q, k, v)
    if alibi_slopes is not None and getattr(alibi_slopes, "requires_grad", False):
        _refuse_slopes()
    if torch.compiler.is_compiling():
        if out is not None:
            raise ValueError(f"out: got a tensor in a {_COMPILED}; expected None")
        captured: tuple[Any, ...] = ()
        score_handle = mask_handle = None
        if isinstance(score_mod, ScoreMod):
            captured, score_handle = checked(score_mod), score_mod.handle
        elif score_mod is not None:
            raise TypeError(
                f"score_mod: got {type(score_mod).__name__}, expected a rawattn.ScoreMod or None"
            )
        if isinstance(mask, BlockMask):
            mask, mask_handle = None, mask.handle
        ops.check(
            {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sink_logits": sink_logits},
            causal,
            sink,
            seqs,
        )
        left, right = ops.ends_of(window)
        seed, seed_array = ops.seed_of(seed)
        traced = ops.Options(
            bias=bias, sink_logits=sink_logits, mask=mask, alibi_slopes=alibi_slopes, causal=causal, align=align,
            window_left=left, window_right=right, sink=sink, scale=scale, softcap=softcap, dropout_p=dropout_p,
            seed=seed, seed_array=seed_array, num_splits=num_splits,
            deterministic=flag("deterministic", deterministic), backend=backend,
            block_mask=mask_handle, score_mod=score_handle, captured=captured,
        )  # fmt: skip
        result = ops.run(q, k, v, ops.layout_of(seqs), traced)
        return result if flag("return_lse", return_lse) else result[0]
    return eager.run(
        q, k, v, seqs=seqs, causal=causal, align=align, window=window, sink=sink, scale=scale, bias=bias, mask=mask,
        alibi_slopes=alibi_slopes, softcap=softcap, score_mod=score_mod, sink_logits=sink_logits, dropout_p=dropout_p,
        seed=seed, num_splits=num_splits, return_lse=return_lse, out=out, deterministic=deterministic, backend=backend,
    )  # fmt: skip


def _refuse_slopes() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "alibi_slopes: got a tensor that requires a gradient, which it does not get; pass alibi_slopes.detach(), or "
            'rawattn.ScoreMod("score - slope[head] * abs(q_idx + seqlen_k - seqlen_q - kv_idx)", wrt="slope", slope=...)'
        )


_COMPILED = "function under torch.compile, where it cannot be used"


def _refuse_others(*inputs: Any) -> NoReturn:
    name, x = next(
        (n, x) for n, x in zip("qkv", inputs, strict=True) if not isinstance(x, torch.Tensor)
    )
    raise TypeError(
        f"{name}: got {type(x).__name__}, expected a torch.Tensor; rawattn.attention takes arrays of every library"
    )


def register_transformers(name: str = "rawattn") -> None:
    """Make `rawattn.torch.attention` an attention implementation of `transformers`.

    Models made with ``attn_implementation=name``, and models told so by ``model.set_attn_implementation(name)``, then
    train and generate with it. Registering twice changes nothing.

    Parameters
    ----------
    name : str
        What transformers is to call it.

    Raises
    ------
    ImportError
        Where transformers is not installed.

    Notes
    -----
    Without a mask in memory: causal, full and sliding-window attention, padding on either side, packed sequences by
    `position_ids`, prefill and decoding with a dynamic or static cache. Of queries that are padding the results mean
    nothing. Everything else comes as a mask or as numbers to add: padding between tokens, chunked attention, masks of four
    axes, position biases. Soft caps, learned sinks and attention dropout are taken too. `output_attentions` is a
    ValueError, and a paged cache of continuous batching a NotImplementedError.
    Under autocast q, k and v are converted as for torch's own attention. Where the padding is, is read back once a
    forward pass, which waits for the GPU; torch.compile breaks its graph there.

    Examples
    --------
    >>> from rawattn.torch import register_transformers
    >>> register_transformers()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...                      num_attention_heads=4, num_key_value_heads=2, attn_implementation="rawattn")
    >>> model = LlamaForCausalLM(config)
    >>> ids = torch.arange(12).view(2, 6)
    >>> model(ids, labels=ids).loss.backward()
    """
    from rawattn._torch import transformers

    transformers.register(name)


def __getattr__(name: str) -> NoReturn:
    raise no_attribute("rawattn.torch", name, rawattn.__all__)
