"""The way of every call: its arrays read, the launches that it needs found or prepared, results made, launches made.

Arrays of CuPy and CUDA tensors of torch are taken as they are (`_interop.native`). All others become views of CuPy or NumPy
first (`_interop.arrays`), and NumPy's go to a GPU and back where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn._call import layout
from rawattn._call.checks import check_apart
from rawattn._call.hints import cast
from rawattn._call.layout import Lengths
from rawattn._call.options import Options, structural
from rawattn._call.problem import Problem
from rawattn._call.structure import Structure, structure
from rawattn._interop import arrays
from rawattn._interop.arrays import HOST, Imported
from rawattn._interop.native import Native, Read, View, native
from rawattn._kernels.selection import selection
from rawattn._runtime.calls import Call, describe, elsewhere, prepare
from rawattn._runtime.devices import gpu_available
from rawattn._runtime.verbs import Verb

Arrays = Sequence[Any]

# Calls prepared earlier, by everything that decides them but addresses and host integers.
_prepared: dict[Any, Call] = {}
_MAX_PREPARED = 512
_prepared_lock = threading.Lock()


def run(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    backend: str | None,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """The outputs of a verb, None for one that is not wanted.

    targets: arrays of the caller to write, None for an output that is the library's own. values: numbers for the kernels.
    """
    framework = arrays.framework_of(inputs[verb.q])
    own = native(framework)
    if own is not None and (backend is None or backend == "cuda"):
        read = own.read((*inputs, *targets), verb.required)
        if read is not None:
            if read[3] and verb.refuses_gradients:
                arrays.refuse_gradients(verb.inputs, inputs)
            return on_gpu(verb, own, read, inputs, targets, options, flag, framework, values)
    elif (
        framework == "numpy"
        and _are_plain(verb, inputs, targets)
        and (backend == "cpu" or (backend is None and not gpu_available()))
    ):
        # Importing them would tell no more.
        return cpu(verb, inputs, targets, options, flag, framework, values)
    return _imported(verb, inputs, targets, options, flag, backend, framework, values)


def _are_plain(verb: Verb, inputs: Arrays, targets: Arrays) -> bool:
    """Whether all are NumPy's own arrays, in the machine's byte order, and those to write may be written."""
    for n, x in enumerate(inputs):
        if type(x) is np.ndarray:
            if not x.dtype.isnative:
                return False
        elif x is not None or n < verb.required:
            return False
    return all(
        x is None or (type(x) is np.ndarray and x.dtype.isnative and x.flags.writeable)
        for x in targets
    )


def on_gpu(
    verb: Verb,
    own: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """The same for arrays of one framework that lie on GPUs. framework: that of the caller's arrays."""
    addresses, form, together, _ = read
    device: int = form[verb.q * 4 + 3]
    if device != own.current_device():
        import cupy

        with cupy.cuda.Device(device):
            return on_gpu(verb, own, read, inputs, targets, options, flag, framework, values)
    if verb.extras:
        together = _together(verb, addresses)
    call = lengths = None
    key: Any = None
    try:
        form_of_lengths: Structure | None = None
        if options.seqs is not None:
            lengths = verb.bind(options.seqs, inputs)
            form_of_lengths = structure(lengths)
        # 16 bytes is the widest access there is: of an address only its place in them matters.
        key = (
            verb,
            flag,
            together % 16,
            form,
            form_of_lengths,
            structural(options),
            selection(),
        )
        if verb.extras:
            key = (*key, places(verb, addresses))
        call = _prepared.get(key)
    except (TypeError, ValueError, IndexError, AttributeError):
        key = None  # describing the call tells what is wrong with it
    if call is None:
        call = _prepare_natives(verb, own, read, inputs, targets, options, flag, framework)
        if key is not None:
            _remember(key, call)
    else:
        for target in targets:
            if target is not None:
                _check_reach(verb, call, own, addresses, inputs, targets)
                break
        if verb.extras and lengths is not None:
            call.check_longest(lengths)
    if call.copies is not None:
        inputs = [
            own.contiguous(x) if copy else x for x, copy in zip(inputs, call.copies, strict=True)
        ]
        addresses = [0 if x is None else own.address(x) for x in (*inputs, *targets)]
    results = list(targets)
    first = len(inputs)
    for n, shape, dtype in call.made:
        if results[n] is None:
            results[n] = array = own.empty(shape, dtype, inputs[verb.q])
            addresses[first + n] = own.address(array)
    addresses += values
    call.prepared.run(addresses, own.stream(device), own, lengths or call.lengths)
    return results


