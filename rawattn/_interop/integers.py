"""Integers of any framework, and in lists."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from rawattn._interop import dlpack, streams
from rawattn._interop.advice import cast
from rawattn._interop.arrays import framework_of, import_array
from rawattn._interop.native import native

if TYPE_CHECKING:
    import cupy

# Dtypes in a set, since comparing one with a type makes a dtype of that.
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_INTEGERS = frozenset({_INT32, _INT64})


def import_integers(
    name: str, obj: Any, *, stream: cupy.cuda.Stream | None = None
) -> np.ndarray[Any, Any] | cupy.ndarray:
    """An int32 or int64 view of an array of any framework; lists of int become int64.

    TypeError, naming `name`, for other dtypes, bool and float included.
    """
    if isinstance(obj, (list, tuple, range)):
        array = _array_of_lists(name, obj)
    else:
        array = import_array(name, obj, stream=stream).array
    if array.dtype not in _INTEGERS:
        listed = isinstance(obj, (list, tuple, range))
        fix = "" if listed else f"; convert it, as by {cast(framework_of(obj), name, 'int32')}"
        raise TypeError(
            f"{name}: got {array.dtype}; accepted are int32 and int64 arrays and lists of int{fix}"
        )
    return array


def of_torch(tensor: Any) -> cupy.ndarray | None:
    """What `import_integers` makes of a plain CUDA tensor of torch's that no stream has to wait for, in a third of the time.

    None for everything else.
    """
    own = native("torch")
    read = None if own is None else own.reader(1)(tensor)
    if own is None or read is None:
        return None
    (address,), (shape, dense, dtype, device, _), _ = read
    torch = sys.modules["torch"]
    known = _INT32 if dtype is torch.int32 else _INT64 if dtype is torch.int64 else None
    if known is None or dense is not True:
        return None
    if own.stream(device) != streams.current_stream("cupy", device):
        return None
    return dlpack.device_array(address, tuple(shape), known, None, device, tensor)


def _array_of_lists(name: str, obj: Any) -> np.ndarray[Any, Any]:
    if _holds_bool(obj):  # beside integers, NumPy would make integers of them
        raise TypeError(f"{name}: got a list with bool in it; accepted are lists of int")
    try:
        array: np.ndarray[Any, Any] = np.asarray(obj)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got lists that make no integer array: {error}") from error
    return array.astype(np.int64) if array.dtype.kind == "i" or array.size == 0 else array


def _holds_bool(obj: Any) -> bool:
    return any(
        isinstance(x, (bool, np.bool_)) or (isinstance(x, (list, tuple)) and _holds_bool(x))
        for x in obj
    )
