"""The calls whose host time `rawattn bench --suite host` compares with that of torch's SDPA.

All have the same size, 128 rows of 16 heads with D 128: so small that the GPU finishes before the host has made the next
call. A `make` function prepares what a caller would keep, and returns the call that is timed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import rawattn
from rawattn._bench import host_floors, machine, peers
from rawattn._bench.timing import Call

SHAPE = (1, 128, 16, 128)
# Lengths of the ragged batches, which add up to the rows of SHAPE.
_LENGTHS = (16, 48, 24, 40)
_ORDERS = 8  # permutations of the lengths, so that each call has other lengths than the last one

FORWARD = "torch SDPA"
BACKWARD = "torch SDPA backward"
BOTH = "torch SDPA forward + backward"


class Absent(RuntimeError):
    """Something that a call needs is not installed or not available. It is no failure."""


class Setup:
    """The inputs of all calls, made when a call first needs them.

    Parameters
    ----------
    xp, device
        CuPy and "cuda"; or NumPy and "cpu", to try the calls without a GPU.
    dtype
        The name of the dtype of q, k, v.
    shape
        The shape of q, k, v. `lengths` must add up to its rows.
    """

    def __init__(
        self,
        xp: Any,
        device: str = "cuda",
        dtype: str = "bfloat16",
        shape: tuple[int, ...] = SHAPE,
        lengths: Sequence[int] = _LENGTHS,
    ) -> None:
        self.xp, self.device, self.dtype, self.shape = xp, device, dtype, shape
        orders = itertools.islice(itertools.permutations(lengths), _ORDERS)
        self.starts = [np.cumsum([0, *order], dtype=np.int32) for order in orders]
        self.longest = max(lengths)

    @functools.cached_property
    def arrays(self) -> list[Any]:
        """q, k, v, dout as CuPy arrays."""
        if self.device == "cuda":
            return [machine.random_array(self.shape, self.dtype) for _ in range(4)]
        rng = np.random.default_rng(0)
        return [rng.standard_normal(self.shape, np.float32).astype(self.dtype) for _ in range(4)]

    @functools.cached_property
    def tensors(self) -> list[Any]:
        """q, k, v, dout as torch tensors."""
        torch = self.torch()
        options = {"dtype": getattr(torch, self.dtype), "device": self.device}
        return [torch.randn(self.shape, **options) for _ in range(4)]

    @functools.cached_property
    def jax_arrays(self) -> list[Any]:
        """q, k, v as JAX arrays."""
        jax = self.jax()
        keys = jax.random.split(jax.random.key(0), 3)
        return [jax.random.normal(key, self.shape, dtype=self.dtype) for key in keys]

    def torch(self) -> Any:
        """The module. Absent if torch, or a GPU that it can use, is missing."""
        torch = _imported("torch")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise Absent("torch has no GPU here")
        return torch

    def jax(self) -> Any:
        """The module. Absent if JAX, or a GPU that it can use, is missing."""
        jax = _imported("jax", peers.import_jax)
        if self.device == "cuda" and jax.default_backend() != "gpu":
            raise Absent("JAX has no GPU here")
        return jax


def _imported(name: str, importer: Callable[[], Any] | None = None) -> Any:
    """The module. Absent if it is not installed; a broken module raises its own error."""
    try:
        return importlib.import_module(name) if importer is None else importer()
    except ImportError as error:
        if error.name != name:
            raise
        raise Absent(f"no module {name}") from None


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call to time. bound: the most for its time over that of the call `over`. also: another call to compare with."""

    name: str
    make: Callable[[Setup], Call]
    bound: float | None = None
    over: str = FORWARD
    also: str = ""


def calls() -> list[HostCall]:
    """All calls. Those in `over` and `also` of others come first."""
    found = [
        HostCall(FORWARD, _sdpa, over=""),
        HostCall(BACKWARD, _sdpa_backward, over=""),
        HostCall(BOTH, _sdpa_both, over=""),
        HostCall("CuPy", lambda s: _attention(s.arrays), 0.40),
        HostCall("CuPy, out=", _into, 0.45),
        HostCall("CuPy, lse", lambda s: _attention(s.arrays, return_lse=True), 0.45),
        HostCall("CuPy backward", lambda s: _backward(s.arrays), 0.9, also=BACKWARD),
        HostCall("torch", lambda s: _attention(s.tensors), 0.65),
        HostCall("torch, lse", lambda s: _attention(s.tensors, return_lse=True), 0.75),
        HostCall("torch backward", lambda s: _backward(s.tensors), 1.2, also=BACKWARD),
        HostCall("JAX", lambda s: _attention(s.jax_arrays), 2.0),
        HostCall("JAX, jitted", _jitted, 1.5),
    ]
    for library, arrays, kept in (("CuPy", _cupy, 0.6), ("torch", _torch, 0.9)):
        for where in ("host", "device"):
            of = functools.partial(_ragged, arrays, where == "device")
            name = f"{library}, ragged, {where} lengths"
            found += [
                HostCall(f"{name}, kept layout", functools.partial(of, "kept"), kept),
                HostCall(f"{name}, new layout, equal", functools.partial(of, "equal"), 1.3),
                HostCall(f"{name}, new layout, other", functools.partial(of, "other"), 1.3),
            ]
    return [
        *found,
        HostCall("Plan", _plan, 0.2),
        HostCall("rawattn.torch forward", _autograd, 1.0),
        HostCall("rawattn.torch forward + backward", _autograd_both, 1.3, over=BOTH),
        *_floors(),
    ]


