"""The way of every call: its arrays read, the launches that it needs found or prepared, results made, launches made.

Arrays of CuPy and CUDA tensors of torch are taken as they are (`_interop.native`). All others become views of CuPy or NumPy
first (`_interop.arrays`), and NumPy's go to a GPU and back where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rawattn._call import layout, problem
from rawattn._call.checks import byte_range, check_apart, check_out
from rawattn._call.hints import cast
from rawattn._call.layout import Lengths
from rawattn._call.options import Options, structural
from rawattn._call.structure import Structure, structure
from rawattn._interop import arrays
from rawattn._interop.arrays import HOST, Imported
from rawattn._interop.native import Native, Read, View, native
from rawattn._kernels.operands import Operands, contiguous
from rawattn._kernels.selection import selection
from rawattn._runtime.devices import gpu_available
from rawattn._runtime.verbs import Verb

if TYPE_CHECKING:
    from rawattn._runtime.prepared import Prepared

Arrays = Sequence[Any]

# Calls prepared earlier, by everything that decides them but addresses and host integers.
_prepared: dict[Any, Call] = {}
_MAX_PREPARED = 512
_prepared_lock = threading.Lock()


class Call(NamedTuple):
    """A call on one GPU with its arrays' form known.

    results: shape and dtype of each output, None for one that is not wanted.
    made: place, shape and dtype of those that are the library's to make.
    copies: which inputs are copied before every run, None where none is.
    reach: of each array in the order of the verb's names, the bytes from its address to its first and past its last one.
    """

    prepared: Prepared
    problem: problem.Problem
    lengths: Lengths
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]] | None, ...]
    made: tuple[tuple[int, tuple[int, ...], np.dtype[Any]], ...]
    copies: tuple[bool, ...] | None
    reach: tuple[tuple[int, int], ...]


def run(
    verb: Verb,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    backend: str | None,
) -> Sequence[Any]:
    """The outputs of a verb, None for one that is not wanted.

    targets: arrays of the caller to write, None for an output that is the library's own.
    """
    framework = arrays.framework_of(inputs[verb.q])
    own = native(framework)
    if own is not None and (backend is None or backend == "cuda"):
        read = own.read((*inputs, *targets), verb.required)
        if read is not None:
            if read[3] and verb.refuses_gradients:
                arrays.refuse_gradients(verb.inputs, inputs)
            return on_gpu(verb, own, read, inputs, targets, options, flag, framework)
    return _imported(verb, inputs, targets, options, flag, backend, framework)


def on_gpu(
    verb: Verb,
    own: Native,
    read: Read,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    flag: bool,
    framework: str,
) -> Sequence[Any]:
    """The same for arrays of one framework that lie on GPUs. framework: that of the caller's arrays."""
    addresses, form, together, _ = read
    device: int = form[verb.q * 4 + 3]
    if device != own.current_device():
        import cupy

        with cupy.cuda.Device(device):
            return on_gpu(verb, own, read, inputs, targets, options, flag, framework)
    call = lengths = key = None
    try:
        form_of_lengths: Structure | None = None
        if options.seqs is not None:
            lengths = _bound(verb, inputs, options)
            form_of_lengths = structure(lengths)
        # 16 bytes is the widest access there is: of an address only its place in them matters.
        key = (
            verb.name,
            flag,
            together % 16,
            form,
            form_of_lengths,
            structural(options),
            selection(),
        )
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


def _bound(verb: Verb, inputs: Arrays, options: Options) -> Lengths:
    q, k = inputs[verb.q].shape, inputs[verb.q + 1].shape
    batch = q[0] if len(q) == 4 else None
    return layout.bind(options.seqs, batch=batch, rows_q=q[-3], rows_k=k[-3])


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
    return prepare(verb, views, options, flag, read[1][verb.q * 4 + 3], read[2], framework)


