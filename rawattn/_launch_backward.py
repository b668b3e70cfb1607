"""GPU launches of the backward. A `Backward` is a call with everything decided but the addresses.

By default: prepare (what each query row needs), main (dk, dv; dq summed in float32 by atomic additions), finish (those sums
to dq). Deterministic: prepare, main without dq, and a kernel that computes dq alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn import _compile
from rawattn._kernels import fill_padding, params, portable_backward, schedule
from rawattn._launch import (
    _MAX_BLOCKS,
    _held_by_graphs,
    _is_capturing,
    _logical,
    _private_stream,
    _section_keys,
    _strides,
)
from rawattn._layout import Lengths, Side
from rawattn._problem import Problem

_TABLES = struct.Struct("<2Q")  # order, first_tile
_L2_SHARE = 32 << 20  # bytes that the running blocks should share


def _at(*path: str) -> int:
    """Offset of a field of BackwardParams."""
    offset, dtype = 0, params.BACKWARD
    for name in path:
        assert dtype.fields is not None
        dtype, start = dtype.fields[name][:2]
        offset += start
    return offset


_FORWARD_ADDRESSES = struct.Struct("<5Q")  # q, k, v, out, lse
_ADDRESSES = struct.Struct("<8Q")  # dout, dlse, dq, dk, dv, row_lse, row_delta, dq_sum
_ADDRESSES_AT = _at("dout")
_TABLES_AT = _at("forward", "order")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the arrays of one run lie; dlse 0 when not given."""

    dout: int
    q: int
    k: int
    v: int
    out: int
    lse: int
    dlse: int
    dq: int
    dk: int
    dv: int


