"""Imports arrays of any framework as NumPy or CuPy views of the caller's memory, and exports results.

No framework is imported: a type names the module that it lives in, and functions of that module are
taken from `sys.modules`.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rawattn._interop import dlpack, forward_mode, imported, native, streams
from rawattn._interop.advice import array_advice
from rawattn._interop.streams import compute_stream
from rawattn._interop.xla import is_traced

if TYPE_CHECKING:
    import cupy

__all__ = [
    "HOST",
    "Imported",
    "compute_stream",
    "empty_host",
    "export_array",
    "framework_of",
    "import_array",
    "on_stream_of",
]

HOST = -1

# Packages whose types users know under another name.
_ALIASES = {"jaxlib": "jax"}
_IMPORTER_PATHS = (
    "from_dlpack",
    "dlpack.from_dlpack",
    "utils.dlpack.from_dlpack",
    "experimental.dlpack.from_dlpack",
)
# Frameworks with immutable arrays, whose DLPack capsules do not mark them read-only.
_IMMUTABLE = frozenset({"jax", "tensorflow"})

_frameworks: dict[type, str] = {}
_importers: dict[str, Callable[[Any], object]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A zero-copy view of the caller's array. `device` is a CUDA ordinal, or HOST."""

    array: np.ndarray[Any, Any] | cupy.ndarray
    device: int
    framework: str
    readonly: bool


def framework_of(obj: object) -> str:
    """The package that arrays of obj's type belong to: "numpy", "cupy", "torch", "jax", ...

    It is the outermost module of the type, or of its nearest base class, that has a `from_dlpack`. If none
    has, it is the top-level package of the type.
    """
    cls = type(obj)
    try:
        return _frameworks[cls]
    except KeyError:
        return _frameworks.setdefault(cls, _find_framework(cls))


def _find_framework(cls: type) -> str:
    for base in cls.__mro__[:-1]:
        path = base.__module__.split(".")
        path[0] = _ALIASES.get(path[0], path[0])
        for depth in range(1, len(path) + 1):
            module = ".".join(path[:depth])
            importer = _find_importer(module)
            if importer is not None:
                _importers[module] = importer
                return module
    return cls.__module__.partition(".")[0]


def _find_importer(module: str) -> Callable[[Any], object] | None:
    for path in _IMPORTER_PATHS:
        with contextlib.suppress(KeyError, AttributeError):
            return operator.attrgetter(path)(sys.modules[module])  # type: ignore[no-any-return]
    return None


def on_stream_of(obj: Any, framework: str) -> AbstractContextManager[cupy.cuda.Stream | None]:
    """A context in which CuPy's current stream is the stream for work on `obj`.

    It yields that stream, None for host arrays. For a torch tensor it is torch's current stream, and
    CuPy then allocates from torch's memory. For all other arrays it is CuPy's current stream on the
    array's device.
    """
    try:
        device = device_of(obj, framework)
    except Exception:  # it cannot be read: `import_array` raises for that and names the argument
        device = HOST
    if device == HOST:
        return contextlib.nullcontext()
    if framework == "torch":
        return streams.on_torch_stream(device)
    return contextlib.nullcontext(compute_stream(framework, device))


def device_of(obj: Any, framework: str) -> int:
    """The CUDA ordinal, or HOST for anything that is not CUDA memory."""
    if framework == "numpy":
        return HOST
    if framework == "cupy":
        return int(obj.data.device_id)
    if framework == "torch":  # its __dlpack_device__ takes ten times as long
        return int(obj.get_device()) if obj.is_cuda else HOST
    kind, ordinal = obj.__dlpack_device__()
    return int(ordinal) if int(kind) in dlpack.DEVICE_TYPES else HOST


def import_array(name: str, obj: Any, *, stream: cupy.cuda.Stream | None = None) -> Imported:
    """A NumPy or CuPy view of `obj`, without a copy.

    stream: where the array will be used; None is CuPy's current stream on the array's device. It is
    made to wait for the work on the array that its framework has queued so far. A torch tensor that requires
    grad is read as its `detach()`.

    TypeError, naming `name`, for anything that is no array or cannot be viewed as one.
    """
    framework = framework_of(obj)
    if framework == "numpy":
        return _import_numpy(name, obj)
    if framework == "cupy":
        return _import_cupy(name, obj, stream)
    if not hasattr(type(obj), "__dlpack__"):
        _refuse(name, obj)
    try:
        return _import_dlpack(obj, framework, stream)
    except ImportError:
        raise
    except Exception as error:  # frameworks raise errors of many types for what they cannot export
        advice = array_advice(obj, name)
        why = "; ".join((*str(error).splitlines()[:1], advice)) if advice else error
        raise TypeError(
            f"{name}: got {_described(obj)}, which cannot be read through DLPack: {why}"
        ) from error


