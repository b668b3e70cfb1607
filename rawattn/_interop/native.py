"""CuPy arrays and CUDA tensors of torch, read by their attributes: what a repeated call on them costs is host time.

Nothing is converted: an array is an address and a form, results are made by the module that is already loaded, work is
enqueued on that module's current stream and takes that module's memory, which it knows how to keep for a captured graph.
Whatever is not plainly one of these goes through `arrays.import_array`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from rawattn._interop import streams


class View(NamedTuple):
    """Where an array lies. Strides are in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int


# Arrays of one framework as they were read: their addresses; their form (shapes, strides, dtypes and devices, None for an
# array not given), which is hashable; all addresses OR-ed together; whether one of them requires a gradient. A plain tuple,
# since one is made at every call.
Read = tuple[list[int], tuple[Any, ...], int, bool]


class Memory(Protocol):
    """Whose memory a run takes, for work on one stream."""

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        """For that work alone: who owns it, and its address."""

    def keep(self, nbytes: int, device: int) -> tuple[Any, int]:
        """Likewise of memory that later work on that stream finds again."""

    def keeps_captured(self) -> bool:
        """Whether memory allocated during a capture is the graph's, also once its owner is gone."""


class Native(Memory, Protocol):
    """How to deal with the arrays of one framework on a GPU. Its memory is for work on its current stream."""

    def read(self, arrays: Sequence[Any], required: int) -> Read | None:
        """None unless all of them are plain arrays of the framework on a GPU. The first `required` may not be None."""

    def view(self, array: Any) -> View:
        """Of an array that `read` takes."""

    def address(self, array: Any) -> int:
        """Of its first element."""

    def current_device(self) -> int:
        """The ordinal that CUDA's runtime has as the calling thread's current device."""

    def contiguous(self, array: Any) -> Any:
        """A copy in C order."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any) -> Any:
        """A new array, uninitialised, on the device of another one, which is the current one."""

    def stream(self, device: int) -> int:
        """Handle of the current stream."""


class CuPy:
    """CuPy's arrays, on CuPy's current stream and in its memory."""

    def __init__(self) -> None:
        import cupy

        self._type = cupy.ndarray
        self.current_device = cupy.cuda.runtime.getDevice
        self._allocate = cupy.cuda.alloc
        self._current_stream = cupy.cuda.get_current_stream
        self._ascontiguousarray = cupy.ascontiguousarray

    def read(self, arrays: Sequence[Any], required: int) -> Read | None:
        kind = self._type
        addresses: list[int] = []
        form: list[Any] = []
        together = 0
        for x in arrays:
            if type(x) is kind:
                data = x.data
                address = data.ptr
                together |= address
                addresses.append(address)
                form += (x.shape, x.strides, x.dtype, data.device_id)
            elif x is None and len(addresses) >= required:
                addresses.append(0)
                form.append(None)
            else:
                return None
        return addresses, tuple(form), together, False

    def view(self, array: Any) -> View:
        data = array.data
        return View(data.ptr, array.shape, array.strides, array.dtype, data.device_id)

    def address(self, array: Any) -> int:
        address: int = array.data.ptr
        return address

    def contiguous(self, array: Any) -> Any:
        return self._ascontiguousarray(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any) -> Any:
        return self._type(shape, dtype)

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        memory = self._allocate(nbytes)
        return memory, memory.ptr

    keep = allocate

    def stream(self, device: int) -> int:
        handle: int = self._current_stream(device).ptr
        return handle

    def keeps_captured(self) -> bool:
        return False


class Torch:
    """CUDA tensors of torch, on torch's current stream and in its memory, but for what later calls find again."""

    def __init__(self) -> None:
        import cupy

        torch = sys.modules["torch"]
        self.current_device = cupy.cuda.runtime.getDevice
        self._tensor, self._parameter = torch.Tensor, torch.nn.Parameter
        self._empty = torch.empty
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
        if hasattr(torch, "float8_e4m3fn"):
            self._of_torch[torch.float8_e4m3fn] = np.dtype(ml_dtypes.float8_e4m3fn)
        self._to_torch = {dtype: name for name, dtype in self._of_torch.items()}
        self._devices: dict[int, Any] = {}
        self._make_device = torch.device
        self._keep = cupy.cuda.alloc
        self._stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._current_stream = torch.cuda.current_stream

    def read(self, arrays: Sequence[Any], required: int) -> Read | None:
        try:
            return self._read(arrays, required)
        except RuntimeError:  # sparse and functional tensors have no strides or no memory
            return None

    def _read(self, arrays: Sequence[Any], required: int) -> Read | None:
        tensor, parameter = self._tensor, self._parameter
        addresses: list[int] = []
        form: list[Any] = []
        together = 0
        tracked = False
        for x in arrays:
            if x is None:
                if len(addresses) < required:
                    return None
                addresses.append(0)
                form.append(None)
                continue
            kind = type(x)
            # What a negated view's memory holds is not its values.
            if (kind is not tensor and kind is not parameter) or x.is_neg():
                return None
            device = x.get_device()
            if device < 0:
                return None
            address = x.data_ptr()
            together |= address
            addresses.append(address)
            form += (x.shape, x.stride(), x.dtype, device)
            if x.requires_grad:
                tracked = True
        return addresses, tuple(form), together, tracked

    def view(self, array: Any) -> View:
        dtype = self._of_torch.get(array.dtype)
        if dtype is None:
            raise TypeError(f"got dtype {array.dtype}")
        strides = tuple(stride * dtype.itemsize for stride in array.stride())
        return View(array.data_ptr(), tuple(array.shape), strides, dtype, array.get_device())

    def address(self, array: Any) -> int:
        address: int = array.data_ptr()
        return address

    def contiguous(self, array: Any) -> Any:
        return array.detach().contiguous()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], beside: Any) -> Any:
        wanted = self._to_torch[dtype]
        # Without keywords it takes two thirds of the time.
        return (
            beside.new_empty(shape)
            if beside.dtype is wanted
            else beside.new_empty(shape, dtype=wanted)
        )

    def allocate(self, nbytes: int, device: int) -> tuple[Any, int]:
        block = self._empty(nbytes, dtype=self._bytes, device=self._device(device))
        return block, block.data_ptr()

    def keep(self, nbytes: int, device: int) -> tuple[Any, int]:
        """CuPy's but for a capture: torch.compile warms programs up in their graphs' memory, where nothing may stay."""
        stream = self.stream(device)
        if streams.is_capturing(stream):
            return self.allocate(nbytes, device)
        with streams.external(stream):  # CuPy hands it out again in the order of that stream
            memory = self._keep(nbytes)
        return memory, memory.ptr

    def stream(self, device: int) -> int:
        if self._stream is not None:
            handle: int = self._stream(device)
            return handle
        return int(self._current_stream(device).cuda_stream)

    def keeps_captured(self) -> bool:
        return True

    def _device(self, ordinal: int) -> Any:
        device = self._devices.get(ordinal)
        if device is None:
            device = self._devices[ordinal] = self._make_device("cuda", ordinal)
        return device


def view_of_torch(tensor: Any) -> View | None:
    """Of a plain CUDA tensor of torch's; None for whatever its attributes do not tell."""
    own = native("torch")
    try:
        if own is None or own.read((tensor,), 1) is None:
            return None
        return own.view(tensor)
    except TypeError:  # a dtype that is none of an array of a call
        return None


_makers: dict[str, type[Any]] = {"cupy": CuPy, "torch": Torch}
_made: dict[str, Native] = {}


def native(framework: str) -> Native | None:
    """How to deal with arrays of a framework, by the name that `arrays.framework_of` gives."""
    found = _made.get(framework)
    if found is None and framework in _makers:
        found = _made.setdefault(framework, _makers[framework]())
    return found
