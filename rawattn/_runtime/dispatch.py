"""Where a call runs: the GPU or the CPU, on arrays that are already CuPy or NumPy ones."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np

from rawattn._call import layout
from rawattn._call import problem as _problem
from rawattn._cpu import forward as cpu_forward
from rawattn._interop.arrays import HOST, Imported, empty_host
from rawattn._kernels import selection

# The options of `attention` that describe the problem, in the order they travel in.
OPTIONS = (
    "seqs",
    "causal",
    "align",
    "window",
    "sink",
    "scale",
    "bias",
    "mask",
    "alibi_slopes",
    "softcap",
    "score_mod",
    "sink_logits",
    "dropout_p",
    "seed",
    "num_splits",
)

# Launches prepared earlier, by everything that decides them.
_prepared: dict[Any, Any] = {}
_MAX_PREPARED = 512
_prepared_lock = threading.Lock()


def forward(
    q: Imported,
    k: Imported,
    v: Imported,
    out: Imported | None,
    values: tuple[Any, ...],
    *,
    return_lse: bool,
    backend: str | None,
) -> tuple[Any, Any]:
    """(out, lse or None), on the device of the operands; `out` is written in place when given.

    values: the options, in the order of `OPTIONS`.
    """
    for name, operand in (("k", k), ("v", v), ("out", out)):
        if operand is not None and operand.device != q.device:
            raise ValueError(_elsewhere(name, operand.device, q.device))
    target = None if out is None else out.array
    if out is not None and out.readonly:
        raise ValueError("out: got a read-only array; pass a writable one")
    on_device = q.device != HOST
    if backend is None:
        backend = "cuda" if on_device or gpu_available() else "cpu"
    if backend == "cuda" and not on_device and not gpu_available():
        raise RuntimeError(
            "backend: got 'cuda', but there is no usable GPU (`rawattn info` says why); use backend=None or 'cpu'"
        )
    if backend == "cuda":
        run = cuda if on_device else _cuda_from_host
    else:
        run = _cpu_from_device if on_device else cpu
    return run(q.array, k.array, v.array, target, values, return_lse)


def cuda(
    q: Any, k: Any, v: Any, out: Any, values: tuple[Any, ...], return_lse: bool
) -> tuple[Any, Any]:
    """CuPy arrays, on the current stream. All on one device, which need not be the current one."""
    import cupy

    q_data, k_data, v_data = q.data, k.data, v.data
    device = q_data.device_id
    if device != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(device):
            return cuda(q, k, v, out, values, return_lse)

    q_at, k_at, v_at = q_data.ptr, k_data.ptr, v_data.ptr
    # 16 bytes is the widest access there is: of an address only its place in them matters.
    pointers = (q_at | k_at | v_at | (0 if out is None else out.data.ptr)) % 16
    key: Any = (
        device,
        k_data.device_id,
        v_data.device_id,
        pointers,
        return_lse,
        selection(),
        q.shape,
        k.shape,
        v.shape,
        q.strides,
        k.strides,
        v.strides,
        q.dtype,
        k.dtype,
        v.dtype,
        None if out is None else (out.shape, out.strides, out.dtype, out.data.device_id),
        options_key(values),
    )
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed: describing the call tells what is wrong
        prepared, key = None, None
    if prepared is None:
        prepared = _prepare(q, k, v, out, values, return_lse, device, pointers)
        if key is not None:
            _remember(key, prepared)
    elif out is not None:
        _problem.check_out(out, shape=prepared.out_shape, dtype=q.dtype, inputs=(q, k, v))
    if prepared.copies is not None:
        q, k, v = (
            cupy.ascontiguousarray(x) if copy else x
            for x, copy in zip((q, k, v), prepared.copies, strict=True)
        )
        q_at, k_at, v_at = q.data.ptr, k.data.ptr, v.data.ptr
    if out is None:
        out = cupy.empty(prepared.out_shape, q.dtype)
    lse = cupy.empty(prepared.lse_shape, np.float32) if return_lse else None
    prepared.run(q_at, k_at, v_at, out.data.ptr, 0 if lse is None else lse.data.ptr)
    return out, lse


def cpu(
    q: Any, k: Any, v: Any, out: Any, values: tuple[Any, ...], return_lse: bool
) -> tuple[Any, Any]:
    """NumPy arrays."""
    problem, lengths = _problem.describe(q, k, v, **_named(values))
    out_shape, lse_shape = _problem.result_shapes(problem)
    if out is None:
        out = empty_host(out_shape, q.dtype)
        out[...] = 0
    else:
        _problem.check_out(out, shape=out_shape, dtype=q.dtype, inputs=(q, k, v))
    lse = empty_host(lse_shape, np.float32) if return_lse else None
    if lse is not None:
        lse[...] = -np.inf
    cpu_forward.forward(problem, layout.host_lengths(lengths), q, k, v, out, lse)
    return out, lse


@functools.cache
def gpu_available() -> bool:
    """Whether CuPy is installed and sees a GPU."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount() > 0)
    except Exception:  # CuPy and the driver fail in many ways where there is no GPU
        return False


