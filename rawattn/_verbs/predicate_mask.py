"""Masks of predicates, built on the GPU of the captured arrays, or on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rawattn._interop import arrays
from rawattn._interop.arrays import HOST
from rawattn._masks import host
from rawattn._masks.block_mask import BlockMask, bits_view, from_filled, map_view, zeroed_buffers
from rawattn._masks.layout import GRANULE_ROWS, Shape
from rawattn._runtime.devices import gpu_available
from rawattn._scores.numpy_eval import holds
from rawattn._scores.score_mod import Predicate


def of_predicate(text: str, shape: Shape, captured: Mapping[str, Any]) -> BlockMask:
    """The mask, on the device of the captured arrays; without such arrays on the current GPU if there is one, else the host."""
    predicate = Predicate(text, **captured)
    given = dict(predicate.arrays)
    first = next(iter(given.values()), None)
    with arrays.on_stream_of(first, arrays.framework_of(first)) as stream:
        views: dict[str, Any] = {}
        on: int | None = None
        for name, each in given.items():
            imported = arrays.import_array(name, each, stream=stream)
            if on is not None and imported.device != on:
                raise ValueError(
                    f"{name}: the captured arrays of a predicate lie on one device, the host or a GPU"
                )
            on, views[name] = imported.device, imported.array
        if on is None:
            on = HOST
            if gpu_available():
                import cupy

                on = cupy.cuda.runtime.getDevice()
        if on != HOST:
            from rawattn._runtime import pack_masks

            return pack_masks.of_predicate(predicate, views, shape, on)
    return _on_host(predicate, views, shape)


def _on_host(predicate: Predicate, captured: Mapping[str, Any], shape: Shape) -> BlockMask:
    buffers = zeroed_buffers(shape)
    bits, found, _ = buffers
    _, _, rows, keys = shape
    j = np.arange(keys)
    for batch, head in np.ndindex(shape[:2]):
        for first in range(0, rows, GRANULE_ROWS):
            some = slice(first, min(first + GRANULE_ROWS, rows))
            i = np.arange(some.start, some.stop)[:, None]
            position = (batch, head, head, i, j, rows, keys)
            keep = holds(predicate.text, *position, captured, predicate.scalars)
            band = slice(first // GRANULE_ROWS, first // GRANULE_ROWS + 1)
            host.write_rows(
                keep,
                bits_view(bits, shape)[batch, head, some],
                map_view(found, shape)[batch, head, band],
            )
    return from_filled(buffers, shape)
