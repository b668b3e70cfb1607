"""GPU launches. A `Forward` is a call with everything decided but the addresses: kernels, grids, packed parameters.

Calls that differ only in the arrays they are given share one, so a repeated call costs a dictionary lookup, the output's
allocation and the launch.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rawattn import _compile, _kernels
from rawattn._device_lengths import DeviceLengths, tile_count
from rawattn._device_lengths import logical_lengths as _logical
from rawattn._device_lengths import private_stream as _private_stream
from rawattn._kernels import fill_padding, params, portable_forward, sm90_forward
from rawattn._layout import Lengths
from rawattn._problem import Problem
from rawattn._tensor_map import TensorMaps

__all__ = ["Forward", "_logical", "_private_stream"]

_MAX_BLOCKS = 2**31 - 1
_POINTERS = struct.Struct("<5Q")  # q, k, v, out, lse: the head of ForwardParams
_TABLES = struct.Struct("<2Q")  # order, first_tile
_ORDER_AT = params.FORWARD.fields["order"][1]  # type: ignore[index]
_NEXT_WORK_AT = params.SM90_FORWARD.fields["next_work"][1]  # type: ignore[index]

# What a CUDA graph replays must outlive the graph, and nobody tells us when a graph dies.
_held_by_graphs: list[Any] = []


class Forward:
    """One forward call on one device, ready to run on arrays of the shapes and strides it was made for."""

    def __init__(
        self,
        problem: Problem,
        lengths: Lengths,
        *,
        device: int,
        strides: dict[str, tuple[int, ...]],
        pointers: int,
        copies: tuple[bool, ...] | None,
        out_shape: tuple[int, ...],
        lse_shape: tuple[int, ...],
        fill_out: bool,
        fill_lse: bool,
    ) -> None:
        """strides: in bytes, of the public shapes of q, k, v and out.

        pointers: all addresses OR-ed together.
        copies: which of q, k, v the caller copies to unit last stride before every run.
        fill_out, fill_lse: whether padding rows of out and lse are ours to fill.
        """
        import cupy

        self.copies, self.out_shape, self.lse_shape = copies, out_shape, lse_shape
        self._ragged = problem.ragged
        self._streams: dict[
            int, Any
        ] = {}  # every stream this ran on, by handle, where that matters
        properties = cupy.cuda.Device(device).attributes
        together = 0
        for each in strides.values():
            for stride in each[:-1]:
                together |= stride
        persistent = None
        if _kernels.allowed("sm90"):
            persistent = sm90_forward.choose(
                problem, arch=_compile.device_arch(device), strides=strides, pointers=pointers
            )
        self.config: sm90_forward.Config | portable_forward.Config = (
            persistent
            or portable_forward.choose(
                problem,
                copy_bytes=portable_forward.copy_bytes(problem, together, pointers),
                shared_limit=properties["MaxSharedMemoryPerBlockOptin"],
            )
        )
        tiles = tile_count(lengths.q, problem.batch, self.config.tile_q, group=problem.group)
        self._blocks = tiles * problem.nheads_q
        if self._blocks > _MAX_BLOCKS:
            raise ValueError(
                f"q: {self._blocks} tiles of {self.config.tile_q} rows over all heads and sequences, but one launch "
                f"holds {_MAX_BLOCKS}; split the batch"
            )
        self._lengths = DeviceLengths(lengths, device)
        if self._blocks:
            self._kernel = _compile.load(self.config.source(), device)
            self._kernel.max_dynamic_shared_size_bytes = self.config.shared_bytes

        packed = np.zeros(1, params.FORWARD)
        self._describe(packed[0], problem, strides)
        # The schedule, when the lengths are known once and for all.
        self._order: Any = None
        if problem.ragged and self._blocks and lengths.on_host:
            self._order = self._lengths.schedule_once(self.config.tile_q)
            packed[0]["order"], packed[0]["first_tile"] = self._lengths.schedule_addresses(
                self._order
            )
        self._template = packed.tobytes()

        # The Hopper kernel: maps of q, k and v, and by stream the counters its blocks share.
        self._maps: tuple[TensorMaps, ...] = ()
        self._counters: dict[int, Any] = {}
        if persistent is not None:
            self._blocks = min(self._blocks, properties["MultiProcessorCount"])
            self._maps = _tensor_maps(problem, persistent, strides)
            whole = np.zeros(1, params.SM90_FORWARD)
            whole[0]["forward"] = packed[0]
            whole[0]["row_bound_q"] = sm90_forward.row_bound(problem.rows_q)
            whole[0]["row_bound_k"] = sm90_forward.row_bound(problem.rows_k)
            self._template = whole.tobytes()

        self._padding: bytes | None = None
        if (fill_out or fill_lse) and lengths.q.padded and problem.rows_q:
            self._fill_out, self._fill_lse = fill_out, fill_lse
            self._fill_blocks = fill_padding.blocks(problem.batch)
            self._padding = self._pack_padding(problem, packed[0]["out_strides"])
            self._fill = _compile.load(fill_padding.source(), device)

    def run(self, q: int, k: int, v: int, out: int, lse: int) -> None:
        """Launches on the current stream of the current device. Addresses; lse 0 when not wanted."""
        if self._padding is not None:
            filled = bytearray(self._padding)
            _TABLES.pack_into(filled, 0, out if self._fill_out else 0, lse if self._fill_lse else 0)
            self._fill((self._fill_blocks,), (fill_padding.THREADS,), (params.by_value(filled),))
        if not self._blocks:
            return
        packed = bytearray(self._template)
        _POINTERS.pack_into(packed, 0, q, k, v, out, lse)
        if self._ragged or self._maps:
            self._pack_state(packed)
        arguments = (
            params.by_value(packed),
            *(maps.at(address) for maps, address in zip(self._maps, (q, k, v), strict=False)),
        )
        self._kernel(
            (self._blocks,), (self.config.threads,), arguments, shared_mem=self.config.shared_bytes
        )

    def streams(self) -> list[Any]:
        """Streams that may still be reading memory of this object."""
        return list(self._streams.values())

    def _pack_state(self, packed: bytearray) -> None:
        """Addresses of what this launch shares with no other under way: the schedule and the counters of work."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        self._streams[stream.ptr] = stream
        capturing = stream.ptr not in (0, 1) and stream.is_capturing()
        order = self._order
        if self._ragged:
            if order is None:
                order = self._lengths.schedule(self.config.tile_q)
            _TABLES.pack_into(packed, _ORDER_AT, *self._lengths.schedule_addresses(order))
        counters = None
        if self._maps:
            # A graph gets counters of its own: zeroed by a node of the graph, not now.
            counters = None if capturing else self._counters.get(stream.ptr)
            if counters is None:
                counters = cupy.empty(2, np.uint32)
                counters.data.memset_async(0, counters.nbytes, stream)
                if not capturing:
                    self._counters[stream.ptr] = counters
            struct.pack_into("<Q", packed, _NEXT_WORK_AT, counters.data.ptr)
        if capturing:
            _held_by_graphs.append((self, order, counters))

    def _describe(self, fields: Any, problem: Problem, strides: dict[str, tuple[int, ...]]) -> None:
        itemsize = problem_itemsize(problem)
        for name, each in strides.items():
            fields[f"{name}_strides"] = _strides(each, itemsize, problem.group)
        fields["lse_batch"] = 0 if problem.group else problem.nheads_q * problem.rows_q
        fields["lse_head"] = problem.rows_q
        fields["q_side"], fields["k_side"] = self._lengths.q_side, self._lengths.k_side
        fields["window_left"] = problem.window_left or 0
        fields["window_right"] = problem.window_right or 0
        fields["sink"] = problem.sink
        fields["batch"] = problem.batch
        fields["nheads_q"] = problem.nheads_q
        fields["nheads_kv"] = problem.nheads_kv
        fields["section_keys"] = _section_keys(problem, itemsize, self.config.section_bytes)
        fields["scale"] = problem.scale

    def _pack_padding(self, problem: Problem, out_strides: Any) -> bytes:
        packed = np.zeros(1, params.PADDING)
        fields = packed[0]
        fields["out_strides"] = out_strides
        fields["lse_batch"] = 0 if problem.group else problem.nheads_q * problem.rows_q
        fields["lse_head"] = problem.rows_q
        fields["side"] = self._lengths.q_side
        fields["batch"] = problem.batch
        fields["nheads"] = problem.nheads_q
        fields["headdim"] = problem.headdim_v
        fields["element_bytes"] = problem_itemsize(problem)
        fields["parts"] = fill_padding.parts(problem.batch)
        return packed.tobytes()