def _floors() -> list[HostCall]:
    """The launches and results of calls alone, without the rest: the least host time of a call."""

    def floor(of: str, make: Callable[..., Call], over: str = FORWARD, **more: int) -> HostCall:
        def on_gpu(setup: Setup) -> Call:
            if setup.device != "cuda":
                raise Absent("nothing is launched on a CPU")
            return make(setup, **more)

        return HostCall(f"floor of {of}", on_gpu, over=over)

    return [
        floor("Plan: a graph of a launch", host_floors.graph),
        floor("any call: a launch", host_floors.launches),
        floor("CuPy: a launch, an array", host_floors.launches, arrays=1),
        floor("CuPy with lse: a launch, two arrays", host_floors.launches, arrays=2),
        floor("CuPy ragged: three launches, an array", host_floors.launches, count=3, arrays=1),
        floor(
            "CuPy backward: three launches, four arrays", host_floors.launches, count=3, arrays=4
        ),
        floor("torch: a launch, a tensor", host_floors.torch_launches),
        floor("torch with lse: a launch, two tensors", host_floors.torch_launches, tensors=2),
        floor(
            "torch backward: three launches, four tensors",
            host_floors.torch_launches,
            count=3,
            tensors=4,
        ),
        floor("JAX jitted: one addition", host_floors.jitted),
        floor("rawattn.torch: an empty autograd.Function", host_floors.autograd, over=BOTH),
    ]


def _cupy(setup: Setup) -> tuple[list[Any], Callable[[Any], Any]]:
    return setup.arrays, setup.xp.asarray


def _torch(setup: Setup) -> tuple[list[Any], Callable[[Any], Any]]:
    torch = setup.torch()
    return setup.tensors, lambda x: torch.tensor(x, device=setup.device)


def _attention(arrays: Sequence[Any], **options: Any) -> Call:
    return functools.partial(rawattn.attention, *arrays[:3], **options)


def _into(setup: Setup) -> Call:
    return _attention(setup.arrays, out=setup.xp.empty_like(setup.arrays[0]))


def _backward(arrays: Sequence[Any]) -> Call:
    *qkv, dout = arrays
    out, lse = rawattn.attention(*qkv, return_lse=True)
    return functools.partial(rawattn.attention_backward, *(dout, *qkv, out, lse))


def _jitted(setup: Setup) -> Call:
    arrays = setup.jax_arrays
    return functools.partial(setup.jax().jit(_imported("rawattn.jax").attention), *arrays)


def _ragged(
    arrays: Callable[[Setup], tuple[list[Any], Callable[[Any], Any]]],
    on_device: bool,
    layout: str,
    setup: Setup,
) -> Call:
    """A ragged call, by `layout`: a kept SeqLayout, or a new one at each call, with "equal" lengths or "other" ones in turn."""
    batch, put = arrays(setup)
    qkv = [x.reshape(-1, *x.shape[2:]) for x in batch[:3]]
    longest = {"max_seqlen_q": setup.longest, "max_seqlen_k": setup.longest} if on_device else {}
    starts = [put(one) for one in setup.starts] if on_device else setup.starts
    if layout == "kept":
        seqs = rawattn.SeqLayout(seqstart_q=starts[0], **longest)
        return functools.partial(rawattn.attention, *qkv, seqs=seqs)
    turns = itertools.cycle(starts if layout == "other" else starts[:1])

    def call() -> Any:
        seqs = rawattn.SeqLayout(seqstart_q=next(turns), **longest)
        return rawattn.attention(*qkv, seqs=seqs)

    return call


def _plan(setup: Setup) -> Call:
    plan = getattr(rawattn, "plan", None)
    if plan is None:
        raise Absent("this version has no rawattn.plan")
    qkv = setup.arrays[:3]
    return functools.partial(plan(rawattn.attention, *qkv), *qkv)


def _leaves(setup: Setup, transposed: bool) -> list[Any]:
    tensors = [x.detach() for x in setup.tensors[:3]]
    return [(x.transpose(1, 2) if transposed else x).requires_grad_() for x in tensors]


def _sdpa(setup: Setup) -> Call:
    sdpa = setup.torch().nn.functional.scaled_dot_product_attention
    return functools.partial(sdpa, *(x.transpose(1, 2) for x in setup.tensors[:3]))


def _sdpa_backward(setup: Setup) -> Call:
    torch = setup.torch()
    qkv, dout = _leaves(setup, True), setup.tensors[3].transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(*qkv)
    return functools.partial(torch.autograd.grad, out, qkv, dout, retain_graph=True)


def _sdpa_both(setup: Setup) -> Call:
    torch = setup.torch()
    qkv, dout = _leaves(setup, True), setup.tensors[3].transpose(1, 2)
    sdpa, grad = torch.nn.functional.scaled_dot_product_attention, torch.autograd.grad
    return lambda: grad(sdpa(*qkv), qkv, dout)


def _autograd(setup: Setup) -> Call:
    tensors = setup.tensors
    return functools.partial(_imported("rawattn.torch").attention, *tensors[:3])


def _autograd_both(setup: Setup) -> Call:
    qkv, dout = _leaves(setup, False), setup.tensors[3]
    attention, grad = _imported("rawattn.torch").attention, setup.torch().autograd.grad
    return lambda: grad(attention(*qkv), qkv, dout)
