"""The fast path for CuPy arrays and CUDA tensors of torch: read by their attributes, to save host time in repeated calls.

Nothing is converted. An array is read as an address and a form, and results are made by its own framework. Work is enqueued on
the framework's current stream and takes its memory from the framework, which knows how to keep it for a captured graph. Any
array that is not plainly one of these goes through `arrays.import_array`.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from rawattn._interop import dlpack, streams
from rawattn._interop.readers import Attributes
from rawattn._strides import contiguous


class View(NamedTuple):
    """The memory of an array. Strides are in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int


# The arrays of a call, of one framework, as a reader returns them. A plain tuple, since one is made at every call:
# - their addresses, 0 for an array that is not given;
# - their form, hashable: for each array its shape, its strides (True for C order), dtype and device, or one None if it is not
#   given; then the OR of all addresses, modulo 16;
# - whether one of them requires a gradient or may have a tangent.
Read = tuple[list[int], tuple[Any, ...], bool]


class Memory(Protocol):
    """The source of a run's memory, for work on one stream."""

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        """Scratch for that work alone: its owner, and its address."""

    def keep(self, nbytes: int, device: int) -> tuple[Any, int]:
        """Memory that later work on that stream reuses: its owner, and its address."""

    def keeps_captured(self) -> bool:
        """Whether memory allocated during a capture stays the graph's after its owner is gone."""


class Native(Memory, Protocol):
    """Operations on the arrays of one framework on a GPU. Its memory is for work on the framework's current stream."""

    kinds: tuple[type, ...]  # of its arrays
    attributes: Attributes  # how they are read
    # Whether a compiler traces the call, so that arrays have no values; None: never.
    is_traced: Callable[[], bool] | None
    # Whether an array may get other memory, as a torch parameter does by `module.to()` or when it is offloaded.
    may_move: bool

    def read(self, arrays: Sequence[Any], required: int) -> Read | None:
        """Reads the arrays, of which some may be None, but not the first `required`. None unless all are plain arrays of the
        framework on a GPU.
        """

    def reader(self, count: int) -> Callable[..., Read | None]:
        """A function that reads `count` arrays, given as its arguments, none of them None."""

    def allocator_like(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any
    ) -> Callable[[], Any]:
        """A function that makes arrays as `empty` does, faster, for repeated calls."""

    def view(self, array: Any) -> View:
        """The view of an array that `read` accepts."""

    def address(self, array: Any) -> int:
        """The address of the array's first element."""

    def current_device(self) -> int:
        """The ordinal of the calling thread's current device, by the CUDA runtime."""

    def contiguous(self, array: Any) -> Any:
        """A copy in C order."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any) -> Any:
        """A new, uninitialised array on the device of `beside`, which is the current device."""

    def stream(self, device: int) -> int:
        """The handle of the framework's current stream on a device."""

    def stream_keeper(self, device: int) -> Any:
        """What keeps that stream from being destroyed; None if nothing need or can."""


class _GeneratedReaders:
    """`Native.read` and `Native.reader`, by generated functions: one for each combination of given arrays."""

    is_traced: Callable[[], bool] | None = None
    may_move = False

    def __init__(self, attributes: Attributes) -> None:
        self.attributes = attributes
        self._readers: dict[tuple[bool, ...], Callable[..., Read | None]] = {}

    def read(self, arrays: Sequence[Any], required: int) -> Read | None:
        given = tuple([x is not None for x in arrays])
        return self._reader(given)(*arrays) if all(given[:required]) else None

    def reader(self, count: int) -> Callable[..., Read | None]:
        return self._reader((True,) * count)

    def _reader(self, given: tuple[bool, ...]) -> Callable[..., Read | None]:
        found = self._readers.get(given)
        if found is None:
            found = self._readers[given] = self.attributes.reader(given)
        return found


