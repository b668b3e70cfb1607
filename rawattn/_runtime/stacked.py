"""Stacks long lists of partials into one array for the outs and one for the lses, in the framework of the first."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawattn._call import partials
from rawattn._call.checks import check_apart
from rawattn._call.partials import PartialsSide
from rawattn._interop import arrays, streams
from rawattn._interop.arrays import HOST
from rawattn._runtime import graphs
from rawattn._runtime.calls import elsewhere


def stacked(outs: PartialsSide, lses: PartialsSide, dtype: Any, out: Any) -> tuple[Any, Any, Any]:
    """Outs and lses, each stacked if it is a list, and the dtype.

    The arrays of a list are checked first, since the names in messages, and whether `out` (which may be None) shares memory
    with one of them, cannot be told from the stacked copy.
    """
    first = outs.arrays[0]
    framework = arrays.framework_of(first)
    names = [*outs.names(), *lses.names()]
    given = [*outs.arrays, *lses.arrays]
    arrays.refuse_gradients(names, given)
    with arrays.on_stream_of(first, framework) as stream:
        read = [arrays.import_array(n, x, stream=stream) for n, x in zip(names, given, strict=True)]
        for name, each in zip(names, read, strict=True):
            if each.device != read[0].device:
                raise ValueError(elsewhere(name, each.device, read[0].device, names[0]))
        views = tuple(x.array for x in read)
        count = len(outs.arrays)
        sides = outs._replace(arrays=views[:count]), lses._replace(arrays=views[count:])
        partials.describe(*sides, dtype, framework)
        if out is not None:
            written = arrays.import_array("out", out, stream=stream).array
            check_apart(written, zip(names, views, strict=True), "out")
        made: list[Any] = []
        for side, own in zip(sides, (outs, lses), strict=True):
            if not side.listed:
                made.append(own.arrays[0])
                continue
            whole = _stack(side.arrays, read[0].device)
            if stream is not None and streams.is_capturing(stream.ptr):
                graphs.keep_forever(whole)
            made.append(arrays.export_array(whole, framework, stream))
    return made[0], made[1], dtype


def _stack(views: tuple[Any, ...], device: int) -> Any:
    """A stack of the views. Elements are copied as unsigned integers, since CuPy does not know every dtype."""
    first = views[0]
    words = np.dtype(f"u{first.dtype.itemsize}")
    shape = (len(views), *first.shape)
    if device == HOST:
        whole = arrays.empty_host(shape, first.dtype)
    else:
        import cupy

        with cupy.cuda.Device(device):
            whole = cupy.ndarray(shape, first.dtype)
    rows = whole.view(words)
    for n, view in enumerate(views):
        rows[n] = view.view(words)
    return whole
