"""The dispatcher: decides by the arrays' devices and `backend` where a call runs (`on_gpu`, `on_cpu`).

CuPy arrays and CUDA tensors of torch are used as they are (`_interop.native`). All others first become CuPy or NumPy views
(`_interop.arrays`). NumPy arrays are copied to a GPU and results back, where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn._call import options as _options
from rawattn._call.options import Options
from rawattn._interop import arrays
from rawattn._interop.arrays import HOST, Imported
from rawattn._interop.native import native_of
from rawattn._interop.written import bump_versions
from rawattn._runtime import on_cpu, on_gpu
from rawattn._runtime.calls import describe, elsewhere, refuse_gradients
from rawattn._runtime.devices import gpu_available, why_no_gpu
from rawattn._runtime.option_arrays import caller_names_with_outputs
from rawattn._runtime.verbs import Verb

Arrays = Sequence[Any]


def run(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    backend: str | None,
    values: tuple[int, ...] = (),
    memo: dict[Any, Any] | None = None,
) -> Sequence[Any]:
    """Runs a call and returns the verb's outputs, None for one that is not wanted.

    targets: the caller's arrays to write, None for an output that the library allocates. values: numbers for the kernels.
    memo: that of the call's mask. It is used only if no array has to be moved.
    """
    if backend is not None:
        _options.backend(backend)
    framework = arrays.framework_of(inputs[verb.lead_index])
    native = native_of(framework) if backend is None or backend == "cuda" else None
    read = None if native is None else native.read((*inputs, *targets), verb.required_count)
    if native is not None and read is not None:
        if read[2]:
            refuse_gradients(verb, options, inputs, targets)
        results = on_gpu.run(
            verb, native, read, inputs, targets, options, flag, framework, values, memo
        )
    elif (
        framework == "numpy"
        and _are_plain(verb, inputs, targets)
        and (backend == "cpu" or (backend is None and _host_calls_stay_on_host(verb)))
    ):
        # Plain NumPy arrays need no import: they are views already.
        results = on_cpu.run(verb, inputs, targets, options, flag, framework, values)
    else:
        results = _imported(verb, inputs, targets, options, flag, backend, framework, values)
    if any(target is not None for target in targets):
        bump_versions(*targets)
    if verb.written:
        named = zip(verb.inputs, inputs, strict=True)
        bump_versions(*(x for name, x in named if name in verb.written))
    return results


def _are_plain(verb: Verb, inputs: Arrays, targets: Arrays) -> bool:
    """Whether all are NumPy arrays in native byte order, and arrays to write are writable."""
    for n, x in enumerate(inputs):
        if type(x) is np.ndarray:
            if not x.dtype.isnative or (verb.inputs[n] in verb.written and not x.flags.writeable):
                return False
        elif x is not None or n < verb.required_count:
            return False
    return all(
        x is None or (type(x) is np.ndarray and x.dtype.isnative and x.flags.writeable)
        for x in targets
    )


def _imported(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    backend: str | None,
    framework: str,
    values: tuple[int, ...],
) -> Sequence[Any]:
    """`run` on imported views of the arrays, which may be of several frameworks, on the host or on a GPU."""
    refuse_gradients(verb, options, inputs, targets)
    with arrays.on_stream_of(inputs[verb.lead_index], framework) as stream:
        views, device = _views(verb, inputs, targets, options, stream)
        count = len(inputs)
        compute = _backend(verb, backend, device)
        results = compute(verb, views[:count], views[count:], options, flag, framework, values)
        return [
            target
            if target is not None or result is None
            else arrays.export_array(result, framework, stream)
            for target, result in zip(targets, results, strict=True)
        ]


def check(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    backend: str | None,
    values: tuple[int, ...] = (),
) -> None:
    """Makes every check of `run`, without writing to the caller's arrays.

    If the call would run on a GPU and changes no input, it is run once on arrays of its own, which compiles its kernels.
    """
    framework = arrays.framework_of(inputs[verb.lead_index])
    _options.backend(backend)
    refuse_gradients(verb, options, inputs, targets)
    with arrays.on_stream_of(inputs[verb.lead_index], framework) as stream:
        views, device = _views(verb, inputs, targets, options, stream)
        compute = _backend(verb, backend, device)
        count = len(inputs)
        if compute is on_cpu.run or compute is _cpu_from_device:
            on_cpu.described(verb, views[:count], views[count:], options, flag, framework)
            return
        describe(verb, dict(verb.named(views[:count], views[count:])), options, flag, framework)
        if not verb.written:
            no_targets = (None,) * len(targets)
            compute(verb, views[:count], no_targets, options, flag, framework, values)


def _views(
    verb: Verb, inputs: Arrays, targets: Arrays, options: Options, stream: Any
) -> tuple[list[Any], int]:
    """Views of the arrays, which may be of several frameworks, and their common device."""
    given: list[Imported | None] = []
    shown_names = caller_names_with_outputs(verb, options)
    for shown, (name, x) in zip(shown_names, verb.named(inputs, targets), strict=True):
        output = name in verb.outputs
        if x is None and (output or name in verb.optional):
            given.append(None)
            continue
        array = arrays.import_array(shown, x, stream=stream)
        if (output or name in verb.written) and array.readonly:
            raise ValueError(arrays.unwritable(shown, array.framework))
        given.append(array)
    device: int = given[verb.lead_index].device  # type: ignore[union-attr]
    for shown, each in zip(shown_names, given, strict=True):
        if each is not None and each.device != device:
            raise ValueError(elsewhere(shown, each.device, device, verb.lead))
    return [None if x is None else x.array for x in given], device


def _host_calls_stay_on_host(verb: Verb) -> bool:
    """Whether calls on host arrays run on the CPU by default: without a GPU, and for verbs that change an input.

    Such an input (a pool of pages) would be copied to a GPU and back as a whole, for the sake of a few rows.
    """
    return bool(verb.written) or not gpu_available()


def _backend(verb: Verb, backend: str | None, device: int) -> Any:
    """The function that runs a call with arrays on `device`: `cuda`, `_cuda_from_host`, `_cpu_from_device` or `on_cpu.run`."""
    on_device = device != HOST
    if backend is None:
        backend = "cuda" if on_device or not _host_calls_stay_on_host(verb) else "cpu"
    if backend == "cuda" and not on_device and not gpu_available():
        raise RuntimeError(
            f"backend: got 'cuda', but there is no usable GPU: {why_no_gpu()}; use backend=None or 'cpu'"
        )
    if backend == "cuda":
        return cuda if on_device else _cuda_from_host
    return _cpu_from_device if on_device else on_cpu.run


def cuda(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """Runs a call on CuPy arrays, on CuPy's current stream."""
    native = native_of("cupy")
    assert native is not None
    read = native.read((*inputs, *targets), verb.required_count)
    assert read is not None
    return on_gpu.run(verb, native, read, inputs, targets, options, flag, framework, values)