class CuPy(_GeneratedReaders):
    """CuPy's arrays, on CuPy's current stream and in its memory."""

    def __init__(self) -> None:
        import cupy

        super().__init__(
            Attributes(
                typed="type({x}) is kind",
                plain="True",
                address="({x}_ := {x}.data).ptr",
                form="{x}._c_contiguous or {x}.strides, {x}.dtype, {x}_.device_id",
                tracked="False",
                names={
                    "kind": cupy.ndarray,
                    "current_stream": cupy.cuda.get_current_stream,
                    "allocate": cupy.cuda.alloc,
                },
                stream="current_stream(device).ptr",
                block="allocate(nbytes)",
            )
        )
        self.kinds = (cupy.ndarray,)
        self.address = operator.attrgetter("data.ptr")
        self._type = cupy.ndarray
        self.current_device = cupy.cuda.runtime.getDevice
        self._allocate = cupy.cuda.alloc
        self._current_stream = cupy.cuda.get_current_stream
        self._ascontiguousarray = cupy.ascontiguousarray

    def view(self, array: Any) -> View:
        data, shape, dtype = array.data, array.shape, array.dtype
        strides = contiguous(shape, dtype.itemsize) if array._c_contiguous else array.strides
        return View(data.ptr, shape, strides, dtype, data.device_id)

    def contiguous(self, array: Any) -> Any:
        # Copied as unsigned integers, since CuPy does not copy every dtype.
        words = self._ascontiguousarray(array.view(f"u{array.dtype.itemsize}"))
        return words.view(array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any) -> Any:
        return self._type(shape, dtype)

    def allocator_like(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any
    ) -> Callable[[], Any]:
        return functools.partial(self._type, shape, dtype)

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        memory = self._allocate(nbytes)
        return memory, memory.ptr

    keep = allocate

    def stream(self, device: int) -> int:
        return self._current_stream(device).ptr  # type: ignore[no-any-return]

    def stream_keeper(self, device: int) -> Any:
        return self._current_stream(device)

    def keeps_captured(self) -> bool:
        return False


