"""Imports integers (lengths, starts, page ids) from arrays of any framework and from lists."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from rawattn._interop import dlpack
from rawattn._interop.advice import cast, is_lazy
from rawattn._interop.arrays import framework_of, import_array
from rawattn._interop.native import native_of
from rawattn._interop.xla import is_traced

if TYPE_CHECKING:
    import cupy

# The dtypes of integer arrays. A set of dtypes, since comparing a dtype with np.int32 first makes a dtype of that type.
INTEGERS = frozenset({np.dtype(np.int32), np.dtype(np.int64)})
_ACCEPTED = "accepted are int32 and int64 arrays and lists of int"


def import_integers(
    name: str, obj: Any, *, stream: cupy.cuda.Stream | None = None
) -> np.ndarray[Any, Any] | cupy.ndarray:
    """An int32 or int64 view of an array of any framework; lists of int become int64.

    TypeError, naming `name`, for other dtypes, including bool and float. ValueError for an int that does not fit int64.
    """
    if isinstance(obj, (list, tuple, range)):
        array = _array_of_lists(name, obj)
    elif not hasattr(obj, "__dlpack__") and (
        obj is None or isinstance(obj, (str, float)) or is_lazy(obj)
    ):
        fix = f"; pass a list, list({name})" if is_lazy(obj) else ""
        raise TypeError(f"{name}: got {type(obj).__name__}; {_ACCEPTED}{fix}")
    else:
        array = import_array(name, obj, stream=stream).array
    if array.dtype not in INTEGERS:
        listed = isinstance(obj, (list, tuple, range))
        variable = name.rpartition(" ")[2]  # of "block_table's indptr"
        fix = "" if listed else f"; convert it, as by {cast(framework_of(obj), variable, 'int32')}"
        raise TypeError(f"{name}: got {array.dtype}; {_ACCEPTED}{fix}")
    return array


class TensorIntegers:
    """Integers of a torch tensor on a GPU, with the attributes of a CuPy array that calls read.

    Making a CuPy array takes half of the time of making a layout of tensors, so it is made only when it is needed.
    """

    def __init__(
        self, ptr: int, size: int, dtype: np.dtype[Any], device_id: int, tensor: Any
    ) -> None:
        self.ptr, self.size, self.dtype, self.device_id = ptr, size, dtype, device_id
        self.tensor = tensor

    @property
    def data(self) -> TensorIntegers:
        """Itself: it has `ptr` and `device_id`, as the `data` of a CuPy array has."""
        return self

    @functools.cached_property
    def array(self) -> cupy.ndarray:
        """A CuPy array over the tensor's memory."""
        form = self.ptr, (self.size,), self.dtype, None, self.device_id
        return dlpack.device_array(*form, self.tensor)

    def get(self) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        host: np.ndarray[Any, Any] = self.array.get()
        return host

    def __reduce__(self) -> Any:
        # A copy has memory and an address of its own.
        return as_array, (self.array,)


def as_array(integers: Any) -> Any:
    """`TensorIntegers` as a CuPy array; anything else as it is."""
    return integers.array if type(integers) is TensorIntegers else integers


def of_torch(tensor: Any) -> TensorIntegers | None:
    """The integers of a plain, contiguous CUDA tensor of one axis, if torch's current stream is CuPy's too, so that no stream
    has to wait. None for anything else.
    """
    native: Any = native_of("torch")
    read = None if native is None else native.read_one(tensor)
    if read is None:
        return None
    (address,), (shape, dense, dtype, device, _), _ = read
    known = native.dtype_of(dtype)
    if dense is not True or len(shape) != 1 or known not in INTEGERS:
        return None
    if not native.is_cupy_current(native.stream(device), device):
        return None
    return TensorIntegers(address, shape[0], known, device, tensor)


def _array_of_lists(name: str, obj: Any) -> np.ndarray[Any, Any]:
    if _holds_bool(obj):  # NumPy would turn bools among integers into integers
        raise TypeError(f"{name}: got a list with bool in it; accepted are lists of int")
    try:
        array: np.ndarray[Any, Any] = np.asarray(obj)
    except (TypeError, ValueError) as error:
        if any(map(is_traced, obj)):
            raise TypeError(
                f"{name}: got a list with values in it that JAX traces; pass jnp.stack([...]) of them"
            ) from None
        raise TypeError(f"{name}: got lists that make no integer array: {error}") from error
    if array.dtype.kind == "i" or array.size == 0:
        return array.astype(np.int64)
    for x in np.asarray(obj, object).flat:
        if isinstance(x, (int, np.integer)) and not -(2**63) <= x < 2**63:
            raise ValueError(f"{name}: got {x} in a list, expected integers that fit int64")
    return array


def _holds_bool(obj: Any) -> bool:
    return any(
        isinstance(x, (bool, np.bool_)) or (isinstance(x, (list, tuple)) and _holds_bool(x))
        for x in obj
    )
