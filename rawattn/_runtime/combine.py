"""The way of a call of `combine`: arrays read, described and checked, merged on a GPU or by the CPU backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn._call import partials
from rawattn._call.checks import check_out
from rawattn._call.partials import Given, Partials
from rawattn._cpu import combine as cpu_combine
from rawattn._interop import arrays, streams
from rawattn._interop.arrays import HOST
from rawattn._kernels.operands import contiguous
from rawattn._kernels.params import MAX_LISTED
from rawattn._kernels.portable import combine as kernel_twin
from rawattn._kernels.portable.combine import Side
from rawattn._runtime import graphs
from rawattn._runtime.calls import name_of
from rawattn._runtime.devices import gpu_available

FLOAT32 = np.dtype(np.float32)


def run(outs: Any, lses: Any, out: Any, dtype: Any) -> tuple[Any, Any]:
    """out and lse, in the framework of the first partial."""
    sides = partials.given("outs", outs), partials.given("lses", lses)
    names = [*sides[0].names(), *sides[1].names()]
    inputs = [*sides[0].arrays, *sides[1].arrays]
    arrays.refuse_gradients(names, inputs)
    first = inputs[0]
    framework = arrays.framework_of(first)
    with arrays.on_stream_of(first, framework) as stream:
        given = [
            arrays.import_array(n, x, stream=stream) for n, x in zip(names, inputs, strict=True)
        ]
        device = given[0].device
        target = None
        if out is not None:
            imported = arrays.import_array("out", out, stream=stream)
            if imported.readonly:
                raise ValueError("out: got a read-only array; pass a writable one")
            names, given = [*names, "out"], [*given, imported]
            target = imported.array
        for name, each in zip(names, given, strict=True):
            if each.device != device:
                raise ValueError(
                    f"{name}: on {name_of(each.device)}, but {names[0]} is on {name_of(device)}; "
                    "move them to one device"
                )
        count = len(sides[0].arrays)
        views = [x.array for x in given[: len(inputs)]]
        described = partials.describe(*sides, views[:count], views[count:], dtype, framework)
        if target is not None:
            _check_out(target, described, dict(zip(names, views, strict=False)))
        on_gpu = device != HOST or gpu_available()
        place = cpu if not on_gpu else cuda if device != HOST else _cuda_from_host
        results = place(described, sides, views[:count], views[count:], target)
        exported = [arrays.export_array(x, framework, stream) for x in results]
        return exported[0] if out is None else out, exported[1]


def _check_out(out: Any, described: Partials, others: dict[str, Any]) -> None:
    if tuple(out.shape) == described.shape and out.dtype != described.result:
        raise TypeError(
            f"out: got dtype {out.dtype}, expected {described.result}, that of the result; pass "
            f"dtype={str(out.dtype)!r} too, or an array of {described.result}"
        )
    check_out(out, shape=described.shape, dtype=described.result, others=others)


def cpu(
    described: Partials,
    sides: tuple[Given, Given],
    outs: Sequence[Any],
    lses: Sequence[Any],
    target: Any,
) -> tuple[Any, Any]:
    """NumPy arrays, by the CPU backend."""
    out = arrays.empty_host(described.shape, described.result) if target is None else target
    lse = arrays.empty_host(described.lse_shape, FLOAT32)
    values, logs = (
        given if side.listed else list(given[0])
        for side, given in zip(sides, (outs, lses), strict=True)
    )
    cpu_combine.combine(values, logs, out, lse)
    return out, lse


def _cuda_from_host(
    described: Partials,
    sides: tuple[Given, Given],
    outs: Sequence[Any],
    lses: Sequence[Any],
    target: Any,
) -> tuple[Any, Any]:
    """NumPy arrays, by a GPU."""
    import cupy

    def upload(host: Any) -> Any:
        on_device = cupy.empty(host.shape, host.dtype)
        on_device.set(np.asarray(host, order="C"))
        return on_device

    results = cuda(described, sides, [*map(upload, outs)], [*map(upload, lses)], None)
    out, lse = (x.get() for x in results)
    if target is not None:
        target[...] = out
        out = target
    return out, lse


def cuda(
    described: Partials,
    sides: tuple[Given, Given],
    outs: Sequence[Any],
    lses: Sequence[Any],
    target: Any,
) -> tuple[Any, Any]:
    """CuPy arrays, on CuPy's current stream."""
    import cupy

    device = outs[0].data.device_id
    with cupy.cuda.Device(device):
        out = cupy.ndarray(described.shape, described.result) if target is None else target
        lse = cupy.ndarray(described.lse_shape, FLOAT32)
        if 0 in described.shape:
            return out, lse
        _launch(described, sides, outs, lses, out, lse, device)
    return out, lse


def _launch(
    described: Partials,
    sides: tuple[Given, Given],
    outs: Sequence[Any],
    lses: Sequence[Any],
    out: Any,
    lse: Any,
    device: int,
) -> None:
    """The kernel on CuPy arrays that are not empty; `device` is the current one."""
    import cupy

    from rawattn._runtime import kernel
    from rawattn._runtime.kernel import Arguments

    given = outs, lses
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
    packed = bytearray(step.params)
    for at, name in step.patches:
        packed[at : at + 8] = named[name].data.ptr.to_bytes(8, "little")
    assert isinstance(step.blocks, int)
    stream = cupy.cuda.get_current_stream().ptr
    kernel.load(step.source, device).launch(
        step.blocks, step.threads, step.shared_bytes, stream, Arguments((packed,))
    )
    copies = [
        x for was, now in zip(given, (outs, lses), strict=True) if was is not now for x in now
    ]
    if copies and streams.is_capturing(stream):
        graphs.hold(*copies)


def _lying(given: Sequence[Any], listed: bool, *, dense: bool) -> tuple[Sequence[Any], Side]:
    """Arrays as the kernel reads them, and how they lie. dense: whether the last axis has to be."""
    if listed and len(given) > MAX_LISTED:
        given, listed = [_stacked(given)], False
    forms = {_strides(x.shape, x.strides) for x in given}
    itemsize = given[0].dtype.itemsize
    sparse = dense and given[0].shape[-1] > 1 and any(form[-1] != itemsize for form in forms)
    if len(forms) > 1 or sparse:
        given = [_copy(x) for x in given]
        forms = {_strides(given[0].shape, given[0].strides)}
    (strides,) = forms
    return given, Side(strides, None) if listed else Side(strides[1:], strides[0])


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
