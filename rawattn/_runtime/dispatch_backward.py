"""Where a backward call runs: the GPU or the CPU, on arrays that are already CuPy or NumPy ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn._call import layout
from rawattn._call import problem as _problem
from rawattn._interop.arrays import HOST, Imported
from rawattn._kernels import selection
from rawattn._runtime.dispatch import (
    _contiguous_strides,
    _place,
    _prepared,
    _remember,
    gpu_available,
    options_key,
)

GIVEN = ("dout", "q", "k", "v", "out", "lse", "dlse")
RESULTS = ("dq", "dk", "dv")


def backward(
    given: dict[str, Imported | None],
    into: dict[str, Imported | None],
    options: dict[str, Any],
    *,
    deterministic: bool,
    backend: str | None,
) -> tuple[Any, ...]:
    """dq, dk, dv on the device of q. `given` has the keys of GIVEN, `into` those of RESULTS."""
    q = given["q"]
    assert q is not None
    for name, array in (*given.items(), *((f"into.{name}", x) for name, x in into.items())):
        if array is not None and array.device != q.device:
            raise ValueError(
                f"{name}: on {_place(array.device)}, but q is on {_place(q.device)}; move them to one device"
            )
    for name, array in into.items():
        if array is not None and array.readonly:
            raise ValueError(f"into.{name}: got a read-only array; pass a writable one")
    on_device = q.device != HOST
    if backend is None:
        backend = "cuda" if on_device or gpu_available() else "cpu"
    if backend == "cuda" and not on_device and not gpu_available():
        raise RuntimeError(
            "backend: got 'cuda', but there is no usable GPU (`rawattn info` says why); use backend=None or 'cpu'"
        )
    arrays = [None if x is None else x.array for x in given.values()]
    targets = [None if x is None else x.array for x in into.values()]
    if backend == "cuda":
        run = cuda if on_device else _cuda_from_host
    else:
        run = _cpu_from_device if on_device else cpu
    return run(arrays, targets, options, deterministic)


def cuda(
    arrays: list[Any], targets: list[Any], options: dict[str, Any], deterministic: bool
) -> tuple[Any, ...]:
    """CuPy arrays of one device, on the current stream."""
    import cupy

    from rawattn._runtime.backward import Addresses

    device = arrays[1].data.device_id
    if device != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(device):
            return cuda(arrays, targets, options, deterministic)

    pointers = 0
    for x in (*arrays[:5], *targets):
        pointers |= 0 if x is None else x.data.ptr % 16
    key: Any = (
        ("backward", device, pointers, deterministic, selection()),
        options_key(tuple(options.values())),
        tuple(None if x is None else (x.shape, x.strides, x.dtype) for x in (*arrays, *targets)),
    )
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed: describing the call tells what is wrong
        prepared, key = None, None
    if prepared is None:
        prepared = _prepare(arrays, targets, options, deterministic, device, pointers)
        if key is not None:
            _remember(key, prepared)
    elif any(x is not None for x in targets):
        _check_targets(arrays, targets)
    given = [
        cupy.ascontiguousarray(x) if copy else x
        for x, copy in zip(arrays, prepared.copies, strict=True)
    ]
    results = tuple(
        cupy.empty(like.shape, like.dtype) if target is None else target
        for like, target in zip(arrays[1:4], targets, strict=True)
    )
    prepared.run(Addresses(*(0 if x is None else x.data.ptr for x in (*given, *results))))
    return results


def cpu(
    arrays: list[Any], targets: list[Any], options: dict[str, Any], deterministic: bool
) -> tuple[Any, ...]:
    """NumPy arrays. Sums are made in one order here, always."""
    from rawattn._cpu import backward as cpu_backward

    problem, lengths = _problem.describe(*arrays[1:4], **options)
    check(problem, arrays, targets)
    results = tuple(
        np.zeros(like.shape, like.dtype) if target is None else target
        for like, target in zip(arrays[1:4], targets, strict=True)
    )
    cpu_backward.backward(problem, layout.host_lengths(lengths), *arrays, *results)
    return results


def check(problem: _problem.Problem, arrays: list[Any], targets: list[Any]) -> None:
    """TypeError or ValueError for what is wrong with the arrays that the forward does not have."""
    dtype = arrays[1].dtype
    out_shape, lse_shape = _problem.result_shapes(problem)
    expected = {"dout": (out_shape, dtype), "out": (out_shape, dtype)}
    expected |= {
        "lse": (lse_shape, np.dtype(np.float32)),
        "dlse": (lse_shape, np.dtype(np.float32)),
    }
    for name, array in zip(GIVEN, arrays, strict=True):
        if name not in expected or array is None:
            continue
        shape, kind = expected[name]
        if array.shape != shape:
            raise ValueError(
                f"{name}: got shape {array.shape}, expected {shape}, that of the forward's "
                f"{name.removeprefix('d')}"
            )
        if array.dtype != kind:
            raise TypeError(
                f"{name}: got dtype {array.dtype}, expected {kind}, that of the forward's "
                f"{name.removeprefix('d')}; convert it, as by {name}.astype"
            )
    _check_targets(arrays, targets)


def _check_targets(arrays: list[Any], targets: list[Any]) -> None:
    dout, q, k, v, out, lse, dlse = arrays
    for name, target, like in zip(RESULTS, targets, (q, k, v), strict=True):
        if target is None:
            continue
        try:
            _problem.check_out(target, shape=like.shape, dtype=like.dtype, inputs=(q, k, v))
        except (TypeError, ValueError) as error:
            raise type(error)(f"into.{name}: {str(error).removeprefix('out: ')}") from None
        others = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
        others |= {
            f"into.{other}": x for other, x in zip(RESULTS, targets, strict=True) if other != name
        }
        for other, array in others.items():
            if array is not None and _overlap(target, array):
                raise ValueError(
                    f"into.{name}: shares memory with {other}, expected memory of its own; pass a copy"
                )


def _overlap(a: Any, b: Any) -> bool:
    if 0 in a.shape or 0 in b.shape:
        return False
    low, high = _problem._byte_range(a, _problem._address(a))
    other_low, other_high = _problem._byte_range(b, _problem._address(b))
    return low < other_high and other_low < high and _problem._share_bytes(a, b)


def _prepare(
    arrays: list[Any],
    targets: list[Any],
    options: dict[str, Any],
    deterministic: bool,
    device: int,
    pointers: int,
) -> Any:
    from rawattn._runtime.backward import Backward

    problem, lengths = _problem.describe(*arrays[1:4], **options)
    check(problem, arrays, targets)
    for side in (lengths.q, lengths.k):
        for integers in (side.start, side.length):
            if integers is not None and not isinstance(integers, np.ndarray):
                place = integers.data.device_id
                if place != device:
                    raise ValueError(
                        f"seqs: holds an array on {_place(place)}, but q is on {_place(device)}; "
                        "move them to one device"
                    )
    copies = tuple(
        x is not None
        and (
            not x.flags.c_contiguous
            if name in ("lse", "dlse")
            else x.shape[-1] > 1 and x.strides[-1] != x.dtype.itemsize
        )
        for name, x in zip(GIVEN, arrays, strict=True)
    )
    strides = {
        name: _contiguous_strides(x.shape, x.dtype.itemsize) if copy else x.strides
        for name, x, copy in zip(GIVEN[:5], arrays, copies, strict=False)
    }
    for name, like, target in zip(RESULTS, arrays[1:4], targets, strict=True):
        strides[name] = (
            _contiguous_strides(like.shape, like.dtype.itemsize)
            if target is None
            else target.strides
        )
    return Backward(
        problem,
        lengths,
        device=device,
        strides=strides,
        pointers=pointers,
        copies=copies,
        fill=tuple(target is None for target in targets),
        deterministic=deterministic,
    )


def _cuda_from_host(
    arrays: list[Any], targets: list[Any], options: dict[str, Any], deterministic: bool
) -> tuple[Any, ...]:
    import cupy

    def upload(host: Any) -> Any:
        if host is None:
            return None
        on_device = cupy.empty(host.shape, host.dtype)
        on_device.set(np.ascontiguousarray(host))
        return on_device

    problem, _ = _problem.describe(*arrays[1:4], **options)
    check(problem, arrays, targets)
    # The caller's own arrays travel too: their padding rows come back as they were.
    results = cuda([*map(upload, arrays)], [*map(upload, targets)], options, deterministic)
    return tuple(
        _kept(target, result.get()) for target, result in zip(targets, results, strict=True)
    )


def _cpu_from_device(
    arrays: list[Any], targets: list[Any], options: dict[str, Any], deterministic: bool
) -> tuple[Any, ...]:
    import cupy

    def download(on_device: Any) -> Any:
        return None if on_device is None else on_device.get()

    with cupy.cuda.Device(arrays[1].data.device_id):
        results = cpu([*map(download, arrays)], [*map(download, targets)], options, deterministic)
        on_device = []
        for target, result in zip(targets, results, strict=True):
            array = cupy.empty(result.shape, result.dtype) if target is None else target
            array.set(result)
            on_device.append(array)
        return tuple(on_device)


def _kept(target: Any, result: Any) -> Any:
    if target is None:
        return result
    target[...] = result
    return target
