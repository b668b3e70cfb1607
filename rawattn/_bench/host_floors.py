"""Lower bounds of the host time of a call: its launches and its results, with nothing around them.

The suite `host` times these beside the calls. A launch here is one of an empty kernel by the driver API, through the binding
that the library uses, and a graph has one such launch. A result is an array from CuPy's pool, or a torch tensor. The floor of
XLA is a program of one operation, and that of autograd a function that only makes the results of both passes and launches
empty kernels.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rawattn._bench.timing import Call

if TYPE_CHECKING:
    from rawattn._bench.host_calls import Setup

_NOTHING = 'extern "C" __global__ void nothing(const void* p) {}'


def launches(setup: Setup, count: int = 1, arrays: int = 0) -> Call:
    """`count` launches, and `arrays` CuPy arrays in the shape of q."""
    cupy = setup.xp
    launch = _launcher(setup)
    shape, dtype = setup.shape, setup.arrays[0].dtype

    def call() -> Any:
        found = [cupy.ndarray(shape, dtype) for _ in range(arrays)]
        for _ in range(count):
            launch()
        return found

    return call


def graph(setup: Setup) -> Call:
    """The launch of a graph of one launch."""
    cupy = setup.xp
    launch, captured_on = _launcher(setup), cupy.cuda.Stream(non_blocking=True)
    with captured_on:
        captured_on.begin_capture()
        launch(captured_on.ptr)
        captured = captured_on.end_capture()
    stream = cupy.cuda.get_current_stream().ptr
    enqueue, handle = cupy.cuda.runtime.graphLaunch, captured.graphExec
    kept = captured, launch  # what the graph launches

    def call(kept: Any = kept) -> None:
        enqueue(handle, stream)

    return call


def torch_launches(setup: Setup, count: int = 1, tensors: int = 1) -> Call:
    """`count` launches, and `tensors` tensors like q."""
    empty_like, q = setup.torch().empty_like, setup.tensors[0]
    launch = _launcher(setup)

    def call() -> Any:
        found = [empty_like(q) for _ in range(tensors)]
        for _ in range(count):
            launch()
        return found

    return call


def jitted(setup: Setup) -> Call:
    """An XLA program with the inputs of attention and one operation."""
    jax = setup.jax()
    return functools.partial(jax.jit(lambda q, k, v: q + v), *setup.jax_arrays)


def autograd(setup: Setup) -> Call:
    """Forward and backward of a function that only makes results, with as many launches as attention has."""
    torch = setup.torch()
    launch = _launcher(setup)

    class Nothing(torch.autograd.Function):  # type: ignore[name-defined, misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            out = torch.empty_like(q)
            launch()
            ctx.save_for_backward(q, k, v, out)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            q, k, v, _ = ctx.saved_tensors
            found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            for _ in range(3):
                launch()
            return found

    qkv = [x.detach().requires_grad_() for x in setup.tensors[:3]]
    dout = setup.tensors[3]
    return lambda: torch.autograd.grad(Nothing.apply(*qkv), qkv, dout)


def _launcher(setup: Setup) -> Callable[..., None]:
    """A function that launches one block of an empty kernel on a stream, by default on CuPy's current one."""
    cupy = setup.xp
    function = cupy.RawKernel(_NOTHING, "nothing")
    current = cupy.cuda.get_current_stream().ptr
    value = ctypes.c_void_p(0)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    at, handle = ctypes.addressof(pointers), function.kernel.ptr
    enqueue = cupy.cuda.driver.launchKernel
    kept = function, value, pointers  # the driver reads them at each launch

    def launch(stream: int = current, kept: Any = kept) -> None:
        enqueue(handle, 1, 1, 1, 32, 1, 1, 0, stream, at, 0)

    return launch
