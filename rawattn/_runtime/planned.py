"""`GpuPlan`: a call that is prepared once, owns its memory, and then only patches addresses and launches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rawattn._call import pages
from rawattn._call.checks import check_apart, share_memory
from rawattn._call.layout import Lengths
from rawattn._call.options import Options
from rawattn._call.seq_layout import SeqLayout
from rawattn._interop import arrays, streams
from rawattn._interop.native import Native, Read
from rawattn._interop.written import bump_versions
from rawattn._runtime import on_gpu
from rawattn._runtime.calls import Call, check_written, name_of, refuse_gradients_of_read
from rawattn._runtime.option_arrays import caller_names, caller_names_with_outputs
from rawattn._runtime.plan_fast_path import Planned, by_names, by_position, spare_results
from rawattn._runtime.plan_launches import is_short
from rawattn._runtime.plan_same_arrays import Repeat
from rawattn._runtime.plan_streams import PlanStreams
from rawattn._runtime.verbs import Verb

_WIDEST = 16  # bytes of a kernel's widest access; alignments count modulo this
# The indices in `lengths.NAMES` of a layout's arguments, with `lengths.POSITIONS` behind.
_STARTS = {"seqstart_q": 0, "seqstart_k": 2}
_POSITIONS = {"position_q": 4, "position_k": 5}
_LENGTHS = {"cu_seqlen_q": 1, "seqlen_q": 1, "cu_seqlen_k": 3, "seqlen_k": 3}


class GpuPlan:
    """A plan of a call of `verb` on arrays of one framework on one GPU.

    read: what `native` has read of inputs and targets. inputs, targets: the arrays of planning time; a target is an array to
    write, or None. returned: makes the caller's result of the outputs. values: numbers of options for the kernels.
    """

    def __init__(
        self,
        verb: Verb,
        native: Native,
        read: Read,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        options: Options,
        flag: bool,
        returned: Callable[[Sequence[Any]], Any],
        values: Sequence[int] = (),
    ) -> None:
        device: int = read[1][verb.lead_index * 4 + 3]
        self._verb, self._native, self._device, self._returned = verb, native, device, returned
        self._inputs, self._options, self._flag = tuple(inputs), options, flag
        self._count = len(self._inputs)
        self._values = tuple(values)
        if device != native.current_device():
            import cupy

            with cupy.cuda.Device(device):
                self._prepare(read, targets)
        else:
            self._prepare(read, targets)

    def _prepare(self, read: Read, targets: Sequence[Any]) -> None:
        """Loads kernels and allocates memory on the arrays' GPU, which is the current one."""
        verb, native, device, inputs = self._verb, self._native, self._device, self._inputs
        call, lengths = self._find(read, inputs, targets)
        if call.copies is not None:
            names = caller_names(verb, self._options)
            name = next(n for n, copy in zip(names, call.copies, strict=True) if copy)
            others = ", or arrays beside it have other strides" if verb.same_strides else ""
            raise ValueError(
                f"{name}: its last axis is not dense{others}, so each call would copy it, and a plan allocates nothing; "
                f"pass a contiguous copy of it"
            )
        plan_streams = PlanStreams(native, device)
        is_capturing = streams.is_capturing(plan_streams.own)
        self._results = [
            target
            if target is not None or result is None
            else native.empty(*result, inputs[verb.lead_index])
            for target, result in zip(targets, call.results, strict=True)
        ]
        # Those of planning time: a tensor may get another form later.
        self._views = [None if x is None else native.view(x) for x in inputs]
        self._result_addresses = [0 if x is None else native.address(x) for x in self._results]
        inputs_at, form, _ = self._read(self._inputs)
        self._form = form[:-1]
        self._planned = Planned(
            *(verb, native, device, self._options, self._inputs, self._results, self._returned),
            values=self._values,
            alignment=_alignment(on_gpu.ored_addresses(verb, inputs_at + self._result_addresses)),
            alignments=on_gpu.alignments(verb, inputs_at),
            possible_overlaps=on_gpu.possible_overlaps(verb, call, read[0]),
            forbidden=on_gpu.forbidden_addresses(
                self._views,
                [None if x is None else native.view(x) for x in self._results],
            ),
            changed=tuple(n for n, name in enumerate(verb.inputs) if name in verb.written),
            memory=call.prepared.plan_memory(native, plan_streams.own, lengths),
            as_graph=is_short(verb, call.problem) and not is_capturing,
            streams=plan_streams,
        )
        self.repeat = by_position(self._planned)
        if not is_capturing:
            streams.wait(plan_streams.own, device)

    def repeat_of(self, given: Sequence[Any], places: Sequence[int | str]) -> Repeat | None:
        """A fast path for calls like one that has been made, from its arrays in this order: see `by_names`.

        places: for each array its index among inputs and outputs, or the name of lengths.
        """
        at = self._planned.lengths_at
        return by_names(
            self._planned,
            given,
            [
                (x,) if isinstance(x, int) else [at + n for n in self._integers_of(x)]
                for x in places
            ],
        )

    def __call__(
        self, args: Sequence[Any], out: Sequence[Any] | None, given: Mapping[str, Any]
    ) -> Any:
        """A call on the slow path, with every check.

        args: all inputs. out: for each output an array to write, or None for the plan's own; None if all are the plan's own.
        given: other integers of the layout by name, CuPy arrays on the GPU.
        """
        integers: dict[int, int] = {}
        for name, array in given.items():
            self._replace(integers, name, array)
        native, device = self._native, self._device
        read = native.read(args, self._verb.required_count)
        if read is None or read[1][:-1] != self._form:
            raise self._refused(args)
        addresses, _, tracked = read
        if tracked:
            names = caller_names(self._verb, self._options)
            refuse_gradients_of_read(self._verb, names, args)
        planned = self._planned
        if not planned.surely_disjoint(addresses):
            named = zip(self._verb.inputs, args, strict=True)
            check_written(self._verb, {name: native.view(x) for name, x in named if x is not None})
        if not planned.begin_alike(addresses):
            raise self._misaligned(addresses)
        memory, results = planned.memory, self._results
        theirs: list[int] = []
        if out is None:
            addresses += self._result_addresses
        else:
            theirs = [self._count + n for n, x in enumerate(out) if x is not None]
            results = [y if x is None else x for x, y in zip(out, self._results, strict=True)]
            self._check_out(args, results)
            addresses += [0 if x is None else native.address(x) for x in results]
        if not spare_results(planned.forbidden, addresses):
            self._check_spared(args, results)
        if not planned.are_aligned(addresses):
            raise ValueError(
                f"plan: an array does not begin at a multiple of {planned.alignment} bytes, as all did when the call "
                "was planned; pass aligned arrays, or plan with such ones"
            )
        addresses += self._values
        stream = native.stream(device)
        if stream not in planned.streams.known:
            planned.streams.add(stream)
        if device != native.current_device():
            import cupy

            with cupy.cuda.Device(device):
                memory.run(addresses, stream, integers or None, theirs)
        else:
            memory.run(addresses, stream, integers or None, theirs)
        bump_versions(*results, *[args[n] for n in planned.changed])
        return self._returned(results)

    def __del__(self) -> None:
        # The memory is freed in the order of the stream on which it was allocated. So this stream first waits for all others
        # on which calls used the memory.
        if not sys.is_finalizing() and hasattr(self, "_planned"):
            self._planned.streams.join()

    def _misaligned(self, addresses: Sequence[int]) -> ValueError:
        """The error for an option's array whose alignment differs from that of planning time.

        The planned kernel reads each such array with accesses as wide as its alignment allowed then.
        """
        found = on_gpu.alignments(self._verb, addresses)
        name, got, planned = next(
            each
            for each in zip(self._verb.extra_inputs, found, self._planned.alignments, strict=True)
            if each[1] != each[2]
        )
        return ValueError(
            f"{name}: begins {got} bytes past a multiple of {_WIDEST}, and {planned} when the call was planned; "
            "pass an array that begins as the planned one does, or plan with such a one"
        )

    def _read(self, inputs: Sequence[Any]) -> Read:
        read = self._native.read(inputs, self._verb.required_count)
        assert read is not None
        return read

    def _find(
        self, read: Read, inputs: Sequence[Any], targets: Sequence[Any]
    ) -> tuple[Call, Lengths]:
        return on_gpu.prepare_checked(
            *(self._verb, self._native, read, inputs, targets, self._options, self._flag)
        )

    def _replace(self, integers: dict[int, int], name: str, array: Any) -> None:
        seqs: SeqLayout = self._options.seqs
        planned = getattr(seqs, name)
        forms = [(x.shape, x.dtype, x.strides) for x in (array, planned)]
        on_host = isinstance(array, np.ndarray)
        if on_host or forms[0] != forms[1] or array.data.device_id != self._device:
            where = arrays.HOST if on_host else array.data.device_id
            raise ValueError(
                f"{pages.caller_name(seqs, name)}: got {array.dtype} of shape {array.shape} on {name_of(where)}, expected "
                f"{planned.dtype} of shape {planned.shape} on {name_of(self._device)}, as it was planned"
            )
        for index in self._integers_of(name):
            integers[index] = int(array.data.ptr)

    def _integers_of(self, name: str) -> tuple[int, ...]:
        """The indices in `lengths.NAMES` of the integers that kernels read from an argument of the layout."""
        seqs: SeqLayout = self._options.seqs
        if name in _STARTS:
            both = name == "seqstart_q" and getattr(seqs, "seqstart_k", None) is None
            return (_STARTS[name], _STARTS["seqstart_k"]) if both else (_STARTS[name],)
        if name in _POSITIONS:
            return (_POSITIONS[name],)
        counts = name.startswith("cu_") or getattr(seqs, f"cu_{name}") is None
        return (_LENGTHS[name],) if counts else ()

    def _check_out(self, args: Sequence[Any], results: Sequence[Any]) -> None:
        verb, native = self._verb, self._native
        names = caller_names_with_outputs(verb, self._options)
        inputs = [(n, native.view(x)) for n, x in zip(names, args, strict=False) if x is not None]
        shown_results = names[len(verb.inputs) :]
        for shown, result, planned in zip(shown_results, results, self._results, strict=True):
            if result is None or result is planned:
                continue
            if native.read((result,), 1) is None:
                raise TypeError(
                    f"{shown}: got {type(result).__name__}, expected an array as planned"
                )
            arrays.refuse_gradients_of_written((shown,), (result,))
            got, expected = native.view(result), native.view(planned)
            if got[1:] != expected[1:]:
                raise ValueError(
                    f"{shown}: got shape {got.shape}, strides {got.strides}, dtype {got.dtype} on GPU {got.device}, "
                    f"expected those that the plan has: {expected.shape}, {expected.strides}, {expected.dtype}, "
                    f"GPU {expected.device}"
                )
            others = inputs + [
                (n, native.view(x))
                for n, x in zip(shown_results, results, strict=True)
                if x is not None and n != shown
            ]
            check_apart(got, others, shown)

    def _check_spared(self, args: Sequence[Any], results: Sequence[Any]) -> None:
        """ValueError if an input shares memory with a result of planning time, which the call would write while it reads."""
        view = self._native.view
        names = caller_names_with_outputs(self._verb, self._options)
        for shown, result, planned in zip(
            names[self._count :], results, self._results, strict=True
        ):
            if result is None or result is not planned:
                continue
            for name, x in zip(names, args, strict=False):
                if x is not None and share_memory(view(result), view(x)):
                    raise ValueError(
                        f"{name}: shares memory with {shown}, which this plan writes, expected memory of its own; pass a copy "
                        f"of {name}"
                    )

    def _refused(self, args: Sequence[Any]) -> Exception:
        """The error for inputs that are not like those of planning time."""
        native = self._native
        names = caller_names(self._verb, self._options)
        for name, x, planned, expected in zip(names, args, self._inputs, self._views, strict=True):
            if (x is None) != (expected is None):
                return ValueError(
                    f"{name}: given now or when the call was planned, but not both times"
                )
            if x is None or expected is None:
                continue
            if native.read((x,), 1) is None:
                return TypeError(
                    f"{name}: got {type(x).__name__}, expected a {type(planned).__name__} on GPU {self._device}, as planned"
                )
            got = native.view(x)
            if got[1:] != expected[1:]:
                return ValueError(
                    f"{name}: got shape {got.shape}, strides {got.strides}, dtype {got.dtype}, GPU {got.device}; the "
                    f"plan is for {expected.shape}, {expected.strides}, {expected.dtype}, GPU {expected.device}"
                )
        return ValueError("plan: the arrays are not like those that the call was planned with")


def _alignment(addresses: int) -> int:
    addresses %= _WIDEST
    return addresses & -addresses if addresses else _WIDEST
