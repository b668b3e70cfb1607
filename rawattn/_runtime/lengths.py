"""The sequences of a call as the kernels read them: packed sides, and for ragged batches the order of the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy as np

from rawattn._call.layout import Lengths, Side
from rawattn._compile import compiler
from rawattn._kernels import params
from rawattn._kernels.portable import schedule
from rawattn._runtime import driver


class DeviceLengths:
    """Lengths of one call on one device.

    Host integers are copied to the device once, here. That memory belongs to a private stream and nothing orders its reuse
    after the last launch that reads it: whoever lets a `DeviceLengths` go waits for those launches first.
    """

    def __init__(self, lengths: Lengths, device: int) -> None:
        self.device = device
        self._batch = lengths.batch
        self._arrays: list[Any] = []
        arrays = (lengths.q.start, lengths.q.length, lengths.k.start, lengths.k.length)
        with private_stream(device) if any(x is not None for x in arrays) else nullcontext():
            self.q_side = self._pack(lengths.q)
            self.k_side = self._pack(lengths.k)

    def schedule(self, tile: int, *, of: Literal["q", "k"] = "q") -> Any:
        """Enqueues the ordering of the sequences on the current stream: an array that holds `order`, then `first_tile`.

        tile: rows of the tiles to hand out, which are those `of` one side; sequences that are longest on the other come
        first.
        """
        import cupy

        order = cupy.empty(2 * self._batch + 1, np.int32)
        packed = np.zeros(1, params.SCHEDULE)
        fields = packed[0]
        tiled, longest = (self.q_side, self.k_side) if of == "q" else (self.k_side, self.q_side)
        fields["q_side"], fields["k_side"] = tiled, longest
        fields["order"], fields["first_tile"] = self.schedule_addresses(order)
        fields["batch"], fields["tile_q"] = self._batch, tile
        compiler.load(schedule.source(), self.device)(
            schedule.blocks(self._batch),
            schedule.THREADS,
            packed.tobytes(),
            shared_bytes=schedule.SHARED_BYTES,
        )
        return order

    def schedule_once(self, tile: int, *, of: Literal["q", "k"] = "q") -> Any:
        """`schedule` for lengths that never change: done when this returns, for every stream."""
        with private_stream(self.device) as stream:
            order = self.schedule(tile, of=of)
            stream.synchronize()
        return order

    def schedule_addresses(self, order: Any) -> tuple[int, int]:
        address = order.data.ptr
        return address, address + 4 * self._batch

    def _pack(self, side: Side) -> Any:
        packed = np.zeros((), params.SIDE)
        for name, integers in (("start", side.start), ("length", side.length)):
            if integers is None:
                continue
            on_device = self._on_device(integers)
            packed[name]["data"] = on_device.data.ptr
            packed[name]["is_64bit"] = on_device.dtype.itemsize == 8
        packed["cumulative"] = side.cumulative
        packed["rows"] = side.rows
        return packed

    def _on_device(self, integers: Any) -> Any:
        import cupy

        on_device = integers
        if isinstance(integers, np.ndarray):
            on_device = cupy.empty(integers.shape, integers.dtype)
            # The current stream is the private one: a capture forbids the legacy stream.
            stream = cupy.cuda.get_current_stream()
            on_device.set(integers, stream=stream)
            stream.synchronize()
        self._arrays.append(on_device)
        return on_device


def tile_count(side: Side, batch: int, tile: int, *, group: bool) -> int:
    """Tiles of `tile` rows over all sequences: exact for host lengths, else the most there can be."""
    if side.start is None and side.length is None:
        return batch * -(-side.rows // tile)
    if all(x is None or isinstance(x, np.ndarray) for x in (side.start, side.length)):
        return int(np.sum(-(-logical_lengths(side, batch) // tile)))
    most = batch * -(-side.max_seqlen // tile)
    return min(most, side.rows // tile + batch) if group else most


def logical_lengths(side: Side, batch: int) -> Any:
    """Logical lengths of a side whose integers are host data, (batch,) int64."""
    if side.start is None and side.length is None:
        return np.full(batch, side.rows)
    integers = side.start if side.length is None else side.length
    differences = side.length is None or side.cumulative
    return (np.diff(integers) if differences else integers).astype(np.int64)


_private_streams: dict[int, Any] = {}


@contextmanager
def private_stream(device: int) -> Iterator[Any]:
    """A stream of our own to prepare on, legal while another stream captures a graph.

    Preparing allocates and copies, which a capture in the default mode forbids to the whole thread; it is relaxed here
    because nothing done on this stream is part of the graph.
    """
    import cupy

    before = driver.exchange_capture_mode(driver.CAPTURE_RELAXED)
    try:
        if device not in _private_streams:
            _private_streams[device] = cupy.cuda.Stream(non_blocking=True)
        with _private_streams[device] as stream:
            yield stream
    finally:
        driver.exchange_capture_mode(before)
