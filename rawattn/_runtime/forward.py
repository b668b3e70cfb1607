"""GPU launches. A `Forward` is a call with everything decided but the addresses: kernels, grids, packed parameters.

Calls that differ only in the arrays they are given share one, so a repeated call costs a dictionary lookup, the output's
allocation and the launch.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rawattn import _kernels
from rawattn._call.layout import Lengths
from rawattn._call.problem import Problem
from rawattn._compile import compiler
from rawattn._kernels import params, source
from rawattn._kernels.portable import fill_padding
from rawattn._kernels.portable import forward as portable_forward
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._runtime import pack
from rawattn._runtime.launch import Launch, all_strides, grid
from rawattn._runtime.lengths import DeviceLengths, tile_count
from rawattn._runtime.repack import Repack
from rawattn._runtime.tensor_map import TensorMaps

_POINTERS = struct.Struct("<5Q")  # q, k, v, out, lse: the head of ForwardParams
_TABLES = struct.Struct("<2Q")  # order, first_tile
_WORKSPACE = struct.Struct("<3Q")  # next_work, arrived, partials
_ORDER_AT = params.FORWARD.fields["order"][1]  # type: ignore[index]
_SCHEDULE_COUNTERS = 2  # at next_work; those at arrived follow
_WORKSPACE_AT = params.SM90_FORWARD.fields["next_work"][1]  # type: ignore[index]


class Forward(Launch):
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

        super().__init__()
        self.copies, self.out_shape, self.lse_shape = copies, out_shape, lse_shape
        self._ragged = problem.ragged
        properties = cupy.cuda.Device(device).attributes
        persistent = None
        if _kernels.allowed("sm90"):
            persistent = sm90_forward.choose(
                problem, arch=compiler.device_arch(device), strides=strides, pointers=pointers
            )
        self.config: sm90_forward.Config | portable_forward.Config = (
            persistent
            or portable_forward.choose(
                problem,
                copy_bytes=source.copy_bytes(problem, all_strides(strides), pointers),
                shared_limit=properties["MaxSharedMemoryPerBlockOptin"],
            )
        )
        tiles = tile_count(lengths.q, problem.batch, self.config.schedule_rows, group=problem.group)
        heads = problem.nheads_q // (persistent.heads_per_tile if persistent else 1)
        self._blocks = grid("q", tiles * heads, self.config.schedule_rows)
        # Operands that the Hopper kernel cannot read where they lie, by their place among q, k, v.
        self._repacks: list[tuple[int, Repack]] = []
        if persistent is not None and self._blocks:
            for name in sm90_forward.repacked(problem, strides, pointers):
                repack = Repack(problem, name, strides[name], pointers=pointers, device=device)
                self._repacks.append(("qkv".index(name), repack))
                strides = {**strides, name: repack.strides}
        self._lengths = DeviceLengths(lengths, device)
        if self._blocks:
            self._kernel = compiler.load(self.config.source(), device)
            self._kernel.allow_shared_memory(self.config.shared_bytes)

        packed = np.zeros(1, params.FORWARD)
        pack.forward(packed[0], problem, self._lengths, strides, self.config.section_bytes)
        # The schedule, when the lengths are known once and for all.
        self._order: Any = None
        if problem.ragged and self._blocks and lengths.on_host:
            self._order = self._lengths.schedule_once(self.config.schedule_rows)
            packed[0]["order"], packed[0]["first_tile"] = self._lengths.schedule_addresses(
                self._order
            )
        self._template = packed.tobytes()

        # The Hopper kernel: maps of q, k, v and perhaps out, by stream the counters its blocks share, and how they share out
        # the last tiles.
        self._maps: tuple[TensorMaps, ...] = ()
        self._counters: dict[int, Any] = {}
        self._shared_out: sm90_forward.SharedOut | None = None
        if persistent is not None:
            clusters = properties["MultiProcessorCount"] // persistent.cluster
            self._shared_out = sm90_forward.shared_out(problem, persistent, clusters)
            if self._shared_out is None:
                clusters = min(self._blocks, clusters)
            self._blocks = clusters * persistent.cluster
            self._maps = _tensor_maps(problem, persistent, strides)
            whole = np.zeros(1, params.SM90_FORWARD)
            whole[0]["forward"] = packed[0]
            whole[0]["row_bound_q"] = sm90_forward.row_bound(problem.rows_q)
            whole[0]["row_bound_k"] = sm90_forward.row_bound(problem.rows_k)
            whole[0]["kept_tiles"] = sm90_forward.kept_tiles(problem, persistent, clusters)
            if self._shared_out is not None:
                whole[0]["shared_out"] = self._shared_out.tiles, self._shared_out.piece
            self._template = whole.tobytes()

        self._padding: bytes | None = None
        if (fill_out or fill_lse) and lengths.q.padded and problem.rows_q:
            self._fill_out, self._fill_lse = fill_out, fill_lse
            self._fill_blocks = fill_padding.blocks(problem.batch)
            self._padding = pack.padding(
                problem,
                self._lengths.q_side,
                strides["out"],
                nheads=problem.nheads_q,
                headdim=problem.headdim_v,
            )
            self._fill = compiler.load(fill_padding.source(), device)

    def run(self, q: int, k: int, v: int, out: int, lse: int) -> None:
        """Launches on the current stream of the current device. Addresses; lse 0 when not wanted."""
        if self._padding is not None:
            filled = bytearray(self._padding)
            _TABLES.pack_into(filled, 0, out if self._fill_out else 0, lse if self._fill_lse else 0)
            self._fill(self._fill_blocks, fill_padding.THREADS, filled)
        if not self._blocks:
            return
        # Memory of this launch alone. It may be freed as soon as the launch is in the stream, and no earlier: whoever gets it
        # then comes later in the stream.
        scratch: list[Any] = []
        operands = [q, k, v, out]
        for place, repack in self._repacks:
            scratch.append(repack.run(operands[place]))
            operands[place] = scratch[-1].data.ptr
        packed = bytearray(self._template)
        _POINTERS.pack_into(packed, 0, *operands, lse)
        if self._ragged or self._maps:
            self._pack_state(packed, scratch)
        arguments: list[bytes | bytearray] = [packed]
        if self._maps:
            maps = zip(self._maps, operands, strict=False)
            arguments.append(b"".join(each.at(address) for each, address in maps))
        shared_bytes = self.config.shared_bytes
        self._kernel(self._blocks, self.config.threads, *arguments, shared_bytes=shared_bytes)

    def _pack_state(self, packed: bytearray, scratch: list[Any]) -> None:
        """Addresses of what this launch shares with no other under way: the schedule, counters of work, partial outputs.

        Their memory joins `scratch`. A graph keeps all of it.
        """
        import cupy

        stream = cupy.cuda.get_current_stream()
        capturing = self._use(stream)
        order = self._order
        if self._ragged:
            if order is None:
                order = self._lengths.schedule(self.config.schedule_rows)
            scratch.append(order)
            _TABLES.pack_into(packed, _ORDER_AT, *self._lengths.schedule_addresses(order))
        if self._maps:
            shared_out = self._shared_out
            # A graph gets counters of its own: zeroed by a node of the graph, not now.
            counters = None if capturing else self._counters.get(stream.ptr)
            if counters is None:
                count = _SCHEDULE_COUNTERS + (shared_out.counters if shared_out else 0)
                counters = cupy.empty(count, np.uint32)
                counters.data.memset_async(0, counters.nbytes, stream)
                if not capturing:
                    self._counters[stream.ptr] = counters
            scratch.append(counters)
            next_work = counters.data.ptr
            arrived = next_work + _SCHEDULE_COUNTERS * np.dtype(np.uint32).itemsize
            at = 0
            if shared_out is not None:
                scratch.append(cupy.empty(shared_out.partial_bytes, np.uint8))
                at = scratch[-1].data.ptr
            _WORKSPACE.pack_into(packed, _WORKSPACE_AT, next_work, arrived, at)
        if capturing:
            self._hold(*scratch)


def _tensor_maps(
    problem: Problem, config: sm90_forward.Config, strides: dict[str, tuple[int, ...]]
) -> tuple[TensorMaps, ...]:
    """Of the operands, as they follow each other in the kernel's `Maps`."""
    rows_q, rows_k = problem.rows_q, problem.rows_k
    heads_q, heads_k = problem.nheads_q, problem.nheads_kv
    dims = [
        ("q", rows_q, heads_q, problem.headdim, config.tile_q, config.heads_per_tile),
        ("k", rows_k, heads_k, problem.headdim, config.tile_k, 1),
        ("v", rows_k, heads_k, problem.headdim_v, config.tile_k, 1),
    ]
    if config.tensor_stores:
        dims.append(("out", rows_q, heads_q, problem.headdim_v, sm90_forward.STORE_ROWS, 1))
    return tuple(
        TensorMaps(
            sm90_forward.geometry(
                *(problem, strides[name]),
                rows=rows,
                nheads=heads,
                headdim=headdim,
                box_rows=box_rows,
                box_heads=box_heads,
            )
        )
        for name, rows, heads, headdim, box_rows, box_heads in dims
    )
