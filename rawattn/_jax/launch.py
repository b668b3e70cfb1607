"""Runs a call of a compiled program on the buffers of the program."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from rawattn._call.layout import host_lengths
from rawattn._call.problem import result_shapes
from rawattn._interop import dlpack, streams
from rawattn._interop.xla import Call
from rawattn._jax.record import Like, Record, read


def cpu(call: Call) -> None:
    """A call of a program for the CPU: NumPy views of its buffers."""
    from rawattn._cpu import backward, forward

    record = read(call.text)
    inputs = [_host_view(at, like) for at, like in zip(call.inputs, record.inputs, strict=True)]
    outputs = [_host_view(at, like) for at, like in zip(call.outputs, record.outputs, strict=True)]
    first = len(inputs) - len(record.operands)
    lengths = host_lengths(record.bound(inputs[first:]))
    # Rows outside the sequences, which nobody else writes.
    for array in outputs:
        array[...] = 0
    if record.backward:
        dout, q, k, v, out, lse, *dlse = inputs[:first]
        given = dlse[0] if dlse else None
        backward.backward(record.problem, lengths, dout, q, k, v, out, lse, given, *outputs)
        return
    q, k, v = inputs[:first]
    log = outputs[1] if record.lse else None
    if log is not None:
        log[...] = -np.inf
    forward.forward(record.problem, lengths, q, k, v, outputs[0], log)


def cuda(call: Call) -> None:
    """A call of a program for a GPU: kernels on the program's stream."""
    import cupy

    device = call.device()
    with cupy.cuda.Device(device), streams._external(call.stream()):
        _launch(read(call.text), call, device)


def _launch(record: Record, call: Call, device: int) -> None:
    """Puts the kernels on CuPy's current stream.

    What is kept from one run to the next lies in CuPy's memory. What a backward needs while it runs is XLA's.
    """
    import cupy

    from rawattn._kernels import selection
    from rawattn._runtime import dispatch
    from rawattn._runtime.backward import Addresses

    together = 0
    for at in (*call.inputs, *call.outputs):
        together |= at
    key = ("jax", call.text, device, together % 16, selection())
    # Addresses of lengths are a part of what is prepared.
    prepared = None if record.operands else dispatch._prepared.get(key)
    if prepared is None:
        prepared = _prepare(record, call, device, together % 16)
        if not record.operands:
            dispatch._remember(key, prepared)
    first = len(call.inputs) - len(record.operands)
    if not record.backward:
        prepared.run(*call.inputs[:first], *call.outputs, *([] if record.lse else [0]))
        return
    dout, q, k, v, out, lse, *dlse = call.inputs[:first]
    addresses = Addresses(dout, q, k, v, out, lse, dlse[0] if dlse else 0, *call.outputs)
    with cupy.cuda.using_allocator(_Memory(call, device)):
        prepared.run(addresses)


def _prepare(record: Record, call: Call, device: int, pointers: int) -> Any:
    given: tuple[str, ...]
    made: tuple[str, ...]
    from rawattn._runtime.backward import Backward
    from rawattn._runtime.forward import Forward

    given, made = ("q", "k", "v"), ("out",)
    if record.backward:
        given, made = ("dout", "q", "k", "v", "out"), ("dq", "dk", "dv")
    strides = {name: _strides(like) for name, like in zip(given, record.inputs, strict=False)}
    strides |= {name: _strides(like) for name, like in zip(made, record.outputs, strict=False)}
    first = len(call.inputs) - len(record.operands)
    integers = [
        dlpack.device_array(at, shape, dtype, None, device, None)
        for at, (shape, dtype) in zip(call.inputs[first:], record.inputs[first:], strict=True)
    ]
    lengths = record.bound(integers)
    if record.backward:
        return Backward(
            record.problem,
            lengths,
            device=device,
            strides=strides,
            pointers=pointers,
            copies=(False,) * 7,
            fill=(True,) * 3,
            deterministic=record.deterministic,
        )
    out_shape, lse_shape = result_shapes(record.problem)
    return Forward(
        record.problem,
        lengths,
        device=device,
        strides=strides,
        pointers=pointers,
        copies=None,
        out_shape=out_shape,
        lse_shape=lse_shape,
        fill_out=True,
        fill_lse=record.lse,
    )


class _Memory:
    """A CuPy allocator of XLA's memory, for one call."""

    def __init__(self, call: Call, device: int) -> None:
        self._call = call
        self._device = device

    def __call__(self, nbytes: int) -> Any:
        import cupy

        address = self._call.allocate(nbytes)
        memory = cupy.cuda.UnownedMemory(address, nbytes, self._call, self._device)
        return cupy.cuda.MemoryPointer(memory, 0)


def _host_view(address: int, like: Like) -> np.ndarray[Any, Any]:
    shape, dtype = like
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray(shape, dtype, memory)


def _strides(like: Like) -> tuple[int, ...]:
    """In bytes, of a dense array."""
    shape, dtype = like
    strides = [dtype.itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))
