"""Runs a call of a compiled program on the buffers of the program."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawattn._call.layout import Lengths, host_lengths
from rawattn._interop import streams
from rawattn._interop.xla import Call
from rawattn._jax.record import Like, Record, read
from rawattn._kernels.selection import selection


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

    device, stream = call.device(), call.stream()
    # What is kept from one run to the next lies in CuPy's memory, in the order of the program's stream.
    with cupy.cuda.Device(device), streams.external(stream):
        _launch(read(call.text), call, device, stream)


_prepared: dict[Any, Any] = {}
_MAX_PREPARED = 512


def _launch(record: Record, call: Call, device: int, stream: int) -> None:
    """Puts the kernels on the stream."""
    together = 0
    for at in (*call.inputs, *call.outputs):
        together |= at
    first = len(call.inputs) - len(record.operands)
    integers = [
        _Integers(at, shape, dtype, device)
        for at, (shape, dtype) in zip(call.inputs[first:], record.inputs[first:], strict=True)
    ]
    lengths = record.bound(integers)
    key = (call.text, device, together % 16, selection())
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        prepared = _prepared[key] = _prepare(record, lengths, device, together % 16)
    addresses = [*call.inputs[:first], *call.outputs]
    if not record.lse:  # dlse comes behind the inputs, lse behind the outputs
        addresses.insert(first if record.backward else len(addresses), 0)
    prepared.run(addresses, stream, _Memory(call), lengths)


def _prepare(record: Record, lengths: Lengths, device: int, pointers: int) -> Any:
    from rawattn._kernels.operands import Operands, contiguous
    from rawattn._runtime import calls
    from rawattn._runtime.verbs import BACKWARD, FORWARD

    verb = BACKWARD if record.backward else FORWARD
    likes = dict(zip(verb.inputs, record.inputs, strict=False))
    likes |= dict(zip(verb.outputs, record.outputs, strict=False))
    strides = {
        name: contiguous(shape, dtype.itemsize)
        for name, (shape, dtype) in likes.items()
        if name not in verb.whole
    }
    ours = frozenset(verb.outputs[: len(record.outputs)])
    operands = Operands(strides, pointers, ours)
    return calls.launches(verb, record.problem, lengths, operands, record.deterministic, device)


class _Integers:
    """Integers of a layout among a program's buffers, as far as launches ask."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.data = SimpleNamespace(ptr=address, device_id=device)


class _Memory:
    """XLA's memory for what a call needs while it runs, CuPy's for what later calls find again."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        return None, self._call.allocate(nbytes)

    def keep(self, nbytes: int, device: int) -> tuple[Any, int]:
        import cupy

        memory = cupy.cuda.alloc(nbytes)
        return memory, memory.ptr

    def keeps_captured(self) -> bool:
        return False


def _host_view(address: int, like: Like) -> np.ndarray[Any, Any]:
    shape, dtype = like
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray(shape, dtype, memory)