def find(
    verb: Verb,
    own: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
) -> tuple[Call, Lengths]:
    """A call of arrays of one framework, checked and prepared, and its lengths: for whoever runs it later."""
    framework = arrays.framework_of(inputs[verb.q])
    call = _prepare_natives(verb, own, read, inputs, targets, options, flag, framework)
    return call, call.lengths


def _prepare_natives(
    verb: Verb,
    own: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
) -> Call:
    views = [
        None if x is None else _view(name, own, x) for name, x in _named(verb, inputs, targets)
    ]
    pointers = _together(verb, read[0]) if verb.extras else read[2]
    found = places(verb, read[0])
    return prepare(verb, views, options, flag, read[1][verb.q * 4 + 3], pointers, framework, found)


def _together(verb: Verb, addresses: Sequence[int]) -> int:
    """All addresses OR-ed together, but for those of options' arrays, which are read in their own ways."""
    first = len(verb.inputs) - len(verb.extras)
    found = 0
    for address in (*addresses[:first], *addresses[len(verb.inputs) :]):
        found |= address
    return found


def places(verb: Verb, addresses: Sequence[int]) -> tuple[int, ...]:
    """Where the options' arrays begin within 16 bytes."""
    last = len(verb.inputs)
    return tuple(address % 16 for address in addresses[last - len(verb.extras) : last])


def _check_reach(
    verb: Verb,
    call: Call,
    own: Native,
    addresses: Sequence[int],
    inputs: Arrays,
    targets: Arrays,
) -> None:
    """What of `check_out` depends on addresses: overlap."""
    spans = [
        (address + low, address + high)
        for address, (low, high) in zip(addresses, call.reach, strict=True)
    ]
    for n, target in enumerate(targets, len(inputs)):
        if target is None:
            continue
        low, high = spans[n]
        for m, (other_low, other_high) in enumerate(spans):
            if m != n and low < other_high and other_low < high:
                views = {
                    f"{verb.prefix}{name}" if name in verb.outputs else name: own.view(x)
                    for other, (name, x) in enumerate(_named(verb, inputs, targets))
                    if x is not None and other != n
                }
                name = f"{verb.prefix}{verb.names[n]}"
                check_apart(own.view(target), views, name)
                break


def _named(verb: Verb, inputs: Arrays, targets: Arrays) -> list[tuple[str, Any]]:
    return list(zip(verb.inputs + verb.outputs, (*inputs, *targets), strict=True))


def _view(name: str, own: Native, array: Any) -> View:
    try:
        return own.view(array)
    except TypeError as error:
        raise TypeError(
            f"{name}: {error}; accepted are float16, bfloat16 and float32: convert it, as by "
            f"{cast(arrays.framework_of(array), name, 'float32')}"
        ) from None


