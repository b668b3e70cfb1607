"""Who is measured: rawattn and its peers. A framework is imported by its peer's first case."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import rawattn
from rawattn._backends import gpu_available
from rawattn._bench.cases import CUDNN, FA2, FA4, JAX, Case
from rawattn._bench.timing import BURST_SECONDS, Call, Clock, HostClock
from rawattn._compile import device_arch
from rawattn._kernels import only, sm90_forward


@dataclass(frozen=True, slots=True)
class Inputs:
    """CuPy arrays of a case, in the shapes of `rawattn.attention`."""

    qkv: tuple[Any, ...]
    seqstart: Any = None
    max_seqlen: int = 0


class Contender:
    """One implementation of attention."""

    burst_seconds = BURST_SECONDS

    def __init__(self, name: str) -> None:
        self.name = name

    def clock(self, events: Clock) -> Clock:
        """How its calls are timed: by events, where it runs on CuPy's current stream."""
        return events

    def scope(self) -> AbstractContextManager[Any]:
        """Entered around its calls."""
        return contextlib.nullcontext()

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        """The call to measure. Raises when it cannot do the case."""
        raise NotImplementedError

    def read(self, result: Any) -> Any:
        """A result as a CuPy array in the shape of q."""
        return result


def families() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """The library's kernels by the name to show, each with the scope that forces them.

    The first is what a caller gets. Where that is not the portable kernel, the portable one is shown beside it.
    """
    ours: dict[str, Callable[[], AbstractContextManager[Any]]] = {"rawattn": contextlib.nullcontext}
    if gpu_available() and device_arch(0) == sm90_forward.ARCH:
        ours["portable"] = lambda: only("portable")
    return ours


def contenders() -> list[Contender]:
    """Ours first."""
    ours = [Ours(name, scope) for name, scope in families().items()]
    peers = [TorchSDPA(CUDNN, "CUDNN_ATTENTION"), TorchSDPA(FA2, "FLASH_ATTENTION")]
    return [*ours, *peers, FlashAttention4(), JaxCudnn()]


class Ours(Contender):
    def __init__(self, name: str, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(name)
        self._scope = scope

    def scope(self) -> AbstractContextManager[Any]:
        return self._scope()

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        seqs = None
        if case.packed:
            # Lengths on the GPU, as a training loop has them.
            longest = inputs.max_seqlen
            seqs = rawattn.SeqLayout(
                seqstart_q=inputs.seqstart, max_seqlen_q=longest, max_seqlen_k=longest
            )
        options: dict[str, Any] = {"seqs": seqs, "causal": case.causal, "window": case.window}
        return functools.partial(rawattn.attention, *inputs.qkv, **options)


class _Torch(Contender):
    def scope(self) -> AbstractContextManager[Any]:
        import torch

        scope: AbstractContextManager[Any] = torch.no_grad()
        return scope

    def read(self, result: Any) -> Any:
        import cupy

        return cupy.from_dlpack(result)

    def tensors(self, inputs: Inputs) -> list[Any]:
        import cupy
        import torch

        if torch.cuda.current_stream().cuda_stream != cupy.cuda.get_current_stream().ptr:
            raise RuntimeError(
                "torch and CuPy do not use the same stream, so events cannot time it"
            )
        return [torch.from_dlpack(array) for array in inputs.qkv]


class TorchSDPA(_Torch):
    """torch's scaled_dot_product_attention, held to one of its kernels."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name)
        self._backend = backend

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        from torch.nn import attention

        backend = getattr(attention.SDPBackend, self._backend)
        with super().scope(), attention.sdpa_kernel([backend]):
            yield

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        import torch

        if case.packed or case.window:
            raise NotImplementedError(
                "scaled_dot_product_attention takes neither lengths nor window"
            )
        qkv = [x.transpose(1, 2) for x in self.tensors(inputs)]  # (batch, heads, rows, D)
        options = {"is_causal": case.causal, "enable_gqa": case.nheads_q != case.nheads_kv}
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(sdpa, *qkv, **options)

    def read(self, result: Any) -> Any:
        return super().read(result.transpose(1, 2))


class FlashAttention4(_Torch):
    """FlashAttention-4 (CuTe-DSL): its kernels of the GPU at hand."""

    def __init__(self) -> None:
        super().__init__(FA4)

    def prepare(self, case: Case, inputs: Inputs) -> Call:
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
        return functools.partial(function, *self.tensors(inputs), **options)

    def read(self, result: Any) -> Any:
        return super().read(result[0] if isinstance(result, tuple) else result)


class JaxCudnn(Contender):
    """jax.nn.dot_product_attention on cuDNN. JAX does not tell its stream: by the host's clock."""

    # Long, so that starting and waiting weigh little.
    burst_seconds = 3 * BURST_SECONDS

    def __init__(self) -> None:
        super().__init__(JAX)

    def clock(self, events: Clock) -> Clock:
        return HostClock(_jax().block_until_ready)

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        if case.packed:
            raise NotImplementedError("dot_product_attention takes no packed sequences")
        arrays = [_jax().dlpack.from_dlpack(array) for array in inputs.qkv]
        return functools.partial(_jitted(case.causal, case.window_left), *arrays)

    def read(self, result: Any) -> Any:
        import cupy

        return cupy.from_dlpack(result)


def _jax() -> Any:
    # Otherwise JAX takes three quarters of the GPU's memory at its first call.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


@functools.cache
def _jitted(causal: bool, window_left: int | None) -> Any:
    jax = _jax()
    attention = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=causal,
        local_window_size=None if window_left is None else (window_left, 0),
        implementation="cudnn",
    )
    return jax.jit(attention)