class Torch(_GeneratedReaders):
    """CUDA tensors of torch, on torch's current stream and in its memory. Memory that later calls reuse is CuPy's (`keep`)."""

    may_move = True

    def __init__(self) -> None:
        import cupy

        torch = sys.modules["torch"]
        self.is_traced = torch.compiler.is_dynamo_compiling
        super().__init__(
            Attributes(
                typed="(type({x}) is tensor or type({x}) is parameter)",
                # The memory of a negated view does not hold its values. Only parts of complex numbers are such views, which
                # bfloat16 has none of.
                plain="(({x}t := {x}.dtype) is bfloat16 or not {x}.is_neg()) and ({x}_ := {x}.get_device()) >= 0",
                address="({x}.data_ptr() or no_memory({x}))",
                form="{x}.is_contiguous() or {x}.stride(), {x}t, {x}_",
                tracked="{x}.requires_grad",
                names={
                    "tensor": torch.Tensor,
                    "parameter": torch.nn.Parameter,
                    "bfloat16": torch.bfloat16,
                    "no_memory": _no_memory,
                    "traced": self.is_traced,
                    "forward_ad": torch.autograd.forward_ad,
                },
                have_values="not traced()",
                has_tangents="forward_ad._current_level >= 0",
            )
        )
        self.kinds = (torch.Tensor, torch.nn.Parameter)
        self.address = torch.Tensor.data_ptr
        self.current_device = cupy.cuda.runtime.getDevice
        self._empty, self._empty_like, self._as_tensor = (
            torch.empty,
            torch.empty_like,
            torch.as_tensor,
        )
        self._contiguous = torch.contiguous_format
        self._ones: dict[int, Any] = {}
        self._allocators: dict[int, Callable[[int], Any]] = {}
        self._bytes = torch.uint8
        self._of_torch = {
            torch.float16: np.dtype(np.float16),
            torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
            torch.float32: np.dtype(np.float32),
            torch.float64: np.dtype(np.float64),
            torch.int32: np.dtype(np.int32),
            torch.int64: np.dtype(np.int64),
            torch.bool: np.dtype(np.bool_),
        }
        self._of_torch |= {
            getattr(torch, dtype.name): dtype
            for dtype in dlpack.FLOAT8_CODES
            if hasattr(torch, dtype.name)
        }
        self._to_torch = {dtype: name for name, dtype in self._of_torch.items()}
        self._devices: dict[int, Any] = {}
        self._make_device = torch.device
        self._keep, self._current_stream = cupy.cuda.alloc, cupy.cuda.get_current_stream
        self.stream = streams.torch_stream()
        self.read_one = self.reader(1)
        self.dtype_of = self._of_torch.get

    def view(self, array: Any) -> View:
        dtype = self._of_torch.get(array.dtype)
        if dtype is None:
            raise TypeError(f"got dtype {array.dtype}")
        shape, size = tuple(array.shape), dtype.itemsize
        dense = array.is_contiguous()
        strides = contiguous(shape, size) if dense else tuple(size * x for x in array.stride())
        return View(array.data_ptr(), shape, strides, dtype, array.get_device())

    def contiguous(self, array: Any) -> Any:
        return array.detach().contiguous()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any) -> Any:
        wanted = self._to_torch[dtype]
        # Without a keyword `new_empty` takes two thirds of the time.
        return (
            beside.new_empty(shape)
            if beside.dtype is wanted
            else beside.new_empty(shape, dtype=wanted)
        )

    def allocator_like(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any
    ) -> Callable[[], Any]:
        """Uses `empty_like` on a single element expanded to the shape, since torch would parse a shape anew at each call."""
        one = self._one(beside.get_device()).view(self._to_torch[dtype])[:1].expand(shape)
        return functools.partial(self._empty_like, one, memory_format=self._contiguous)

    def _one(self, device: int) -> Any:
        """A tensor of four bytes that lives as long as the process, so it is CuPy's memory, not torch's."""
        one = self._ones.get(device)
        if one is None:
            import cupy

            with cupy.cuda.Device(device):
                one = self._as_tensor(cupy.ndarray(1, np.float32), device=self._device(device))
            self._ones[device] = one
        return one

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        allocator = self._allocators.get(device)
        if allocator is None:
            # `new_empty` of a tensor without memory, since parsing a dtype and a device takes torch a quarter of the time.
            none = self._empty(0, dtype=self._bytes, device=self._device(device))
            allocator = self._allocators[device] = none.new_empty
        block = allocator(nbytes)
        return block, block.data_ptr()

    def keep(self, nbytes: int, device: int) -> tuple[Any, int]:
        """CuPy's memory, except during a capture. Not torch's, since torch.compile warms programs up in the memory of their
        graphs, where nothing may stay allocated.
        """
        stream = self.stream(device)
        if streams.is_capturing(stream):
            return self.allocate(nbytes, device)
        # CuPy reuses freed memory in the order of its current stream, so that must be this one. Switching takes time, so it is
        # done only if needed.
        if self.is_cupy_current(stream, device):
            memory = self._keep(nbytes)
        else:
            with streams.external(stream):
                memory = self._keep(nbytes)
        return memory, memory.ptr

    def keeps_captured(self) -> bool:
        return True

    def stream_keeper(self, device: int) -> Any:
        """CuPy's stream, if it is the current one of both. torch destroys none of its own."""
        current = self._current_stream(device)
        return current if current.ptr == self.stream(device) else None

    def is_cupy_current(self, stream: int, device: int) -> bool:
        """Whether a stream is CuPy's current stream on the device."""
        return bool(self._current_stream(device).ptr == stream)

    def _device(self, ordinal: int) -> Any:
        device = self._devices.get(ordinal)
        if device is None:
            device = self._devices[ordinal] = self._make_device("cuda", ordinal)
        return device


def _no_memory(tensor: Any) -> int:
    """0, the address of a tensor without elements. RuntimeError for any other one without memory.

    Its storage was freed, as that of a sharded parameter, or it never had memory, as torch's zeros of a derivative.
    """
    if tensor.numel():
        raise RuntimeError("a tensor without memory")
    return 0


def view_of_torch(tensor: Any) -> View | None:
    """The view of a plain CUDA tensor of torch; None for a tensor that its attributes do not describe."""
    native = native_of("torch")
    try:
        if native is None or native.reader(1)(tensor) is None:
            return None
        return native.view(tensor)
    except TypeError:  # a dtype that no array of a call may have
        return None


_makers: dict[str, type[Any]] = {"cupy": CuPy, "torch": Torch}
_made: dict[str, Native | None] = {}


def native_of(framework: str) -> Native | None:
    """The `Native` of a framework, by the name that `arrays.framework_of` gives. None for frameworks that have none.

    Also None for torch if CuPy cannot be imported: tensors on the CPU do not need it, and importing one on a GPU raises an
    error that says why.
    """
    if framework in _makers and framework not in _made:
        _made.setdefault(framework, _makers[framework]() if _has_cupy() else None)
    return _made.get(framework)


def _has_cupy() -> bool:
    try:
        import cupy  # noqa: F401
    except Exception:  # importing CuPy may fail in many ways: it loads libraries and writes files
        return False
    return True