class Backward:
    """One backward call on one device, ready to run on arrays of the shapes and strides it was made for."""

    def __init__(
        self,
        problem: Problem,
        lengths: Lengths,
        *,
        device: int,
        strides: dict[str, tuple[int, ...]],
        pointers: int,
        copies: tuple[bool, ...],
        fill: tuple[bool, ...],
        deterministic: bool,
    ) -> None:
        """strides: in bytes, of the public shapes of dout, q, k, v, out, dq, dk, dv; lse and dlse are C-contiguous.

        pointers: all addresses OR-ed together.
        copies: which of dout, q, k, v, out, lse, dlse the caller copies before every run.
        fill: whether the padding rows of dq, dk, dv are ours to fill.
        """
        import cupy

        self.device, self.copies = device, copies
        self._streams: dict[int, Any] = {}  # every stream this ran on, by handle
        self._batch, self._ragged = problem.batch, problem.ragged
        self._deterministic = deterministic
        self._lengths = lengths
        self._rows = problem.rows_q * (1 if problem.group else problem.batch)
        self._lse_elements = self._rows * problem.nheads_q
        self._dq_elements = self._lse_elements * portable_backward.dq_pitch(problem.headdim)

        itemsize = 4 if problem.dtype == "float32" else 2
        together = 0
        for each in strides.values():
            for stride in each[:-1]:
                together |= stride
        copy_bytes = portable_backward.copy_bytes(problem, together, pointers)
        shared_limit = cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
        self.config = portable_backward.choose(
            problem, copy_bytes=copy_bytes, shared_limit=shared_limit, with_dq=not deterministic
        )
        self.dq_config = portable_backward.choose_dq(
            problem, copy_bytes=copy_bytes, shared_limit=shared_limit
        )
        self._blocks = self._grid(
            "k", self._count(problem, lengths.k, self.config.tile_k) * problem.nheads_kv
        )
        self._dq_blocks = self._grid(
            "q", self._count(problem, lengths.q, self.dq_config.tile_q) * problem.nheads_q
        )
        self._row_blocks = self._grid("q", portable_backward.row_blocks(self._rows))
        self._load(problem, copy_bytes)

        self._integers: list[Any] = []
        # As in `Forward`: memory of the private stream, whose owner is dropped after a synchronisation alone.
        with _private_stream(device) as stream:
            self._q_side, self._k_side = self._side(lengths.q), self._side(lengths.k)
            self._template = self._pack(problem, strides, itemsize)
            known = problem.ragged and lengths.on_host
            self._order = self._tables() if known else None
            stream.synchronize()
        self._argument = np.dtype((np.void, len(self._template)))
        self._padding = [
            (
                name,
                self._pack_padding(side, strides[name], itemsize, problem.group, nheads, headdim),
            )
            for name, ours, logical, side, nheads, headdim in (
                ("dq", fill[0], lengths.q, self._q_side, problem.nheads_q, problem.headdim),
                ("dk", fill[1], lengths.k, self._k_side, problem.nheads_kv, problem.headdim),
                ("dv", fill[2], lengths.k, self._k_side, problem.nheads_kv, problem.headdim_v),
            )
            if ours and logical.padded and logical.rows
        ]

    def run(self, arrays: Addresses) -> None:
        """Launches on the current stream of the current device."""
        import cupy

        statistics = cupy.empty(2 * self._lse_elements, np.float32)
        sums = None if self._deterministic else cupy.empty(self._dq_elements, np.float32)
        tables = self._order if self._order is not None or not self._ragged else self._tables()
        stream = cupy.cuda.get_current_stream()
        self._streams[stream.ptr] = stream
        if _is_capturing():
            _held_by_graphs.append((self, statistics, sums, tables))

        for name, template in self._padding:
            packed = bytearray(template)
            struct.pack_into("<Q", packed, 0, getattr(arrays, name))
            self._launch_padding(packed)
        packed = bytearray(self._template)
        _FORWARD_ADDRESSES.pack_into(
            packed, 0, arrays.q, arrays.k, arrays.v, arrays.out, arrays.lse
        )
        _ADDRESSES.pack_into(
            packed,
            _ADDRESSES_AT,
            arrays.dout,
            arrays.dlse,
            arrays.dq,
            arrays.dk,
            arrays.dv,
            statistics.data.ptr,
            statistics.data.ptr + 4 * self._lse_elements,
            0 if sums is None else sums.data.ptr,
        )
        if self._row_blocks:
            self._launch(self._prepare, self._row_blocks, portable_backward.ROW_THREADS, 0, packed)
        if self._blocks:
            self._put_tables(packed, tables, 0)
            self._launch(
                self._main, self._blocks, self.config.threads, self.config.shared_bytes, packed
            )
        if self._deterministic:
            if self._dq_blocks:
                self._put_tables(packed, tables, 1)
                config = self.dq_config
                self._launch(self._dq, self._dq_blocks, config.threads, config.shared_bytes, packed)
        elif self._row_blocks:
            self._launch(self._finish, self._row_blocks, portable_backward.ROW_THREADS, 0, packed)

    def streams(self) -> list[Any]:
        """Streams that may still be reading memory of this object."""
        return list(self._streams.values())

    def _load(self, problem: Problem, copy_bytes: int) -> None:
        """The kernels that will run."""
        device = self.device
        if self._row_blocks:
            self._prepare = _compile.load(
                portable_backward.prepare_source(problem, copy_bytes), device
            )
            if not self._deterministic:
                self._finish = _compile.load(
                    portable_backward.finish_source(problem, copy_bytes), device
                )
        if self._blocks:
            self._main = _compile.load(self.config.source(), device)
            self._main.max_dynamic_shared_size_bytes = self.config.shared_bytes
        if self._deterministic and self._dq_blocks:
            self._dq = _compile.load(self.dq_config.source(), device)
            self._dq.max_dynamic_shared_size_bytes = self.dq_config.shared_bytes

    def _launch(
        self, kernel: Any, blocks: int, threads: int, shared: int, packed: bytearray
    ) -> None:
        # A copy: the launch reads the argument before it returns, but `packed` is used again after it.
        kernel(
            (blocks,),
            (threads,),
            (np.frombuffer(bytes(packed), self._argument),),
            shared_mem=shared,
        )

    def _launch_padding(self, packed: bytearray) -> None:
        _compile.load(fill_padding.source(), self.device)(
            (fill_padding.blocks(self._batch),),
            (fill_padding.THREADS,),
            (np.frombuffer(packed, np.dtype((np.void, len(packed)))),),
        )

    def _grid(self, side: str, blocks: int) -> int:
        if blocks > _MAX_BLOCKS:
            raise ValueError(
                f"{side}: {blocks} tiles of rows over all heads and sequences, but one launch holds {_MAX_BLOCKS}; "
                "split the batch"
            )
        return blocks

    def _count(self, problem: Problem, side: Side, tile: int) -> int:
        """Tiles a head needs over all sequences: exact for host lengths, else the most there can be."""
        if not problem.ragged:
            return problem.batch * -(-side.rows // tile)
        if self._lengths.on_host:
            return int(np.sum(-(-_logical(side, problem.batch) // tile)))
        most = problem.batch * -(-side.max_seqlen // tile)
        return min(most, side.rows // tile + problem.batch) if problem.group else most

    def _pack(self, problem: Problem, strides: dict[str, tuple[int, ...]], itemsize: int) -> bytes:
        packed = np.zeros(1, params.BACKWARD)
        fields = packed[0]
        forward = fields["forward"]
        for name, each in strides.items():
            into = forward if name in ("q", "k", "v", "out") else fields
            into[f"{name}_strides"] = _strides(each, itemsize, problem.group)
        forward["lse_batch"] = 0 if problem.group else problem.nheads_q * problem.rows_q
        forward["lse_head"] = problem.rows_q
        forward["q_side"], forward["k_side"] = self._q_side, self._k_side
        forward["window_left"] = problem.window_left or 0
        forward["window_right"] = problem.window_right or 0
        for name in ("sink", "batch", "nheads_q", "nheads_kv", "scale"):
            forward[name] = getattr(problem, name)
        forward["section_keys"] = _section_keys(problem, itemsize)
        # Of every query row: q and dout are read, float32 dq is added to.
        group = problem.nheads_q // problem.nheads_kv
        row_bytes = (problem.headdim + problem.headdim_v) * itemsize + 4 * problem.headdim
        fields["section_queries"] = max(1, _L2_SHARE // (row_bytes * group))
        return packed.tobytes()

    def _pack_padding(
        self,
        side: Any,
        strides: tuple[int, ...],
        itemsize: int,
        group: bool,
        nheads: int,
        headdim: int,
    ) -> bytes:
        packed = np.zeros(1, params.PADDING)
        fields = packed[0]
        fields["out_strides"] = _strides(strides, itemsize, group)
        fields["side"] = side
        fields["batch"], fields["nheads"], fields["headdim"] = self._batch, nheads, headdim
        fields["element_bytes"] = itemsize
        fields["parts"] = fill_padding.parts(self._batch)
        return packed.tobytes()

    def _side(self, side: Side) -> Any:
        import cupy

        packed = np.zeros((), params.SIDE)
        for name, integers in (("start", side.start), ("length", side.length)):
            if integers is None:
                continue
            on_device = integers
            if isinstance(integers, np.ndarray):
                on_device = cupy.empty(integers.shape, integers.dtype)
                on_device.set(integers, stream=cupy.cuda.get_current_stream())
            self._integers.append(on_device)
            packed[name]["data"] = on_device.data.ptr
            packed[name]["is_64bit"] = on_device.dtype.itemsize == 8
        packed["cumulative"], packed["rows"] = side.cumulative, side.rows
        return packed

    def _tables(self) -> Any:
        """Enqueues the ordering of sequences by queries, for key tiles, and when needed by keys, for query tiles.

        The array holds, of each, `order` and `first_tile`.
        """
        import cupy

        tables = cupy.empty((2, 2 * self._batch + 1), np.int32)
        for n, (tiled, longest, tile) in enumerate(
            (
                (self._k_side, self._q_side, self.config.tile_k),
                (self._q_side, self._k_side, self.dq_config.tile_q),
            )[: 2 if self._deterministic else 1]
        ):
            packed = np.zeros(1, params.SCHEDULE)
            fields = packed[0]
            fields["q_side"], fields["k_side"] = tiled, longest
            fields["order"], fields["first_tile"] = self._table_addresses(tables, n)
            fields["batch"], fields["tile_q"] = self._batch, tile
            if self._batch:
                _compile.load(schedule.source(), self.device)(
                    (schedule.blocks(self._batch),),
                    (schedule.THREADS,),
                    (packed.view(np.dtype((np.void, params.SCHEDULE.itemsize))),),
                    shared_mem=schedule.SHARED_BYTES,
                )
        return tables

    def _table_addresses(self, tables: Any, n: int) -> tuple[int, int]:
        address = tables.data.ptr + n * 4 * (2 * self._batch + 1)
        return address, address + 4 * self._batch

    def _put_tables(self, packed: bytearray, tables: Any, n: int) -> None:
        if tables is not None:
            _TABLES.pack_into(packed, _TABLES_AT, *self._table_addresses(tables, n))