def unwritable(name: str, framework: str) -> str:
    """The message for an array to write that is read-only."""
    if framework in _IMMUTABLE:
        return f"{name}: got an array of {framework}, which never changes; pass one of NumPy, CuPy or torch"
    return f"{name}: got a read-only array; pass a writable one"


def is_recording() -> bool:
    """Whether autograd would record now: torch's grad mode is on or a forward-mode level is open. True without torch."""
    torch = imported.torch()
    return torch is None or bool(torch.is_grad_enabled()) or forward_mode.is_on()


def refuse_jit_trace() -> None:
    """RuntimeError under torch.jit.trace, which records only torch operators."""
    if sys.modules["torch"].jit.is_tracing():
        raise RuntimeError(
            "got a call in torch.jit.trace, which would keep its result as a constant; expected none; use torch.export or "
            "torch.compile, with rawattn.torch.attention"
        )


def refuse_gradients(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Raises for an array whose gradient would be lost, since nothing records this call.

    RuntimeError for a torch tensor that has a tangent, or that requires a gradient while grad mode is on. TypeError for a JAX
    tracer.
    """
    forward_mode.refuse_tangents(names, arrays)
    torch = imported.torch()
    for name, x in zip(names, arrays, strict=True):
        if is_traced(x):
            raise TypeError(f"{name}: got a JAX tracer; {array_advice(x, name)}")
        if (
            torch is not None
            and isinstance(x, torch.Tensor)
            and x.requires_grad
            and torch.is_grad_enabled()
        ):
            raise RuntimeError(
                f"{name}: got a tensor that requires a gradient, which would be lost here: rawattn.torch.attention alone has "
                f"gradients; pass {name}.detach(), or call under torch.no_grad()"
            )


def refuse_gradients_of_written(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """RuntimeError for a torch tensor to write that has a tangent, or that requires a gradient while grad mode is on.

    Autograd would attribute the written values to the operations that it recorded for the old ones.
    """
    forward_mode.refuse_tangents(names, arrays)
    torch = imported.torch()
    if torch is None:
        return
    for name, x in zip(names, arrays, strict=True):
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: got a tensor to write that requires a gradient, which would not be that of what is written; pass "
                f"{name}.detach(), or call under torch.no_grad()"
            )


def _import_numpy(name: str, obj: Any) -> Imported:
    if type(obj) is not np.ndarray:
        obj = _plain_numpy(name, obj)
    if not obj.dtype.isnative:
        raise TypeError(
            f"{name}: got dtype {obj.dtype.str}, which is not in this machine's byte order; "
            f"pass {name}.astype({name}.dtype.newbyteorder('='))"
        )
    return Imported(obj, HOST, "numpy", not obj.flags.writeable)


def _plain_numpy(name: str, obj: Any) -> np.ndarray[Any, Any]:
    if not isinstance(obj, np.ndarray):
        _refuse(name, obj)
    if isinstance(obj, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: got a masked array, whose mask would be ignored; {array_advice(obj, name)}"
        )
    if isinstance(obj, np.matrix):
        raise TypeError(f"{name}: got a numpy.matrix; pass numpy.asarray({name})")
    return obj.view(np.ndarray)


def _import_cupy(name: str, obj: Any, stream: Any) -> Imported:
    import cupy

    if not isinstance(obj, cupy.ndarray):
        _refuse(name, obj)
    device = obj.data.device_id
    if stream is None:
        stream = cupy.cuda.get_current_stream(device)
    producer = streams.current_stream("cupy", device)
    owner: object = obj
    if producer != stream.ptr:
        owner = _borrow(obj, "cupy", producer, device, stream)
    elif type(obj) is cupy.ndarray:
        return Imported(obj, device, "cupy", False)
    array = dlpack.device_array(obj.data.ptr, obj.shape, obj.dtype, obj.strides, device, owner)
    return Imported(array, device, "cupy", False)


def _import_dlpack(obj: Any, framework: str, stream: Any) -> Imported:
    if getattr(obj, "requires_grad", False):
        obj = obj.detach()
    if framework == "torch":
        view = native.view_of_torch(obj)
        if view is not None:
            return _import_torch(obj, view, stream)
        if obj.is_neg():  # a capsule cannot say that its memory holds negated values
            raise TypeError("it is a view of negated memory; pass its resolve_neg()")
    device = device_of(obj, framework)
    if device != HOST:
        return _import_device(obj, framework, device, stream)
    # torch before 2.9 exports no capsule of float8, so it is exported as bytes.
    of_bytes = framework == "torch" and str(obj.dtype) == "torch.float8_e4m3fn"
    tensor = dlpack.read(_capsule(obj.view(sys.modules["torch"].uint8) if of_bytes else obj))
    if tensor.device_type not in dlpack.HOST_TYPES:
        raise TypeError(f"DLPack device type {tensor.device_type}; accepted are CPU and CUDA")
    array = dlpack.host_view(tensor)
    if of_bytes:
        array = array.view(dlpack.FLOAT8)
    if framework in _IMMUTABLE:
        array.flags.writeable = False
    return Imported(array, HOST, framework, not array.flags.writeable)


def _import_torch(obj: Any, view: native.View, stream: Any) -> Imported:
    """Made from the tensor's attributes: a capsule takes four times as long."""
    cupy = streams.import_cupy()
    device = view.device
    if stream is None:
        stream = cupy.cuda.get_current_stream(device)
    producer = streams.current_stream("torch", device)
    owner = obj if producer == stream.ptr else _borrow(obj, "torch", producer, device, stream)
    # CuPy makes an array in two thirds of the time if it gets no strides.
    strides = None if obj.is_contiguous() else view.strides
    form = (view.address, view.shape, view.dtype, strides, device)
    return Imported(dlpack.device_array(*form, owner), device, "torch", False)


def _import_device(obj: Any, framework: str, device: int, stream: Any) -> Imported:
    cupy = streams.import_cupy()
    with cupy.cuda.Device(device):  # torch exports only tensors on its current device
        if stream is None:
            stream = cupy.cuda.get_current_stream()
        producer = streams.current_stream(framework, device)
        known = producer is not None
        capsule = _capsule(obj, stream=-1 if known else _wait_argument(framework, stream.ptr))
    owner = capsule
    if producer != stream.ptr:
        owner = _borrow(capsule, framework, producer, device, stream)
    tensor = dlpack.read(capsule)
    array = dlpack.device_view(tensor, owner)
    readonly = tensor.readonly or framework in _IMMUTABLE
    return Imported(array, array.data.device_id, framework, readonly)


def _borrow(owner: object, framework: str, producer: int | None, device: int, stream: Any) -> Any:
    if producer is not None:
        streams.order(producer, stream.ptr, device)
    return streams.Borrowed(owner, framework, device, stream)


def _wait_argument(framework: str, handle: int) -> int | None:
    """The `stream=` of `__dlpack__` with which a framework makes the stream `handle` wait for its own."""
    capturing = streams.is_capturing(handle)
    if framework == "tensorflow" or (framework == "jax" and capturing):
        return None  # they do not know -1; with None they wait on the host
    return -1 if capturing else handle or streams.DLPACK_LEGACY


def _capsule(obj: Any, **keywords: Any) -> object:
    with streams.capsule_lock:
        try:
            return obj.__dlpack__(**keywords, max_version=dlpack.MAX_VERSION)
        except TypeError:  # a producer older than DLPack 1.0
            return obj.__dlpack__(**keywords)


def _refuse(name: str, obj: object) -> NoReturn:
    advice = array_advice(obj, name)
    if not advice and hasattr(obj, "__cuda_array_interface__"):
        advice = f"pass cupy.asarray({name})"
    elif not advice and hasattr(obj, "__array__"):
        advice = f"pass numpy.asarray({name}), in the dtype that is meant"
    raise TypeError(
        f"{name}: got {_described(obj)}; accepted are NumPy and CuPy arrays and objects with "
        f"__dlpack__ (torch, JAX, ...){'; ' if advice else ''}{advice}"
    )


def _described(obj: object) -> str:
    cls = type(obj)
    name = cls.__qualname__
    if cls.__module__ != "builtins":
        name = f"{cls.__module__}.{name}"
    return f"{name} of dtype {obj.dtype}" if hasattr(obj, "dtype") else name


def empty_host(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised NumPy array, aligned to 64 bytes, since JAX copies arrays that are not."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    block = np.empty(nbytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    array: np.ndarray[Any, Any] = block[start : start + nbytes].view(dtype).reshape(shape)
    return array


class _Exported:
    """The producer that is passed to a `from_dlpack`: an array and the stream on which it is written."""

    def __init__(self, array: Any, stream: Any) -> None:
        self._array = array
        self._stream = stream

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None
    ) -> object:
        if isinstance(self._array, np.ndarray):
            return dlpack.write(self._array, max_version=max_version)
        if stream != -1:
            reader = 0 if stream in (None, streams.DLPACK_LEGACY) else stream
            streams.order(self._stream.ptr, reader, self._array.data.device_id)
        return dlpack.write(self._array, stream=-1, max_version=max_version)


def export_array(array: Any, framework: str, stream: cupy.cuda.Stream | None) -> object:
    """`array` as an array of `framework`, without a copy. Later work of the framework on it waits for `stream`.

    For NumPy, CuPy and frameworks without a `from_dlpack` the array is returned as it is.
    """
    importer = _importers.get(framework) or _find_importer(framework)
    if importer is None or framework in ("numpy", "cupy"):
        return array
    exported = _Exported(array, stream)
    if framework == "tensorflow":  # takes a bare capsule, which cannot order streams
        if stream is not None:
            stream.synchronize()
        return importer(exported.__dlpack__(stream=-1))
    return importer(exported)
