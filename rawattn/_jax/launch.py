"""Handlers of XLA's custom calls: each runs one call of attention on the buffers of the compiled program."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawattn._call.layout import Lengths, host_lengths
from rawattn._eviction import evict_if_full
from rawattn._interop import streams
from rawattn._interop.xla import Call
from rawattn._jax.record import Record, ShapeDtype, read
from rawattn._kernels.selection import selection


def cpu(call: Call) -> None:
    """Runs a call of a CPU program, on NumPy views of its buffers."""
    record = read(call.text)
    _check(call, record)
    verb = record.verb
    inputs = [_host_view(at, like) for at, like in zip(call.inputs, record.inputs, strict=True)]
    outputs = [_host_view(at, like) for at, like in zip(call.outputs, record.outputs, strict=True)]
    first = len(inputs) - len(record.operands)
    lengths = host_lengths(record.bound(inputs[first:]))
    # For padding rows, which nothing else writes.
    for array, padding in zip(outputs, verb.padding, strict=False):
        array[...] = padding
    given: list[Any] = list(inputs[: record.first_option])
    results: list[Any] = list(outputs)
    if not record.lse:  # None in place of dlse, the last input, or of lse, the last output
        (given if record.backward else results).append(None)
    extras = inputs[record.first_option : first]
    named: dict[str, Any] = dict(zip(record.options, extras, strict=True))
    if record.seed is not None:
        named["seed_value"] = record.seed
    flag = record.deterministic if record.backward else record.lse
    verb.cpu(record.problem, lengths, given, results, flag, named, verb.gradients)


def cuda(call: Call) -> None:
    """Runs a call of a GPU program: kernels on the program's stream."""
    import cupy

    device, stream = call.device(), call.stream()
    if device == cupy.cuda.runtime.getDevice():
        launcher(call.text, device).launch(call, stream)
    else:
        with cupy.cuda.Device(device):
            launcher(call.text, device).launch(call, stream)


_launchers: dict[tuple[bytes, int], Launcher] = {}
_MAX_LAUNCHERS = 512


def launcher(text: bytes, device: int) -> Launcher:
    """The launcher of all calls with this text on this GPU, cached."""
    found = _launchers.get((text, device))
    if found is None:
        evict_if_full(_launchers, _MAX_LAUNCHERS)
        found = _launchers[text, device] = Launcher(read(text), device)
    return found


class Launcher:
    """Launches the calls of one record on one GPU.

    prepared: prepared calls, by what decides them beside the record: the addresses of the arrays modulo 16, and `selection()`.
    """

    def __init__(self, record: Record, device: int) -> None:
        self._record, self._device = record, device
        self._inputs = len(record.inputs)
        self._options = record.first_option
        self._operands = self._inputs - len(record.operands)
        self._seed = [] if record.seed is None else [record.seed]
        # The index among all addresses at which a 0 stands for an absent dlse (behind the inputs) or lse (-1: at the end).
        self._absent_index = None if record.lse else self._options if record.backward else -1
        self.prepared: dict[Any, Any] = {}

    def launch(self, call: Call, stream: int) -> None:
        """Puts the kernels on the stream. The device is the current one."""
        inputs, outputs = call.inputs, call.outputs
        ored_addresses = 0
        for address in inputs[: self._options]:
            ored_addresses |= address
        for address in outputs:
            ored_addresses |= address
        alignments: tuple[int, ...] = ()
        lengths = self._record.lengths
        if self._options < self._inputs:
            alignments = tuple(at % 16 for at in inputs[self._options : self._operands])
            lengths = self._bound(inputs)
            inputs = inputs[: self._operands]
        key = (ored_addresses & 15, alignments, selection())
        prepared = self.prepared.get(key)
        if prepared is None:
            _check(call, self._record)
            prepared = _prepare(
                self._record, lengths, self._device, ored_addresses & 15, alignments
            )
            self.prepared[key] = prepared
        addresses = inputs + outputs
        if self._absent_index is not None:
            addresses.insert(len(addresses) if self._absent_index < 0 else self._absent_index, 0)
        prepared.run(addresses + self._seed, stream, _Memory(call, stream), lengths)

    def _bound(self, inputs: list[int]) -> Lengths:
        record, first = self._record, self._operands
        likes = zip(inputs[first:], record.inputs[first:], strict=True)
        return record.bound([_Integers(at, *like, self._device) for at, like in likes])


def _check(call: Call, record: Record) -> None:
    """ValueError if a buffer of the program differs from the record in shape or dtype. Nothing else bounds accesses to it."""
    for n, (got, like) in enumerate(
        zip(call.forms(), [*record.inputs, *record.outputs], strict=True)
    ):
        expected = (like[0], like[1].name)
        if got != expected:
            raise ValueError(
                f"array {n} of a call: got {got[1]} of shape {got[0]}, expected {expected[1]} of shape {expected[0]}, as the "
                "call's record says; trace the program again"
            )


def _prepare(
    record: Record, lengths: Lengths, device: int, pointers: int, alignments: tuple[int, ...]
) -> Any:
    from rawattn._kernels.operands import Operands
    from rawattn._runtime import calls
    from rawattn._strides import contiguous

    verb, of_options = record.verb, {*record.options, *record.gradients}
    names = [name for name in verb.inputs if record.lse or name != "dlse"]
    likes = dict(zip(names, record.inputs, strict=False))
    likes |= dict(zip(verb.outputs, record.outputs, strict=False))
    strides = {
        name: contiguous(shape, dtype.itemsize)
        for name, (shape, dtype) in likes.items()
        if name not in verb.c_order
    }
    operands = Operands(
        {name: x for name, x in strides.items() if name not in of_options},
        pointers,
        frozenset(verb.outputs[: len(record.outputs)]),
        {name: x for name, x in strides.items() if name in of_options},
        dict(zip(record.options, alignments, strict=True)),
    )
    return calls.launches(verb, record.problem, lengths, operands, record.deterministic, device)


class _Integers:
    """Integers of a layout in one of the program's buffers: the attributes of a CuPy array that launches read."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.data = SimpleNamespace(ptr=address, device_id=device)


class _Memory:
    """`native.Memory` for a call of XLA: XLA's memory for scratch of this call, CuPy's for what later calls reuse."""

    __slots__ = ("_call", "_stream")

    def __init__(self, call: Call, stream: int) -> None:
        self._call, self._stream = call, stream

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        return None, self._call.allocate(nbytes)

    def keep(self, nbytes: int, device: int) -> tuple[Any, int]:
        import cupy

        with streams.external(self._stream):  # CuPy reuses freed memory in the order of its stream
            memory = cupy.cuda.alloc(nbytes)
        return memory, memory.ptr

    def keeps_captured(self) -> bool:
        return False


def _host_view(address: int, like: ShapeDtype) -> np.ndarray[Any, Any]:
    shape, dtype = like
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray(shape, dtype, memory)