def problem_itemsize(problem: Problem) -> int:
    return 4 if problem.dtype == "float32" else 2


def _tensor_maps(
    problem: Problem, config: sm90_forward.Config, strides: dict[str, tuple[int, ...]]
) -> tuple[TensorMaps, ...]:
    rows_q, rows_k = problem.rows_q, problem.rows_k
    heads_q, heads_k = problem.nheads_q, problem.nheads_kv
    return tuple(
        TensorMaps(
            sm90_forward.geometry(
                problem, strides[name], rows=rows, nheads=heads, headdim=headdim, box_rows=box_rows
            )
        )
        for name, rows, heads, headdim, box_rows in (
            ("q", rows_q, heads_q, problem.headdim, config.tile_q),
            ("k", rows_k, heads_k, problem.headdim, config.tile_k),
            ("v", rows_k, heads_k, problem.headdim_v, config.tile_k),
        )
    )


def _strides(strides: tuple[int, ...], itemsize: int, group: bool) -> tuple[int, int, int]:
    """(batch, row, head) in elements; group mode has no batch axis."""
    elements = [stride // itemsize for stride in strides]
    return (0, elements[0], elements[1]) if group else (elements[0], elements[1], elements[2])


def _section_keys(
    problem: Problem, itemsize: int, section_bytes: int = portable_forward.SECTION_BYTES
) -> int:
    """Keys of one head whose K and V together fill `section_bytes`: the heads that are scheduled side by side."""
    return section_bytes // ((problem.headdim + problem.headdim_v) * itemsize)


def _is_capturing() -> bool:
    import cupy

    return bool(cupy.cuda.get_current_stream().is_capturing())