def _remember(key: Any, call: Call) -> None:
    with _prepared_lock:
        if len(_prepared) >= _MAX_PREPARED:
            for old in list(_prepared)[: _MAX_PREPARED // 2]:
                del _prepared[old]
        _prepared[key] = call


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
    """`run` on views of the arrays, which may be of several frameworks, on the host or on a GPU."""
    if backend not in (None, "cuda", "cpu"):
        raise ValueError(f"backend: got {backend!r}; accepted are 'cuda', 'cpu' and None")
    if verb.refuses_gradients:
        arrays.refuse_gradients(verb.inputs, inputs)
    if framework == "jax" and verb.name == "attention" and not verb.extras and backend != "cpu":
        from rawattn._jax import eager

        if eager.takes(inputs, targets, options):
            return eager.attention(inputs, options, flag)
    q = inputs[verb.q]
    with arrays.on_stream_of(q, framework) as stream:
        given: list[Imported | None] = []
        for name, x in _named(verb, inputs, targets):
            output = name in verb.outputs
            if x is None and (output or name in verb.optional):
                given.append(None)
                continue
            shown = f"{verb.prefix}{name}" if output else name
            array = arrays.import_array(shown, x, stream=stream)
            if output and array.readonly:
                raise ValueError(f"{shown}: got a read-only array; pass a writable one")
            given.append(array)
        device = given[verb.q].device  # type: ignore[union-attr]
        for name, each in zip(verb.inputs + verb.outputs, given, strict=True):
            if each is not None and each.device != device:
                shown = f"{verb.prefix}{name}" if name in verb.outputs else name
                raise ValueError(elsewhere(shown, each.device, device))
        count = len(inputs)
        views = [None if x is None else x.array for x in given]
        place = _backend(backend, device)
        results = place(verb, views[:count], views[count:], options, flag, framework, values)
        return [
            target
            if target is not None or result is None
            else arrays.export_array(result, framework, stream)
            for target, result in zip(targets, results, strict=True)
        ]


def _backend(backend: str | None, device: int) -> Any:
    """Where a call with arrays on `device` runs: one of the four functions below."""
    on_device = device != HOST
    if backend is None:
        backend = "cuda" if on_device or gpu_available() else "cpu"
    if backend == "cuda" and not on_device and not gpu_available():
        raise RuntimeError(
            "backend: got 'cuda', but there is no usable GPU (`rawattn info` says why); use backend=None or 'cpu'"
        )
    if backend == "cuda":
        return cuda if on_device else _cuda_from_host
    return _cpu_from_device if on_device else cpu


def cuda(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """CuPy arrays, on CuPy's current stream."""
    own = native("cupy")
    assert own is not None
    read = own.read((*inputs, *targets), verb.required)
    assert read is not None
    return on_gpu(verb, own, read, inputs, targets, options, flag, framework, values)


def cpu(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """NumPy arrays, by the CPU backend."""
    described, lengths, specs = _described(verb, inputs, targets, options, flag, framework)
    results = []
    for target, spec, padding in zip(targets, specs, verb.padding, strict=True):
        result = target
        if target is None and spec is not None:
            result = np.empty(*spec) if framework == "numpy" else arrays.empty_host(*spec)
            if described.ragged:  # else the backend writes every row
                result[...] = padding
        results.append(result)
    extras: dict[str, Any] = {}
    host_lengths = layout.host_lengths(lengths) if described.ragged else None
    if verb.extras or values:
        count = len(inputs) - len(verb.extras)
        extras = dict(zip(verb.extras + verb.values, (*inputs[count:], *values), strict=True))
        inputs = inputs[:count]
    verb.cpu(described, host_lengths, inputs, results, flag, extras, verb.gradients)
    return results


# Calls described earlier, by everything that decides it but values.
_known: dict[Any, tuple[Problem, Lengths, Any]] = {}
_MAX_KNOWN = 512


def _described(
    verb: Verb, inputs: Arrays, targets: Arrays, options: Options, flag: bool, framework: str
) -> tuple[Problem, Lengths, Any]:
    """`describe` of NumPy arrays, which makes every check. A call like an earlier one has passed them."""
    key: Any = None
    lengths = None
    # Memory to write is checked against all other arrays, each time.
    if all(target is None for target in targets):
        try:
            form_of_lengths = None
            if options.seqs is not None:
                lengths = verb.bind(options.seqs, inputs)
                most = lengths.q.max_seqlen, lengths.k.max_seqlen
                form_of_lengths = structure(lengths), most
            forms = [None if x is None else (x.shape, x.dtype) for x in inputs]
            strides = [x.strides for x in inputs[len(inputs) - len(verb.extras) :]]
            key = (verb, flag, *forms, *strides, form_of_lengths, structural(options))
            known = _known.get(key)
            if known is not None:
                problem, bound, specs = known
                return problem, lengths or bound, specs
        except (TypeError, ValueError, IndexError, AttributeError):
            key = None  # describing the call tells what is wrong with it
    described = describe(verb, dict(_named(verb, inputs, targets)), options, flag, framework)
    if key is not None:
        with _prepared_lock:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[key] = described
    return described


def _cuda_from_host(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
    values: tuple[int, ...] = (),
) -> Sequence[Any]:
    """NumPy arrays, by a GPU."""
    import cupy

    def upload(host: Any) -> Any:
        if host is None:
            return None
        on_device = cupy.empty(host.shape, host.dtype)
        on_device.set(np.asarray(host, order="C"))
        return on_device

    describe(verb, dict(_named(verb, inputs, targets)), options, flag, framework)
    # The caller's own arrays travel too: their padding rows come back as they were.
    arrays = [*map(upload, inputs)], [*map(upload, targets)]
    results = cuda(verb, *arrays, options, flag, framework, values)
    found = []
    for target, result in zip(targets, results, strict=True):
        host = None if result is None else result.get()
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
    """CuPy arrays, by the CPU backend."""
    import cupy

    def download(on_device: Any) -> Any:
        return None if on_device is None else on_device.get()

    q = inputs[verb.q]
    with cupy.cuda.Device(q.data.device_id):
        hosts = [*map(download, inputs)], [*map(download, targets)]
        results = cpu(verb, *hosts, options, flag, framework, values)
        found = []
        for target, result in zip(targets, results, strict=True):
            array = target
            if result is not None:
                array = cupy.empty(result.shape, result.dtype) if target is None else target
                array.set(result)
            found.append(array)
        return found
