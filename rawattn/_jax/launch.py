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
    record = read(call.text)
    verb = record.verb
    inputs = [_host_view(at, like) for at, like in zip(call.inputs, record.inputs, strict=True)]
    outputs = [_host_view(at, like) for at, like in zip(call.outputs, record.outputs, strict=True)]
    first = len(inputs) - len(record.operands)
    lengths = host_lengths(record.bound(inputs[first:]))
    # Rows outside the sequences, which nobody else writes.
    for array, padding in zip(outputs, verb.padding, strict=False):
        array[...] = padding
    given: list[Any] = list(inputs[: record.first_option])
    results: list[Any] = list(outputs)
    if not record.lse:  # dlse comes behind the inputs, lse behind the outputs
        (given if record.backward else results).append(None)
    extras = inputs[record.first_option : first]
    named: dict[str, Any] = dict(zip(record.options, extras, strict=True))
    if record.seed is not None:
        named["seed_value"] = record.seed
    flag = record.deterministic if record.backward else record.lse
    verb.cpu(record.problem, lengths, given, results, flag, named, verb.gradients)


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
    for address in (*call.inputs[: record.first_option], *call.outputs):
        together |= address
    first = len(call.inputs) - len(record.operands)
    integers = [
        _Integers(at, shape, dtype, device)
        for at, (shape, dtype) in zip(call.inputs[first:], record.inputs[first:], strict=True)
    ]
    lengths = record.bound(integers)
    at = call.inputs[record.first_option : first]
    places = tuple(address % 16 for address in at)
    key = (call.text, device, together % 16, places, selection())
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        prepared = _prepared[key] = _prepare(record, lengths, device, together % 16, places)
    addresses = [*call.inputs[:first], *call.outputs]
    if not record.lse:  # dlse comes behind the inputs, lse behind the outputs
        addresses.insert(record.first_option if record.backward else len(addresses), 0)
    if record.seed is not None:
        addresses.append(record.seed)
    prepared.run(addresses, stream, _Memory(call), lengths)


def _prepare(
    record: Record, lengths: Lengths, device: int, pointers: int, places: tuple[int, ...]
) -> Any:
    from rawattn._kernels.operands import Operands, contiguous
    from rawattn._runtime import calls

    verb, of_options = record.verb, {*record.options, *record.gradients}
    names = [name for name in verb.inputs if record.lse or name != "dlse"]
    likes = dict(zip(names, record.inputs, strict=False))
    likes |= dict(zip(verb.outputs, record.outputs, strict=False))
    strides = {
        name: contiguous(shape, dtype.itemsize)
        for name, (shape, dtype) in likes.items()
        if name not in verb.whole
    }
    operands = Operands(
        {name: x for name, x in strides.items() if name not in of_options},
        pointers,
        frozenset(verb.outputs[: len(record.outputs)]),
        {name: x for name, x in strides.items() if name in of_options},
        dict(zip(record.options, places, strict=True)),
    )
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
