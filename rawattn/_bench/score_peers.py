"""Attention of other libraries with biases, masks and score functions. A framework is imported at its peer's first case."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rawattn._bench.cases import Case
from rawattn._bench.contender import Contender, Inputs
from rawattn._bench.grids import CUDNN, EFFICIENT, FLEX, FSA
from rawattn._bench.peers import FlashAttention4, Torch, TorchFlash, TorchSDPA, first_of, tensors
from rawattn._bench.score_features import Alibi, Bias, Documents, Dropout, Sinks, Softcap
from rawattn._bench.timing import Call


def peers() -> list[Contender]:
    """All peers; flash-sparse-attention, which is rare, only if it is installed."""
    found: list[Contender] = [CudnnBias(), EfficientBias(), FlashDropout(), FlashScores(), Flex()]
    return [*found, FlashSparse()] if importlib.util.find_spec("flash_sparse_attn") else found


def _missing(case: Case) -> NotImplementedError:
    return NotImplementedError(f"{type(case.feature).__name__.lower()} is not measured here")


class CudnnBias(TorchSDPA):
    """cuDNN with the bias as `attn_mask`. The causal mask is part of it, since torch refuses `is_causal` beside a mask. It has
    no dbias.
    """

    def __init__(self) -> None:
        super().__init__(CUDNN, "CUDNN_ATTENTION")

    def tensors(self, case: Case, inputs: Inputs) -> list[Any]:
        if not isinstance(case.feature, Bias):
            raise _missing(case)
        return super().tensors(case, inputs)

    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        return _sdpa(case, qkv, _hidden(case, inputs), enable_gqa=case.nheads_q != case.nheads_kv)


class EfficientBias(TorchSDPA):
    """torch's memory-efficient attention with the bias as `attn_mask`. It has dbias: autograd's gradient of the mask."""

    def __init__(self) -> None:
        super().__init__(EFFICIENT, "EFFICIENT_ATTENTION")

    def tensors(self, case: Case, inputs: Inputs) -> list[Any]:
        if not isinstance(case.feature, Bias):
            raise _missing(case)
        return [*super().tensors(case, inputs), _hidden(case, inputs)]

    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        *qkv, mask = qkv
        group = case.nheads_q // case.nheads_kv
        if group == 1:
            return _sdpa(case, qkv, mask)

        def repeated() -> Any:
            # This kernel does not support GQA.
            q, *kv = qkv
            return _sdpa(case, [q, *(x.repeat_interleave(group, dim=2) for x in kv)], mask)()

        return repeated


def _sdpa(case: Case, qkv: Sequence[Any], mask: Any, **options: Any) -> Call:
    import torch

    transposed = [x.transpose(1, 2) for x in qkv]  # (batch, heads, rows, D)
    # The kernels need the mask's batch and head axes in full; `expand` takes no memory.
    mask = mask.expand(case.batch, case.nheads_q, case.rows, case.keys)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return functools.partial(sdpa, *transposed, attn_mask=mask, **options)


def _hidden(case: Case, inputs: Inputs) -> Any:
    """The bias, with -inf for keys that a causal case hides."""
    import torch

    (bias,) = tensors(inputs.extras["bias"])
    if not case.causal:
        return bias.clone()
    later = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
    return bias.masked_fill(later, float("-inf"))


class FlashDropout(TorchFlash):
    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        if not isinstance(case.feature, Dropout):
            raise _missing(case)
        call: Callable[..., Any] = super().call(case, inputs, qkv)
        return functools.partial(call, dropout_p=case.feature.p)


class FlashScores(FlashAttention4):
    def options(self, case: Case, inputs: Inputs) -> dict[str, Any]:
        if isinstance(case.feature, Softcap):
            return {"softcap": case.feature.cap}
        if isinstance(case.feature, Sinks):
            import torch

            (sinks,) = tensors(inputs.extras["sink_logits"])
            return {"learnable_sink": sinks.to(torch.bfloat16)}
        raise _missing(case)


class Flex(Torch):
    """FlexAttention under torch.compile, compiled anew for each case."""

    called = "compiled, from PyTorch (flex_attention)"

    def __init__(self) -> None:
        super().__init__(FLEX)
        self._case: Case | None = None
        self._attention: Callable[..., Any]

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        import torch
        from torch._functorch import config

        # Donated buffers do not allow several backwards on one graph. The setting is per thread, so autograd must run on
        # this thread.
        with (
            super().scope(),
            config.patch(donated_buffer=False),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield

    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        if case != self._case:
            self._attention = _compiled(case, inputs, qkv[0].device)
            self._case = case
        transposed = [x.transpose(1, 2) for x in qkv]
        return functools.partial(self._attention, *transposed)

    def out(self, result: Any) -> Any:
        return result.transpose(1, 2)


def _compiled(case: Case, inputs: Inputs, device: Any) -> Callable[..., Any]:
    import torch
    from torch.nn.attention import flex_attention as flex

    # torch.compile stops recompiling a function after too many different arguments, so it is reset for each case.
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(flex.flex_attention, dynamic=False)
    score_mod, keeps = _flex_score(case, inputs), _flex_mask(case, inputs)
    mask = flex.create_block_mask(keeps, None, None, case.rows, case.keys, device=device)
    return functools.partial(compiled, score_mod=score_mod, block_mask=mask)


def _flex_score(case: Case, inputs: Inputs) -> Callable[..., Any] | None:
    import torch

    feature = case.feature
    if isinstance(feature, Softcap):
        cap = feature.cap
        return lambda score, b, h, i, j: cap * torch.tanh(score / cap)
    if isinstance(feature, Alibi):
        (slopes,) = tensors(inputs.extras["slopes"])
        return lambda score, b, h, i, j: score + slopes[h] * (j - i)
    if isinstance(feature, Documents):
        return None
    raise _missing(case)


def _flex_mask(case: Case, inputs: Inputs) -> Callable[..., Any]:
    if isinstance(case.feature, Documents):
        (document,) = tensors(inputs.extras["document"])
        return lambda b, h, i, j: document[i] == document[j]
    return lambda b, h, i, j: i >= j


class FlashSparse(Torch):
    """The Triton kernel of flash-sparse-attention, with its own causal mask and its own dbias."""

    called = "eager, from PyTorch (triton_sparse_attn_func)"

    def __init__(self) -> None:
        super().__init__(FSA)

    def tensors(self, case: Case, inputs: Inputs) -> list[Any]:
        if not isinstance(case.feature, Bias):
            raise _missing(case)
        return [*super().tensors(case, inputs), *tensors(inputs.extras["bias"])]

    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        # Later versions of the package have other functions.
        module = importlib.import_module("flash_sparse_attn.flash_sparse_attn_triton")
        *qkv, bias = qkv
        options = {"attn_bias": bias, "is_causal": case.causal}
        return functools.partial(module.triton_sparse_attn_func, *qkv, **options)

    def out(self, result: Any) -> Any:
        return first_of(result)