def _cuda_from_host(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """Runs a call on NumPy arrays by a GPU: copies them there, and the results back."""
    describe(verb, dict(verb.named(inputs, targets)), options, flag, framework)
    # Arrays to write are copied there too, so that their padding rows come back unchanged.
    arrays = [*map(_upload, inputs)], [*map(_upload, targets)]
    results = cuda(verb, *arrays, options, flag, framework, values)
    for name, host, on_device in zip(verb.inputs, inputs, arrays[0], strict=True):
        if name in verb.written:
            host[...] = _download(on_device)
    found = []
    for target, result in zip(targets, results, strict=True):
        host = _download(result)
        if target is not None:
            target[...] = host
            host = target
        found.append(host)
    return found


def _cpu_from_device(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """Runs a call on CuPy arrays by the CPU backend: copies them to the host, and the results back."""
    import cupy

    q = inputs[verb.lead_index]
    with cupy.cuda.Device(q.data.device_id):
        hosts = [*map(_download, inputs)], [*map(_download, targets)]
        results = on_cpu.run(verb, *hosts, options, flag, framework, values)
        for name, on_device, host in zip(verb.inputs, inputs, hosts[0], strict=True):
            if name in verb.written:
                words = _words(host)
                on_device.view(words)[...] = _upload(host).view(words)
        found = []
        for target, result in zip(targets, results, strict=True):
            array = target
            if result is not None:
                array = cupy.empty(result.shape, result.dtype) if target is None else target
                array.set(result)
            found.append(array)
        return found


def _words(array: Any) -> str:
    """The unsigned dtype as which an array is copied: CuPy does not copy dtypes that it does not know, such as float8."""
    return f"u{array.dtype.itemsize}"


def _upload(host: Any) -> Any:
    import cupy

    if host is None:
        return None
    words = _words(host)
    on_device = cupy.empty(host.shape, words)
    on_device.set(np.asarray(host, order="C").view(words))
    return on_device.view(host.dtype)


def _download(on_device: Any) -> Any:
    return (
        None if on_device is None else on_device.view(_words(on_device)).get().view(on_device.dtype)
    )
