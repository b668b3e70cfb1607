"""`rawattn.torch.attention`: recorded by autograd in eager mode, a torch operator in compiled functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import torch

from rawattn._call.option_advice import learned_slopes
from rawattn._call.options import ForwardOptions, Options, flag
from rawattn._call.signatures import options_of, takes_options
from rawattn._torch import eager, ops
from rawattn._verbs.attention import CallOptions

if TYPE_CHECKING:  # type checkers ship it; it is no dependency of this package
    from typing_extensions import Unpack


TensorT = TypeVar("TensorT")


class TorchOptions(CallOptions, total=False):
    """For type checkers: the keywords of `attention`, except `return_lse`."""

    deterministic: bool


@overload
def attention(
    q: TensorT,
    k: Any,
    v: Any,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[TorchOptions],
) -> TensorT: ...


@overload
def attention(
    q: TensorT, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[TorchOptions]
) -> tuple[TensorT, Any]: ...


@overload
def attention(
    q: TensorT, k: Any, v: Any, *, return_lse: bool, **options: Unpack[TorchOptions]
) -> TensorT | tuple[TensorT, Any]: ...


@eager.with_fast_path
@takes_options(ForwardOptions)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    deterministic: bool = False,
    backend: Literal["cuda", "cpu"] | None = None,
    **options: Unpack[ForwardOptions],
) -> Any:
    """`rawattn.attention` of torch tensors, differentiable by autograd and usable under torch.compile.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, nheads_q, D), or (total_q, nheads_q, D) in group mode
        float16, bfloat16 or float32. Autocast converts nothing: q, k and v must share one dtype as they are given.
        For tensors of shape (batch, heads, seqlen, D), as torch's own attention takes them, pass ``q.transpose(1, 2)``;
        nothing is copied.
    k : Tensor, (batch, seqlen_k, nheads_kv, D), or (total_k, nheads_kv, D)
    v : Tensor, (batch, seqlen_k, nheads_kv, Dv), or (total_k, nheads_kv, Dv)
    seqs : SeqLayout, optional
        Made of torch tensors, NumPy arrays or lists, inside a compiled function or before it.
    causal, align
        As in `rawattn.attention`. Where seqlen_q differs from seqlen_k, `causal` is aligned to the bottom right by default;
        ``align="top-left"`` is what torch's ``is_causal`` does.
    return_lse : bool
        Also return lse, float32, (batch, nheads_q, seqlen_q) or (nheads_q, total_q). It is differentiable too.
    out : Tensor, optional
        Written and returned. Accepted only where no gradient is recorded, and not in a compiled function.
    deterministic : bool
        Whether the backward gives the same bits run after run.
    bias, sink_logits : Tensor, optional
        As in `rawattn.attention`, with gradients.
    alibi_slopes, seed
        As in `rawattn.attention`; they get no gradients. Slopes that require grad raise RuntimeError. A `seed` in a tensor is
        read by the kernels, so a seed on the GPU that is incremented between calls gives every replay of a CUDA graph another
        dropout mask. Incrementing it between a call and its backward raises autograd's error for tensors changed in place.
    score_mod : rawattn.ScoreMod, optional
        Captured tensors that its ``wrt`` names get gradients; other captured tensors that require grad raise RuntimeError. A
        compiled function needs a `ScoreMod` or a `BlockMask` that was made before it and lives as long as it does.
    **options
        The other options of `rawattn.attention`, as there; they get no gradients.
    backend : "cuda" or "cpu", optional
        As in `rawattn.attention`.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, nheads_q, Dv) or (total_q, nheads_q, Dv)
    lse : Tensor, only with ``return_lse``

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `rawattn.attention`, before anything is launched. float64 raises TypeError.
    ImportError
        For tensors on a GPU where CuPy, which loads the kernels, is not installed.
    RuntimeError
        If the gradient itself is differentiated, or a tensor has a forward-mode tangent: only first derivatives in reverse
        mode are supported.

    Notes
    -----
    q, k, v, out and lse are kept for the backward by `save_for_backward`, so saved-tensor hooks, activation checkpointing
    and the check for tensors changed in place work. Nothing is kept if no input requires grad or grad mode is off.
    Work runs on torch's current stream and takes its memory from torch.

    Under torch.compile, also with ``fullgraph=True``, the call becomes the operator ``rawattn::attention`` in the graph.
    The same holds under torch.export, ``make_fx`` and every other dispatch mode. ``torch.jit.trace`` is refused with a
    RuntimeError.

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
    compiles = torch.compiler.is_compiling()
    traced = compiles or (eager.is_traced() and out is None)
    if compiles:  # torch cannot trace `options_of`, which looks for the name that was meant
        for name in options:
            if name not in Options._fields:
                raise TypeError(f"{name}: rawattn.torch.attention has no such argument")
        given = Options(**options)
    else:
        given = options_of(options, ForwardOptions, "rawattn.torch.attention", attention)
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        _refuse_others(q, k, v)
    if given.alibi_slopes is not None and getattr(given.alibi_slopes, "requires_grad", False):
        _refuse_slopes(given.align)
    if traced:
        if out is not None:
            raise ValueError(f"out: got a tensor in a {_COMPILED}; expected None")
        if not compiles:
            given = ops.with_tensors(given)
        arguments = ops.arguments_of(given, deterministic, backend)
        result = ops.run(q, k, v, ops.layout_of(given.seqs), arguments)
        return result if flag("return_lse", return_lse) else result[0]
    own = {"return_lse": return_lse, "out": out, "deterministic": deterministic, "backend": backend}
    return eager.run(q, k, v, **options, **own)


def _refuse_slopes(align: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "alibi_slopes: got a tensor that requires a gradient, which it does not get; pass alibi_slopes.detach(), or "
            f"score_mod={learned_slopes(align)}"
        )


_COMPILED = "function under torch.compile, where it cannot be used"


def _refuse_others(*inputs: Any) -> NoReturn:
    name, x = next(
        (n, x) for n, x in zip("qkv", inputs, strict=True) if not isinstance(x, torch.Tensor)
    )
    raise TypeError(
        f"{name}: got {type(x).__name__}, expected a torch.Tensor; rawattn.attention takes arrays of every library"
    )