def prepare(
    verb: Verb,
    views: Sequence[Any],
    options: Options,
    flag: bool,
    device: int,
    pointers: int,
    framework: str,
) -> Call:
    """A call on arrays of this form, described, checked, and made ready to launch.

    views: of all the verb's arrays, with `shape`, `strides`, `dtype` and `device`; None for one that is not given or the
    library's own. pointers: all addresses OR-ed together. framework: that of the caller's arrays.
    """
    named = dict(zip(verb.names, views, strict=True))
    described, lengths, results = _describe(verb, named, options, flag, framework)
    for name, view in named.items():
        if view is not None and view.device != device:
            shown = f"{verb.prefix}{name}" if name in verb.outputs else name
            raise ValueError(_elsewhere(shown, view.device, device))
    form = structure(lengths)
    for place in form.devices:
        if place != device:
            raise ValueError(
                f"seqs: holds an array on {_place(place)}, but q is on {_place(device)}; "
                "move them to one device"
            )
    inputs = [named[name] for name in verb.inputs]
    copies = tuple(_is_copied(verb, name, x) for name, x in zip(verb.inputs, inputs, strict=True))
    strides: dict[str, tuple[int, ...]] = {}
    for name, x, copy in zip(verb.inputs, inputs, copies, strict=True):
        if x is not None and name not in verb.whole:
            strides[name] = contiguous(x.shape, x.dtype.itemsize) if copy else x.strides
    ours = set()
    for name, result in zip(verb.outputs, results, strict=True):
        target = named[name]
        if target is not None:
            strides[name] = target.strides
        elif result is not None:
            ours.add(name)
            if name not in verb.whole:
                strides[name] = contiguous(result[0], result[1].itemsize)
    operands = Operands(strides, pointers % 16, frozenset(ours))
    prepared = launches(verb, described, lengths, operands, flag, device)
    reach = tuple((0, 0) if x is None else byte_range(x, 0) for x in views)
    made = tuple(
        (n, *result)
        for n, (name, result) in enumerate(zip(verb.outputs, results, strict=True))
        if result is not None and named[name] is None
    )
    copied = copies if any(copies) else None
    return Call(prepared, described, lengths, results, made, copied, reach)


def launches(
    verb: Verb,
    described: problem.Problem,
    lengths: Lengths,
    operands: Operands,
    flag: bool,
    device: int,
) -> Prepared:
    """What the fastest family of kernels that supports a call launches for it, loaded."""
    from rawattn._kernels import registry
    from rawattn._runtime import kernel
    from rawattn._runtime.prepared import Prepared

    form = structure(lengths)
    if form.ragged:
        described = replace(described, max_seqlen_q=form.q.most, max_seqlen_k=form.k.most)
    target = kernel.target(device)
    family = registry.choose(verb.name, described, target, operands)
    steps = family.steps(described, form, operands, target, **verb.more(flag))
    return Prepared(steps, form, lengths, device, verb.names)


def _describe(
    verb: Verb, named: dict[str, Any], options: Options, flag: bool, framework: str
) -> tuple[problem.Problem, Lengths, tuple[tuple[tuple[int, ...], np.dtype[Any]] | None, ...]]:
    """Every check of a call's arrays and options, and what it gives."""
    described, lengths = problem.describe(named["q"], named["k"], named["v"], options, framework)
    verb.check(described, named)
    results = verb.results(described, named["q"].dtype, flag)
    for name, result in zip(verb.outputs, results, strict=True):
        target = named[name]
        if target is None or result is None:
            continue
        others = {x: named[x] for x in verb.inputs}
        others |= {f"{verb.prefix}{x}": named[x] for x in verb.outputs if x != name}
        shape, dtype = result
        check_out(target, shape=shape, dtype=dtype, others=others, name=f"{verb.prefix}{name}")
    return described, lengths, results


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
    return list(zip(verb.names, (*inputs, *targets), strict=True))


def _view(name: str, own: Native, array: Any) -> View:
    try:
        return own.view(array)
    except TypeError as error:
        raise TypeError(
            f"{name}: {error}; accepted are float16, bfloat16 and float32: convert it, as by "
            f"{cast(arrays.framework_of(array), name, 'float32')}"
        ) from None


