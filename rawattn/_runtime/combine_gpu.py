"""Calls of `combine` on a GPU: partials as the kernel reads them, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn._call.partials import Given, Partials
from rawattn._interop import streams
from rawattn._kernels.helper_params import MAX_LISTED
from rawattn._kernels.operands import contiguous
from rawattn._kernels.portable import combine as kernel_twin
from rawattn._kernels.portable.combine import Side
from rawattn._kernels.steps import Step
from rawattn._runtime import graphs, kernel
from rawattn._runtime.kernel import Arguments

FLOAT32 = np.dtype(np.float32)


def from_host(
    described: Partials,
    sides: tuple[Given, Given],
    outs: Sequence[Any],
    lses: Sequence[Any],
    target: Any,
    lse: Any = None,
) -> tuple[Any, Any]:
    """NumPy arrays, by a GPU."""
    import cupy

    def upload(host: Any) -> Any:
        on_device = cupy.empty(host.shape, host.dtype)
        on_device.set(np.asarray(host, order="C"))
        return on_device

    results = cuda(described, sides, [*map(upload, outs)], [*map(upload, lses)], None)
    out, log = (x.get() for x in results)
    if target is not None:
        target[...] = out
        out = target
    return out, log


def cuda(
    described: Partials,
    sides: tuple[Given, Given],
    outs: Sequence[Any],
    lses: Sequence[Any],
    target: Any,
    lse: Any = None,
) -> tuple[Any, Any]:
    """CuPy arrays, on CuPy's current stream."""
    import cupy

    device = outs[0].data.device_id
    with cupy.cuda.Device(device):
        out = cupy.ndarray(described.shape, described.result) if target is None else target
        lse = cupy.ndarray(described.lse_shape, FLOAT32) if lse is None else lse
        if 0 in described.shape:
            return out, lse
        given = outs, lses
        step, named = prepare(described, sides, outs, lses, out, lse, device)
        packed = bytearray(step.params)
        for at, name in step.patches:
            packed[at : at + 8] = named[name].data.ptr.to_bytes(8, "little")
        assert isinstance(step.blocks, int)
        stream = cupy.cuda.get_current_stream().ptr
        kernel.load(step.source, device).launch(
            step.blocks, step.threads, step.shared_bytes, stream, Arguments((packed,))
        )
        # The caller's arrays are the caller's to keep, copies are nobody's.
        callers = {id(x) for each in (*given, (out, lse)) for x in each}
        copies = [x for x in named.values() if id(x) not in callers]
        if copies and streams.is_capturing(stream):
            graphs.hold(*copies)
    return out, lse


def prepare(
    described: Partials,
    sides: tuple[Given, Given],
    outs: Sequence[Any],
    lses: Sequence[Any],
    out: Any,
    lse: Any,
    device: int,
) -> tuple[Step, dict[str, Any]]:
    """The launch on CuPy arrays that are not empty, and its arrays by name. `device` is the current one."""
    outs, side_of_outs = _lying(outs, sides[0].listed, dense=True)
    lses, side_of_lses = _lying(lses, sides[1].listed, dense=False)
    named = {"out": out, "lse": lse}
    named |= {f"outs{n}": x for n, x in enumerate(outs)}
    named |= {f"lses{n}": x for n, x in enumerate(lses)}
    pointers = 0
    for x in outs:
        pointers |= x.data.ptr
    step = kernel_twin.step(
        described,
        side_of_outs,
        side_of_lses,
        _strides(out.shape, out.strides),
        pointers % 16,
        out.data.ptr % 16,
        kernel.target(device).wave,
    )
    return step, named


def _lying(given: Sequence[Any], listed: bool, *, dense: bool) -> tuple[Sequence[Any], Side]:
    """Arrays as the kernel reads them, and how they lie. dense: whether the last axis has to be."""
    if is_copied(given, listed, dense=dense):
        stacked = listed and len(given) > MAX_LISTED
        given = [_stacked(given)] if stacked else [_copy(x) for x in given]
        listed = listed and not stacked
    strides = _strides(given[0].shape, given[0].strides)
    return given, Side(strides, None) if listed else Side(strides[1:], strides[0])


def is_copied(given: Sequence[Any], listed: bool, *, dense: bool) -> bool:
    """Whether the kernel cannot read these arrays as they lie."""
    forms = {_strides(x.shape, x.strides) for x in given}
    sparse = given[0].shape[-1] > 1 and any(x[-1] != given[0].dtype.itemsize for x in forms)
    return (listed and len(given) > MAX_LISTED) or len(forms) > 1 or (dense and sparse)


def _strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of axes that are walked; that of an axis of one element says nothing."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(shape, strides, strict=True))


def _copy(array: Any) -> Any:
    """In C order. As plain words, since CuPy does not know every dtype here."""
    import cupy

    if array.strides == contiguous(array.shape, array.dtype.itemsize):
        return array
    return cupy.ascontiguousarray(array.view(_words(array))).view(array.dtype)


def _stacked(given: Sequence[Any]) -> Any:
    import cupy

    first = given[0]
    stacked = cupy.ndarray((len(given), *first.shape), _words(first))
    for n, x in enumerate(given):
        stacked[n] = x.view(_words(x))
    return stacked.view(first.dtype)


def _words(array: Any) -> np.dtype[Any]:
    return np.dtype(f"u{array.dtype.itemsize}")