def _cuda_from_host(
    q: Any, k: Any, v: Any, out: Any, values: tuple[Any, ...], return_lse: bool
) -> tuple[Any, Any]:
    import cupy

    def upload(host: Any) -> Any:
        on_device = cupy.empty(host.shape, host.dtype)
        on_device.set(np.asarray(host, order="C"))
        return on_device

    if out is not None:
        problem, _ = _problem.describe(q, k, v, **_named(values))
        out_shape, _ = _problem.result_shapes(problem)
        _problem.check_out(out, shape=out_shape, dtype=q.dtype, inputs=(q, k, v))
    # The caller's `out` travels too: its padding rows come back as they were.
    target = None if out is None else upload(out)
    result, lse = cuda(upload(q), upload(k), upload(v), target, values, return_lse)
    host = result.get()
    if out is not None:
        out[...] = host
        host = out
    return host, None if lse is None else lse.get()


def _cpu_from_device(
    q: Any, k: Any, v: Any, out: Any, values: tuple[Any, ...], return_lse: bool
) -> tuple[Any, Any]:
    import cupy

    with cupy.cuda.Device(q.data.device_id):
        host_out = None if out is None else out.get()
        result, lse = cpu(q.get(), k.get(), v.get(), host_out, values, return_lse)
        on_device = cupy.empty(result.shape, result.dtype) if out is None else out
        on_device.set(result)
        return on_device, None if lse is None else cupy.asarray(lse)


def _prepare(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    values: tuple[Any, ...],
    return_lse: bool,
    device: int,
    pointers: int,
) -> Any:
    from rawattn._runtime.forward import Forward

    problem, lengths = _problem.describe(q, k, v, **_named(values))
    out_shape, lse_shape = _problem.result_shapes(problem)
    if out is not None:
        _problem.check_out(out, shape=out_shape, dtype=q.dtype, inputs=(q, k, v))
    for name, x in (("k", k), ("v", v), ("out", out)):
        if x is not None and x.data.device_id != device:
            raise ValueError(_elsewhere(name, x.data.device_id, device))
    for side in (lengths.q, lengths.k):
        for integers in (side.start, side.length):
            if integers is not None and not isinstance(integers, np.ndarray):
                place = integers.data.device_id
                if place != device:
                    raise ValueError(_elsewhere("seqs", place, device))
    copies = tuple(x.shape[-1] > 1 and x.strides[-1] != x.dtype.itemsize for x in (q, k, v))
    strides = {
        name: _contiguous_strides(x.shape, x.dtype.itemsize) if copy else x.strides
        for name, x, copy in zip("qkv", (q, k, v), copies, strict=True)
    }
    strides["out"] = (
        _contiguous_strides(out_shape, q.dtype.itemsize) if out is None else out.strides
    )
    return Forward(
        problem,
        lengths,
        device=device,
        strides=strides,
        pointers=pointers,
        copies=copies if any(copies) else None,
        out_shape=out_shape,
        lse_shape=lse_shape,
        fill_out=out is None,
        fill_lse=return_lse,
    )


def _remember(key: Any, prepared: Any) -> None:
    with _prepared_lock:
        if len(_prepared) >= _MAX_PREPARED:
            for old in list(_prepared)[: _MAX_PREPARED // 2]:
                _retire(_prepared.pop(old))
            _retired[:] = [each for each in _retired if not all(event.done for event in each[1])]
        _prepared[key] = prepared


# Launches nobody will repeat, each with events after which nothing on the device reads their memory any more.
_retired: list[tuple[Any, list[Any]]] = []


def _retire(prepared: Any) -> None:
    import cupy

    events = []
    for stream in prepared.streams():
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        events.append(event)
    _retired.append((prepared, events))


def options_key(values: tuple[Any, ...]) -> Any:
    """What tells the options of calls apart: True == 1 == 1.0, and not all of them are accepted everywhere."""
    types = tuple(map(type, values))
    if tuple in types:  # a window
        types += tuple(type(end) for x in values if type(x) is tuple for end in x)
    return values, types


def _named(values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(OPTIONS, values, strict=True))


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


def _elsewhere(name: str, device: int, q_device: int) -> str:
    return f"{name}: on {_place(device)}, but q is on {_place(q_device)}; move them to one device"


def _place(device: int) -> str:
    return "the host" if device == HOST else f"GPU {device}"
