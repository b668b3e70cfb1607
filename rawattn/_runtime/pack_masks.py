"""The launches that build a `BlockMask` on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rawattn._interop import streams
from rawattn._kernels.portable import mask_writing
from rawattn._kernels.steps import Step
from rawattn._masks.block_mask import BlockMask, zeroed_buffers
from rawattn._masks.layout import Shape
from rawattn._runtime import graphs, kernel
from rawattn._scores.score_mod import Predicate


def of_bools(keep: Any, shape: Shape) -> BlockMask:
    """A mask of a CuPy array of bools with any strides. shape: that of the array, with all axes."""
    strides = keep.strides
    return _built(
        mask_writing.step(shape, strides, keep.data.ptr % 16),
        shape,
        {"mask": keep},
        keep.data.device_id,
    )


def of_ranges(ranges: Any, keys: int) -> BlockMask:
    """A mask of ranges of keys, CuPy integers (batch, rows, count, 2)."""
    import cupy

    batch, rows, count, _ = ranges.shape
    shape = (batch, 1, rows, keys)
    step = mask_writing.ranges_step(shape, count, ranges.dtype.itemsize)
    return _built(step, shape, {"ranges": cupy.ascontiguousarray(ranges)}, ranges.data.device_id)


def of_predicate(
    predicate: Predicate, captured: Mapping[str, Any], shape: Shape, device: int
) -> BlockMask:
    """A mask of a predicate. captured: CuPy arrays by name, in the order of the predicate's text."""
    forms = [(x.dtype.itemsize, x.shape, x.strides) for x in captured.values()]
    step = mask_writing.predicate_step(shape, predicate.text, tuple(forms), predicate.scalars)
    named = {f"captured{n}": x for n, x in enumerate(captured.values())}
    return _built(step, shape, named, device)


def _built(step: Step, shape: Shape, given: Mapping[str, Any], device: int) -> BlockMask:
    """The mask that a step writes, from arrays by name. It runs on CuPy's current stream of the device."""
    import cupy

    with cupy.cuda.Device(device):
        buffers = zeroed_buffers(shape, cupy)
        named = {**given, **dict(zip(("mask_bits", "mask_map", "mask_keys"), buffers, strict=True))}
        gathered = mask_writing.keys_step(shape)
        if gathered is not None:
            named["mask_bands"] = cupy.empty(mask_writing.band_bytes(shape), np.uint8)
        stream = cupy.cuda.get_current_stream().ptr
        for each in (step,) if gathered is None else (step, gathered):
            assert isinstance(each.blocks, int)
            if not each.blocks:
                continue
            params = bytearray(each.params)
            for at, name in each.patches:
                params[at : at + 8] = named[name].data.ptr.to_bytes(8, "little")
            kernel.load(each.source, device).launch(
                each.blocks, each.threads, each.shared_bytes, stream, kernel.Arguments((params,))
            )
    capturing = streams.is_capturing(stream)
    if capturing:
        graphs.keep_forever(*named.values())
    return BlockMask(buffers, shape, replayed=capturing)
