"""float8 pages and their scales. A scale is a number, or an array with one number for each kv head."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rawattn._call.options import ArrayForm, as_float, for_message
from rawattn._interop.advice import cast
from rawattn._interop.arrays import HOST, device_of, framework_of, import_array, refuse_gradients

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # 448
NAMES = ("k_scale", "v_scale")
# The form of a scale that is a number. The number itself is data of the call: calls that differ only in it share kernels.
NUMBER = "number"

_ACCEPTED = "a finite number above 0, or a float32 array of shape (nheads_kv,)"
_8_BITS = frozenset(
    dtype for name, dtype in vars(ml_dtypes).items() if name.startswith("float8") and isinstance(dtype, type)
)  # fmt: skip


class Scales(NamedTuple):
    """The scales of a call by name. numbers: the bits of a float32 as an int, the form in which kernels take them."""

    arrays: Mapping[str, Any]
    numbers: Mapping[str, int]

    def forms(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(self.arrays), tuple(self.numbers)


def read(named: Mapping[str, Any]) -> Scales:
    """The scales of a call. named: the arguments k_scale and v_scale; None leaves one out.

    TypeError or ValueError for a number that is no scale, and for an array on the host that contains such a number.
    """
    arrays: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for name in NAMES:
        value = named[name]
        if value is None:
            continue
        if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
            single_value = getattr(value, "shape", None) == ()
            if not single_value or (host := _on_host(name, value)) is None:
                check(name, value)
                arrays[name] = value
                continue
            value = host.item()
        found = np.asarray(as_float(name, value, _ACCEPTED), np.float64)
        with np.errstate(over="ignore", under="ignore"):
            single = found.astype(np.float32)
        if not (np.isfinite(single) and single > 0):
            rounded = f", which is {single} in float32" if np.isfinite(found) and found > 0 else ""
            raise ValueError(f"{name}: got {for_message(value)}{rounded}, expected {_ACCEPTED}")
        numbers[name] = int(single.view(np.uint32))
    return Scales(arrays, numbers)


def check(name: str, array: Any) -> None:
    """ValueError for an array on the host that contains a number that is no scale."""
    host = _on_host(name, array)
    if host is None or host.dtype != np.float32:
        return
    good = np.isfinite(host) & (host > 0)
    if not good.all():
        first = tuple(int(n) for n in np.argwhere(~good)[0])
        raise ValueError(
            f"{name}: got {host[first]} at {list(first)}, expected finite numbers above 0"
        )


def _on_host(name: str, array: Any) -> NDArray[Any] | None:
    """An array on the host as a NumPy array; None for an array on a device."""
    refuse_gradients((name,), (array,))
    if device_of(array, framework_of(array)) != HOST:
        return None
    found: NDArray[Any] = import_array(name, array).array
    return found


def forms(
    scales: Mapping[str, Any], names: tuple[str, ...], float8: bool, nheads_kv: int
) -> dict[str, Any]:
    """The fields k_scale and v_scale of a `Problem`. scales: arrays by name; names: the scales that are numbers.

    TypeError or ValueError, naming the argument, what was got and what is accepted.
    """
    found: dict[str, Any] = {}
    for name in NAMES:
        if name not in names and name not in scales:
            continue
        if not float8:
            raise ValueError(
                f"{name}: got it with {name[0]}_pages that are not float8_e4m3fn, which are read as they are; leave it out"
            )
        found[name] = NUMBER if name in names else _form(name, scales[name], nheads_kv)
    return found


def _form(name: str, array: Any, nheads_kv: int) -> ArrayForm:
    if array.dtype != np.float32:
        raise TypeError(
            f"{name}: got dtype {array.dtype}, expected float32; convert it, as by {cast(None, name, 'float32')}"
        )
    if tuple(array.shape) != (nheads_kv,):
        advice = "; one for all heads is a float, or on a GPU an array expanded to this shape"
        raise ValueError(
            f"{name}: got shape {tuple(array.shape)}, expected (nheads_kv,) = ({nheads_kv},)"
            f"{'' if array.shape else advice}"
        )
    return ArrayForm("float32", (nheads_kv,), (nheads_kv,))


def value(name: str, extras: Mapping[str, Any]) -> Any:
    """A scale on the host, in a shape that broadcasts to (..., nheads_kv, D).

    extras: array scales by name, and number scales as bits by name with `_value` appended.
    """
    array = extras.get(name)
    if array is not None:
        return array[:, None]
    bits = extras.get(f"{name}_value")
    return np.float32(1 if bits is None else struct.unpack("<f", struct.pack("<I", bits))[0])


def quantised(rows: NDArray[Any], scale: Any) -> NDArray[Any]:
    """float32 rows divided by their scale, as float8_e4m3fn. Quotients out of range become the largest finite number."""
    found: NDArray[Any] = np.clip(rows / scale, -LARGEST, LARGEST).astype(FLOAT8)
    return found


def check_pools(named: Mapping[str, Any], lead: str) -> bool:
    """Whether both pools of pages hold float8_e4m3fn. named: k_pages, v_pages and the array `lead`, for the message.

    TypeError if only one of the pools does, NotImplementedError for other 8-bit floats.
    """
    kinds = {name: named[name].dtype for name in ("k_pages", "v_pages")}
    for name, dtype in kinds.items():
        if dtype.type in _8_BITS and dtype != FLOAT8:
            raise NotImplementedError(
                f"{name}: got dtype {dtype}, expected float8_e4m3fn, or {named[lead].dtype}, that of {lead}"
            )
    both = [dtype == FLOAT8 for dtype in kinds.values()]
    if any(both) and not all(both):
        _of_two(kinds)
    return all(both)


def _of_two(kinds: Mapping[str, Any]) -> NoReturn:
    raise TypeError(
        f"v_pages: got dtype {kinds['v_pages']}, expected {kinds['k_pages']}, that of k_pages: both are float8_e4m3fn or "
        "neither"
    )
