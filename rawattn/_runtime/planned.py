"""A call planned once and made many times: its memory is its own, and a call of it is patches and launches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rawattn._call.checks import byte_range, check_apart
from rawattn._call.layout import Lengths
from rawattn._call.options import Options
from rawattn._call.seq_layout import SeqLayout
from rawattn._interop import arrays, streams
from rawattn._interop.native import Native, Read
from rawattn._interop.written import tell_written, teller
from rawattn._runtime import on_gpu
from rawattn._runtime.calls import Call, check_written
from rawattn._runtime.option_arrays import told, told_with_results
from rawattn._runtime.verbs import Verb

UNLIKE: Any = object()

_WIDEST = 16
# Which integers of a side an argument of the layout is: indices in `lengths.NAMES`.
_STARTS = {"seqstart_q": 0, "seqstart_k": 2}
_LENGTHS = {"cu_seqlen_q": 1, "seqlen_q": 1, "cu_seqlen_k": 3, "seqlen_k": 3}


class GpuPlan:
    """A call of `verb` on arrays of one framework on one GPU.

    given: the arrays of planning time: inputs, then arrays to write or None.
    returned: what a call gives back, from the outputs. values: numbers of options, which kernels take beside the addresses.
    """

    def __init__(
        self,
        verb: Verb,
        own: Native,
        read: Read,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        options: Options,
        flag: bool,
        returned: Callable[[Sequence[Any]], Any],
        values: Sequence[int] = (),
    ) -> None:
        device: int = read[1][verb.q * 4 + 3]
        self._verb, self._own, self._device, self._returned = verb, own, device, returned
        self._inputs, self._options, self._flag = tuple(inputs), options, flag
        self._count = len(self._inputs)
        self._values = tuple(values)
        if device != own.current_device():
            import cupy

            with cupy.cuda.Device(device):
                self._prepare(read, targets)
        else:
            self._prepare(read, targets)

    def _prepare(self, read: Read, targets: Sequence[Any]) -> None:
        """Kernels and memory, on the current GPU, which is that of the arrays."""
        verb, own, device, inputs = self._verb, self._own, self._device, self._inputs
        call, lengths = self._find(read, inputs, targets)
        if call.copies is not None:
            name = next(n for n, copy in zip(verb.inputs, call.copies, strict=True) if copy)
            others = ", or arrays beside it have other strides" if verb.alike else ""
            raise ValueError(
                f"{name}: its last axis is not dense{others}, so each call would copy it, and a plan allocates nothing; "
                f"pass a contiguous copy of it"
            )
        self._stream = own.stream(device)
        self._streams = {self._stream}
        self._results = [
            target if target is not None or result is None else own.empty(*result, inputs[verb.q])
            for target, result in zip(targets, call.results, strict=True)
        ]
        self._result = self._returned(self._results)
        self._result_addresses = [0 if x is None else own.address(x) for x in self._results]
        self._form = self._read(self._inputs)[1][:-1]
        self._alignment = _alignment(self._together(read[0]) | _together(self._result_addresses))
        self._alignments = on_gpu.alignments(verb, read[0][: self._count])
        self._pairs = on_gpu.pairs(verb, call, read[0])
        # The indices of inputs that a call changes.
        self._changed = [n for n, name in enumerate(verb.inputs) if name in verb.written]
        self._memory = call.prepared.own(own, self._stream, lengths)
        self.repeat = self._repeated()
        if not streams.is_capturing(self._stream):
            streams.wait(self._stream, device)

    def _repeated(self) -> Callable[[Sequence[Any]], Any]:
        """The call with arrays like those of planning time, by position, into the plan's own. It gives `UNLIKE`, and has done
        nothing, where they are not like those: `__call__` tells what is wrong with them, or takes them.
        """
        own, device = self._own, self._device
        known_calls = self._known_calls()
        launches, result, known = self._memory.launches, self._result, self._streams
        stream_of, current_device, planned = own.stream, own.current_device, self._alignments
        verb, pairs, names = self._verb, self._pairs, told(self._verb, self._options)
        tell, changed = teller(*self._results), self._changed

        def repeat(args: Sequence[Any]) -> Any:
            known_call = known_calls.get(len(args))
            if known_call is None:
                return UNLIKE
            read, form, tail = known_call
            found = read(*args)
            if found is None:
                return UNLIKE
            addresses, got, tracked = found
            if got != form or current_device() != device:
                return UNLIKE
            if tracked and verb.refuses_gradients:
                arrays.refuse_gradients(names[: len(args)], args)
            addresses += tail
            if pairs and not on_gpu.are_apart(pairs, addresses):
                return UNLIKE
            if planned and on_gpu.alignments(verb, addresses) != planned:
                return UNLIKE
            stream = stream_of(device)
            if stream not in known:
                known.add(stream)
            for launch, blocks in launches:
                launch(addresses, blocks, stream)
            if tell is not None:
                tell()
            if changed:
                tell_written(*[args[n] for n in changed])
            return result

        return repeat

    def _known_calls(self) -> dict[int, tuple[Callable[..., Read | None], Any, list[int]]]:
        """By how many arrays a call gives: what reads those, their form, and the addresses of all others.

        Arrays of options may be left out. They are then those of planning time, and so is what stands behind an array that the
        plan does not have.
        """
        verb, own, inputs = self._verb, self._own, self._inputs
        most = next((n for n, x in enumerate(inputs) if x is None), self._count)
        behind = [*self._result_addresses, *self._values, *self._memory.tail]
        found = {}
        for count in range(min(most, self._count - len(verb.extras)), most + 1):
            rest = inputs[count:]
            if verb.refuses_gradients and any(getattr(x, "requires_grad", False) for x in rest):
                continue
            read = own.reader(count)
            addresses = [0 if x is None else own.address(x) for x in rest]
            form = read(*inputs[:count])[1]  # type: ignore[index]  # they have been read before
            found[count] = read, form, [*addresses, *behind]
        return found

    def __call__(
        self, args: Sequence[Any], out: Sequence[Any] | None, given: Mapping[str, Any]
    ) -> Any:
        """args: all inputs. out: arrays to write instead of the plan's own, None for those that stay.

        given: integers of the layout on the GPU, CuPy's.
        """
        integers: dict[int, int] = {}
        for name, array in given.items():
            self._replace(integers, name, array)
        own, device = self._own, self._device
        read = own.read(args, self._verb.required)
        if read is None or read[1][:-1] != self._form:
            raise self._refused(args)
        addresses, _, tracked = read
        if tracked and self._verb.refuses_gradients:
            arrays.refuse_gradients(told(self._verb, self._options), args)
        together = self._together(addresses)
        if self._pairs and not on_gpu.are_apart(self._pairs, addresses):
            named = zip(self._verb.inputs, args, strict=True)
            check_written(self._verb, {name: own.view(x) for name, x in named if x is not None})
        if self._alignments:
            self._check_alignments(addresses)
        memory, result, results = self._memory, self._result, self._results
        theirs: list[int] = []
        if out is None:
            addresses += self._result_addresses
        else:
            theirs = [self._count + n for n, x in enumerate(out) if x is not None]
            results = [y if x is None else x for x, y in zip(out, self._results, strict=True)]
            self._check_out(args, results, addresses)
            written = [0 if x is None else own.address(x) for x in results]
            for address in written:
                together |= address
            addresses += written
            result = self._returned(results)
        if together & (self._alignment - 1):
            raise ValueError(
                f"plan: an array does not begin at a multiple of {self._alignment} bytes, as all did when the call "
                "was planned; pass aligned arrays, or plan with such ones"
            )
        addresses += self._values
        stream = own.stream(device)
        if stream not in self._streams:
            self._streams.add(stream)
        if device != own.current_device():
            import cupy

            with cupy.cuda.Device(device):
                memory.run(addresses, stream, integers or None, theirs)
        else:
            memory.run(addresses, stream, integers or None, theirs)
        tell_written(*results, *[args[n] for n in self._changed])
        return result

    def __del__(self) -> None:
        # Memory goes back in the order of the stream that it was taken on: after the last use on any other one.
        if sys.is_finalizing() or not hasattr(self, "_streams"):
            return
        for stream in self._streams:
            streams.order(stream, self._stream, self._device)

    def _together(self, addresses: Sequence[int]) -> int:
        """Those of the inputs OR-ed together, but for arrays of options, and of what comes after them."""
        first = self._count - len(self._verb.extras)
        return _together(addresses[:first]) | _together(addresses[self._count :])

    def _check_alignments(self, addresses: Sequence[int]) -> None:
        """Arrays of options are read in words as wide as their alignments at planning time allow."""
        verb = self._verb
        found = on_gpu.alignments(verb, addresses)
        for name, got, planned in zip(verb.extras, found, self._alignments, strict=True):
            if got != planned:
                raise ValueError(
                    f"{name}: begins {got} bytes past a multiple of {_WIDEST}, and {planned} when the call was planned; "
                    "pass an array that begins as the planned one does, or plan with such a one"
                )

    def _read(self, inputs: Sequence[Any]) -> Read:
        read = self._own.read(inputs, self._verb.required)
        assert read is not None
        return read

    def _find(
        self, read: Read, inputs: Sequence[Any], targets: Sequence[Any]
    ) -> tuple[Call, Lengths]:
        return on_gpu.find(
            *(self._verb, self._own, read, inputs, targets, self._options, self._flag)
        )

    def _replace(self, integers: dict[int, int], name: str, array: Any) -> None:
        seqs: SeqLayout = self._options.seqs
        planned = getattr(seqs, name)
        forms = [(x.shape, x.dtype, x.strides) for x in (array, planned)]
        if isinstance(array, np.ndarray) or forms[0] != forms[1]:
            raise ValueError(
                f"{name}: got {array.dtype} of shape {array.shape}, expected {planned.dtype} of shape {planned.shape} on "
                "the GPU, as it was planned"
            )
        address = int(array.data.ptr)
        if name in _STARTS:
            integers[_STARTS[name]] = address
            if name == "seqstart_q" and getattr(seqs, "seqstart_k", None) is None:
                integers[2] = address
        elif name.startswith("cu_") or getattr(seqs, f"cu_{name}") is None:
            integers[_LENGTHS[name]] = address

    def _check_out(
        self, args: Sequence[Any], results: Sequence[Any], addresses: Sequence[int]
    ) -> None:
        verb, own = self._verb, self._own
        names = told_with_results(verb, self._options)
        inputs = [(n, own.view(x)) for n, x in zip(names, args, strict=False) if x is not None]
        shown_results = names[len(verb.inputs) :]
        for shown, result, planned in zip(shown_results, results, self._results, strict=True):
            if result is None or result is planned:
                continue
            if own.read((result,), 1) is None:
                raise TypeError(
                    f"{shown}: got {type(result).__name__}, expected an array as planned"
                )
            arrays.refuse_gradients_of_written((shown,), (result,))
            got, expected = own.view(result), own.view(planned)
            if got[1:] != expected[1:]:
                raise ValueError(
                    f"{shown}: got shape {got.shape}, strides {got.strides}, dtype {got.dtype} on GPU {got.device}, "
                    f"expected those that the plan has: {expected.shape}, {expected.strides}, {expected.dtype}, "
                    f"GPU {expected.device}"
                )
            low, high = byte_range(got)
            if any(low < end and start < high for start, end in (byte_range(x) for _, x in inputs)):
                check_apart(got, inputs, shown)

    def _refused(self, args: Sequence[Any]) -> Exception:
        """What is wrong with arrays that are not like those of planning time."""
        own = self._own
        names = told(self._verb, self._options)
        for name, x, planned in zip(names, args, self._inputs, strict=True):
            if (x is None) != (planned is None):
                return ValueError(
                    f"{name}: given now or when the call was planned, but not both times"
                )
            if x is None:
                continue
            if own.read((x,), 1) is None:
                return TypeError(
                    f"{name}: got {type(x).__name__}, expected a {type(planned).__name__} on GPU {self._device}, as planned"
                )
            got, expected = own.view(x), own.view(planned)
            if got[1:] != expected[1:]:
                return ValueError(
                    f"{name}: got shape {got.shape}, strides {got.strides}, dtype {got.dtype}, GPU {got.device}; the "
                    f"plan is for {expected.shape}, {expected.strides}, {expected.dtype}, GPU {expected.device}"
                )
        return ValueError("plan: the arrays are not like those that the call was planned with")


def _together(addresses: Sequence[int]) -> int:
    together = 0
    for address in addresses:
        together |= address
    return together


def _alignment(together: int) -> int:
    together %= _WIDEST
    return together & -together if together else _WIDEST