def _is_copied(verb: Verb, name: str, view: Any) -> bool:
    if view is None or 0 in view.shape:
        return False
    itemsize = view.dtype.itemsize
    if name in verb.whole:
        dense = contiguous(view.shape, itemsize)
        return any(
            n > 1 and stride != wanted
            for n, stride, wanted in zip(view.shape, view.strides, dense, strict=True)
        )
    return bool(view.shape[-1] > 1 and view.strides[-1] != itemsize)


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
) -> Sequence[Any]:
    """`run` on views of the arrays, which may be of several frameworks, on the host or on a GPU."""
    if backend not in (None, "cuda", "cpu"):
        raise ValueError(f"backend: got {backend!r}; accepted are 'cuda', 'cpu' and None")
    if verb.refuses_gradients:
        arrays.refuse_gradients(verb.inputs, inputs)
    if framework == "jax" and verb.name == "attention" and backend != "cpu":
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
        for name, each in zip(verb.names, given, strict=True):
            if each is not None and each.device != device:
                shown = f"{verb.prefix}{name}" if name in verb.outputs else name
                raise ValueError(_elsewhere(shown, each.device, device))
        count = len(inputs)
        views = [None if x is None else x.array for x in given]
        place = _backend(backend, device)
        results = place(verb, views[:count], views[count:], options, flag, framework)
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
    verb: Verb, inputs: Arrays, targets: Arrays, options: Options, flag: bool, framework: str
) -> Sequence[Any]:
    """CuPy arrays, on CuPy's current stream."""
    own = native("cupy")
    assert own is not None
    read = own.read((*inputs, *targets), verb.required)
    assert read is not None
    return on_gpu(verb, own, read, inputs, targets, options, flag, framework)


def cpu(
    verb: Verb, inputs: Arrays, targets: Arrays, options: Options, flag: bool, framework: str
) -> Sequence[Any]:
    """NumPy arrays, by the CPU backend."""
    named = dict(_named(verb, inputs, targets))
    described, lengths, specs = _describe(verb, named, options, flag, framework)
    results = []
    for target, spec, padding in zip(targets, specs, verb.padding, strict=True):
        result = target
        if target is None and spec is not None:
            result = arrays.empty_host(*spec)
            result[...] = padding
        results.append(result)
    verb.cpu(described, layout.host_lengths(lengths), inputs, results, flag)
    return results


def _cuda_from_host(
    verb: Verb, inputs: Arrays, targets: Arrays, options: Options, flag: bool, framework: str
) -> Sequence[Any]:
    """NumPy arrays, by a GPU."""
    import cupy

    def upload(host: Any) -> Any:
        if host is None:
            return None
        on_device = cupy.empty(host.shape, host.dtype)
        on_device.set(np.asarray(host, order="C"))
        return on_device

    _describe(verb, dict(_named(verb, inputs, targets)), options, flag, framework)
    # The caller's own arrays travel too: their padding rows come back as they were.
    results = cuda(verb, [*map(upload, inputs)], [*map(upload, targets)], options, flag, framework)
    found = []
    for target, result in zip(targets, results, strict=True):
        host = None if result is None else result.get()
        if target is not None:
            target[...] = host
            host = target
        found.append(host)
    return found


def _cpu_from_device(
    verb: Verb, inputs: Arrays, targets: Arrays, options: Options, flag: bool, framework: str
) -> Sequence[Any]:
    """CuPy arrays, by the CPU backend."""
    import cupy

    def download(on_device: Any) -> Any:
        return None if on_device is None else on_device.get()

    q = inputs[verb.q]
    with cupy.cuda.Device(q.data.device_id):
        hosts = [*map(download, inputs)], [*map(download, targets)]
        results = cpu(verb, *hosts, options, flag, framework)
        found = []
        for target, result in zip(targets, results, strict=True):
            array = target
            if result is not None:
                array = cupy.empty(result.shape, result.dtype) if target is None else target
                array.set(result)
            found.append(array)
        return found


def _elsewhere(name: str, device: int, q_device: int) -> str:
    return f"{name}: on {_place(device)}, but q is on {_place(q_device)}; move them to one device"


def _place(device: int) -> str:
    return "the host" if device == HOST else f"GPU {device}"
