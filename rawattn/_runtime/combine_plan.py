"""A call of `combine` planned once: results of the plan's own, a kernel that is loaded, calls that allocate nothing."""

from __future__ import annotations

import sys
from typing import Any

from rawattn._call import partials
from rawattn._interop import arrays, streams
from rawattn._interop.arrays import HOST
from rawattn._interop.native import native
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._runtime import combine, combine_gpu, kernel
from rawattn._runtime.combine import FLOAT32, Read


class Planned:
    """What calls of a plan share, for CuPy arrays or CUDA tensors of torch. out, lse: where they write by default."""

    def __init__(self, call: Read, out: Any, framework: str, stream: Any) -> None:
        import cupy

        self._names = [name for side in call.sides for name in side.names()]
        self._form, self._device, self._framework = call.form(), call.device, framework
        _refuse_copies(call)
        described = call.described
        with cupy.cuda.Device(call.device):
            new = out is None
            target = cupy.ndarray(described.shape, described.result) if new else call.target
            lse = cupy.ndarray(described.lse_shape, FLOAT32)
            if 0 not in described.shape:
                step, _ = combine_gpu.prepare(*call[:4], target, lse, call.device)
                kernel.load(step.source, call.device)
        self.out = arrays.export_array(target, framework, stream) if new else out
        self.lse = arrays.export_array(lse, framework, stream)
        self._stream = stream.ptr
        self._streams = {self._stream}
        if not streams.is_capturing(self._stream):
            streams.wait(self._stream, call.device)

    def check(self, call: Read) -> None:
        """ValueError for arrays that are not like those of planning time."""
        form = call.form()
        if call.device != self._device or len(form) != len(self._form):
            raise ValueError(
                f"outs: got {call.described.count} partials on GPU {call.device}, not listed or stacked as planned on "
                f"GPU {self._device}; pass them as when the call was planned"
            )
        for name, got, expected in zip(self._names, form, self._form, strict=True):
            if got != expected:
                raise ValueError(
                    f"{name}: got shape {got[0]}, strides {got[1]}, dtype {got[2]}; the plan is for {expected[0]}, "
                    f"{expected[1]}, {expected[2]}"
                )
        own = native(self._framework)
        assert own is not None
        self._streams.add(own.stream(self._device))

    def __del__(self) -> None:
        # Memory goes back in the order of the stream that it was taken on: after the last use on any other one.
        if sys.is_finalizing() or not hasattr(self, "_streams"):
            return
        for stream in self._streams:
            streams.order(stream, self._stream, self._device)


def plan(outs: Any, lses: Any, out: Any, dtype: Any) -> Planned | None:
    """None for arrays whose calls are ordinary ones. What is wrong with the call is told now."""
    first = partials.given("outs", outs).arrays[0]
    framework = arrays.framework_of(first)
    with arrays.on_stream_of(first, framework) as stream:
        call = combine.read(outs, lses, out, dtype, framework, stream)
        if call.device == HOST or native(framework) is None:
            return None
        return Planned(call, out, framework, stream)


def _refuse_copies(call: Read) -> None:
    """A call must not allocate, so it must not copy."""
    for side, given in zip(call.sides, (call.outs, call.lses), strict=True):
        if not combine_gpu.is_copied(given, side.listed, dense=side.name == "outs"):
            continue
        few = f"more than {MAX_LISTED} arrays, arrays of different strides" if side.listed else ""
        dense = "a last axis that is not dense" if side.name == "outs" else ""
        raise ValueError(
            f"{side.name}: has {' or '.join(filter(None, (few, dense)))}, so each call would copy it, and a plan "
            "allocates nothing; pass one stacked, contiguous array"
        )
