"""The way of a call of `combine`: arrays read, described and checked, merged on a GPU or by the CPU backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rawattn._call import partials
from rawattn._call.checks import check_out
from rawattn._call.partials import Given, Partials
from rawattn._cpu import combine as cpu_combine
from rawattn._interop import arrays
from rawattn._interop.arrays import HOST
from rawattn._interop.written import tell_written
from rawattn._runtime.calls import name_of
from rawattn._runtime.devices import gpu_available

if TYPE_CHECKING:
    from rawattn._runtime.combine_plan import Planned

FLOAT32 = np.dtype(np.float32)


class Read(NamedTuple):
    """A call's arrays as views of NumPy or CuPy, checked. target: of `out`, None where that is not the caller's."""

    described: Partials
    sides: tuple[Given, Given]
    outs: Sequence[Any]
    lses: Sequence[Any]
    target: Any
    device: int

    def form(self) -> tuple[Any, ...]:
        """All of the partials but their values and addresses."""
        return tuple((x.shape, x.strides, x.dtype) for x in (*self.outs, *self.lses))


def run(
    outs: Any, lses: Any, out: Any, dtype: Any, planned: Planned | None = None
) -> tuple[Any, Any]:
    """out and lse, in the framework of the first partial. planned: what a plan has; its results are written."""
    first, framework = _first(outs)
    with arrays.on_stream_of(first, framework) as stream:
        call = read(outs, lses, out, dtype, framework, stream)
        lse = None
        if planned is not None:
            planned.check(call)
            lse = arrays.import_array("lse", planned.lse, stream=stream).array
        results = _place(call.device)(
            call.described, call.sides, call.outs, call.lses, call.target, lse
        )
        written = out, None if planned is None else planned.lse
        tell_written(*written)
        exported = [
            arrays.export_array(new, framework, stream) if own is None else own
            for new, own in zip(results, written, strict=True)
        ]
        return exported[0], exported[1]


def _place(device: int) -> Callable[..., tuple[Any, Any]]:
    """Where a call with arrays on `device` runs."""
    if device == HOST and not gpu_available():
        return cpu
    from rawattn._runtime import combine_gpu

    return combine_gpu.from_host if device == HOST else combine_gpu.cuda


def _first(outs: Any) -> tuple[Any, str]:
    first = partials.given("outs", outs).arrays[0]
    return first, arrays.framework_of(first)


def read(outs: Any, lses: Any, out: Any, dtype: Any, framework: str, stream: Any) -> Read:
    """Every check of a call. stream: that on which its arrays are ready then."""
    sides = partials.given("outs", outs), partials.given("lses", lses)
    names = [*sides[0].names(), *sides[1].names()]
    inputs = [*sides[0].arrays, *sides[1].arrays]
    arrays.refuse_gradients(names, inputs)
    given = [arrays.import_array(n, x, stream=stream) for n, x in zip(names, inputs, strict=True)]
    views = [x.array for x in given]
    device = given[0].device
    target = None
    if out is not None:
        arrays.refuse_gradients_of_written(("out",), (out,))
        imported = arrays.import_array("out", out, stream=stream)
        if imported.readonly:
            raise ValueError("out: got a read-only array; pass a writable one")
        given.append(imported)
        target = imported.array
    for name, each in zip((*names, "out"), given, strict=False):
        if each.device != device:
            raise ValueError(
                f"{name}: on {name_of(each.device)}, but {names[0]} is on {name_of(device)}; "
                "move them to one device"
            )
    count = len(sides[0].arrays)
    described = partials.describe(*sides, views[:count], views[count:], dtype, framework)
    if target is not None:
        _check_out(target, described, list(zip(names, views, strict=True)))
    return Read(described, sides, views[:count], views[count:], target, device)


def _check_out(out: Any, described: Partials, others: list[tuple[str, Any]]) -> None:
    if tuple(out.shape) == described.shape and out.dtype != described.result:
        raise TypeError(
            f"out: got dtype {out.dtype}, expected {described.result}, that of the result; pass "
            f"dtype={str(out.dtype)!r} too, or an array of {described.result}"
        )
    check_out(out, shape=described.shape, dtype=described.result, others=others)


def cpu(
    described: Partials,
    sides: tuple[Given, Given],
    outs: Sequence[Any],
    lses: Sequence[Any],
    target: Any,
    lse: Any = None,
) -> tuple[Any, Any]:
    """NumPy arrays, by the CPU backend."""
    out = arrays.empty_host(described.shape, described.result) if target is None else target
    lse = arrays.empty_host(described.lse_shape, FLOAT32) if lse is None else lse
    values, logs = (
        given if side.listed else list(given[0])
        for side, given in zip(sides, (outs, lses), strict=True)
    )
    cpu_combine.combine(values, logs, out, lse)
    return out, lse
