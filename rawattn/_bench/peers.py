"""Attention of other libraries. A framework is imported at its peer's first case."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rawattn._bench.cases import Case
from rawattn._bench.contender import Contender, Inputs
from rawattn._bench.grids import CUDNN, FA2, FA4, JAX
from rawattn._bench.timing import Call, Clock, HostClock


def peers(verb: str) -> list[Contender]:
    """The peers that are measured on a verb, forward or backward."""
    torch: list[Contender] = [TorchSDPA(CUDNN, "CUDNN_ATTENTION"), TorchFlash(), FlashAttention4()]
    # JAX's backward is cuDNN's too, which torch shows already.
    return [*torch, JaxCudnn()] if verb == "forward" else torch


class Torch(Contender):
    """A contender on torch tensors. Its backward is the one that autograd recorded for one forward."""

    def scope(self) -> AbstractContextManager[Any]:
        import torch

        scope: AbstractContextManager[Any] = torch.no_grad()
        return scope

    def tensors(self, case: Case, inputs: Inputs) -> list[Any]:
        """q, k and v, and other tensors whose gradients are wanted."""
        return tensors(*inputs.qkv)

    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        """The forward on these tensors."""
        raise NotImplementedError

    def forward(self, case: Case, inputs: Inputs) -> Call:
        return self.call(case, inputs, self.tensors(case, inputs))

    def backward(self, case: Case, inputs: Inputs) -> Call:
        import torch

        leaves = [x.requires_grad_() for x in self.tensors(case, inputs)]
        with torch.enable_grad():
            out = self.out(self.call(case, inputs, leaves)())
        dout = torch.from_dlpack(inputs.dout)
        # retain_graph keeps the graph and the saved tensors, so every call runs the same kernels on the same arrays.
        # autograd runs them on the stream of the forward, on which the events are recorded, and returns once all are
        # enqueued. `grad` returns the gradients and adds nothing to `.grad`, so nothing but the backward runs.
        return functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)

    def array(self, x: Any) -> Any:
        import cupy

        return cupy.from_dlpack(x)


def tensors(*arrays: Any) -> list[Any]:
    """CuPy arrays as torch tensors. RuntimeError if torch and CuPy have different current streams."""
    import cupy
    import torch

    if torch.cuda.current_stream().cuda_stream != cupy.cuda.get_current_stream().ptr:
        raise RuntimeError("torch and CuPy do not use the same stream, so events cannot time it")
    return [torch.from_dlpack(array) for array in arrays]


def first_of(result: Any) -> Any:
    """`out`, of a function that may return (out, lse, ...) too."""
    return result[0] if isinstance(result, tuple) else result


def flash4_splits() -> dict[str, int]:
    """The option by which FlashAttention-4 chooses into how many pieces it splits the keys of few rows.

    Its default is one piece. It can only split on data centre GPUs of the Blackwell generation; elsewhere it refuses.
    """
    import torch

    return {"num_splits": 0} if torch.cuda.get_device_capability()[0] in (10, 11) else {}


class TorchSDPA(Torch):
    """torch's scaled_dot_product_attention, restricted to one of its backends."""

    called = "eager, from PyTorch (scaled_dot_product_attention)"

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name)
        self._backend = backend

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        from torch.nn import attention

        backend = getattr(attention.SDPBackend, self._backend)
        with super().scope(), attention.sdpa_kernel([backend]):
            yield

    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        import torch

        if case.packed or case.window:
            raise NotImplementedError(
                "scaled_dot_product_attention takes neither lengths nor window"
            )
        transposed = [x.transpose(1, 2) for x in qkv]  # (batch, heads, rows, D)
        options = {"is_causal": case.causal, "enable_gqa": case.nheads_q != case.nheads_kv}
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(sdpa, *transposed, **options)

    def out(self, result: Any) -> Any:
        # The operator for packed sequences returns a tuple, with `out` in the layout of q.
        return result[0] if isinstance(result, tuple) else result.transpose(1, 2)


class TorchFlash(TorchSDPA):
    """FlashAttention-2 as shipped with torch. For packed sequences: the operator that torch's varlen attention uses."""

    called = "eager, from PyTorch (scaled_dot_product_attention; packed: its varlen operator)"

    def __init__(self) -> None:
        super().__init__(FA2, "FLASH_ATTENTION")

    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        import torch

        if not case.packed or case.window:
            return super().call(case, inputs, qkv)
        starts = torch.from_dlpack(inputs.seqstart)
        lengths = (starts, starts, inputs.max_seqlen, inputs.max_seqlen)
        dropout_p, return_debug_mask = 0.0, False
        flash = torch.ops.aten._flash_attention_forward
        return functools.partial(flash, *qkv, *lengths, dropout_p, case.causal, return_debug_mask)


class FlashAttention4(Torch):
    """FlashAttention-4 (CuTe-DSL): its kernels for the current GPU."""

    called = "eager, from PyTorch (flash_attn.cute)"

    def __init__(self) -> None:
        super().__init__(FA4)

    def call(self, case: Case, inputs: Inputs, qkv: Sequence[Any]) -> Call:
        import torch
        from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

        options: dict[str, Any] = {
            "causal": case.causal,
            "window_size": case.window or (None, None),
        }
        if case.packed:
            starts = torch.from_dlpack(inputs.seqstart)
            options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            options |= {"max_seqlen_q": inputs.max_seqlen, "max_seqlen_k": inputs.max_seqlen}
        function = flash_attn_varlen_func if case.packed else flash_attn_func
        return functools.partial(function, *qkv, **options, **self.options(case, inputs))

    def options(self, case: Case, inputs: Inputs) -> dict[str, Any]:
        """The options for the case's feature."""
        return {}

    def out(self, result: Any) -> Any:
        return first_of(result)


class JaxCudnn(Contender):
    """jax.nn.dot_product_attention on cuDNN. JAX does not expose its stream, so it is timed by the host's clock."""

    called = "jitted, from JAX (dot_product_attention)"
    # Long bursts, so that starting and waiting have little weight.
    burst_factor = 3

    def __init__(self) -> None:
        super().__init__(JAX)

    def clock(self, events: Clock) -> Clock:
        return HostClock(import_jax().block_until_ready)

    def forward(self, case: Case, inputs: Inputs) -> Call:
        if case.packed:
            raise NotImplementedError("dot_product_attention takes no packed sequences")
        arrays = [import_jax().dlpack.from_dlpack(array) for array in inputs.qkv]
        return functools.partial(_jitted(case.causal, case.window_left), *arrays)

    def array(self, x: Any) -> Any:
        import cupy

        return cupy.from_dlpack(x)


def import_jax() -> Any:
    """The module. Unless it is imported already, it is set to leave GPU memory to others."""
    # By default JAX allocates three quarters of the GPU's memory at its first call.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


@functools.cache
def _jitted(causal: bool, window_left: int | None) -> Any:
    jax = import_jax()
    attention = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=causal,
        local_window_size=None if window_left is None else (window_left, 0),
        implementation="cudnn",
    )
    return jax.jit(attention)
