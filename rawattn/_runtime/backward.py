"""GPU launches of the backward. A `Backward` is a call with everything decided but the addresses.

By default: prepare (what each query row needs), main (dk, dv; dq summed in float32 by atomic additions), finish (those sums
to dq). Deterministic: prepare, main without dq, and a kernel that computes dq alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn._call.layout import Lengths
from rawattn._call.problem import Problem
from rawattn._compile import compiler
from rawattn._kernels import params, source
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import fill_padding
from rawattn._runtime import pack
from rawattn._runtime.launch import Launch, all_strides, grid
from rawattn._runtime.lengths import DeviceLengths, tile_count

_TABLES = struct.Struct("<2Q")  # order, first_tile


def _at(*path: str) -> int:
    """Offset of a field of BackwardParams."""
    offset, dtype = 0, params.BACKWARD
    for name in path:
        assert dtype.fields is not None
        dtype, start = dtype.fields[name][:2]
        offset += start
    return offset


_FORWARD_ADDRESSES = struct.Struct("<5Q")  # q, k, v, out, lse
_ADDRESSES = struct.Struct("<7Q")  # dout, dlse, dq, dk, dv, row_delta, dq_sum
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


class Backward(Launch):
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

        super().__init__()
        self.device, self.copies = device, copies
        self._ragged, self._deterministic = problem.ragged and problem.batch > 0, deterministic
        self._lengths = DeviceLengths(lengths, device)
        rows = problem.rows_q * (1 if problem.group else problem.batch)
        self._lse_elements = rows * problem.nheads_q
        self._dq_elements = self._lse_elements * portable_backward.dq_pitch(problem.headdim)

        copy_bytes = source.copy_bytes(problem, all_strides(strides), pointers)
        shared_limit = cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
        self.config = portable_backward.choose(
            problem, copy_bytes=copy_bytes, shared_limit=shared_limit, with_dq=not deterministic
        )
        self.dq_config = portable_backward.choose_dq(
            problem, copy_bytes=copy_bytes, shared_limit=shared_limit
        )
        tile_k, tile_q = self.config.tile_k, self.dq_config.tile_q
        batch, group = problem.batch, problem.group
        tiles_k = tile_count(lengths.k, batch, tile_k, group=group)
        tiles_q = tile_count(lengths.q, batch, tile_q, group=group)
        self._blocks = grid("k", tiles_k * problem.nheads_kv, tile_k)
        self._dq_blocks = grid("q", tiles_q * problem.nheads_q, tile_q)
        self._row_blocks = grid("q", portable_backward.row_blocks(rows), 1)
        self._load(problem, copy_bytes)

        packed = np.zeros(1, params.BACKWARD)
        pack.backward(packed[0], problem, self._lengths, strides)
        self._template = packed.tobytes()
        # The schedules, when the lengths are known once and for all.
        self._orders: list[Any] | None = None
        if self._ragged and lengths.on_host:
            self._orders = self._schedules(self._lengths.schedule_once)

        q_side, k_side = self._lengths.q_side, self._lengths.k_side
        gradients = {
            "dq": (lengths.q, q_side, problem.nheads_q, problem.headdim),
            "dk": (lengths.k, k_side, problem.nheads_kv, problem.headdim),
            "dv": (lengths.k, k_side, problem.nheads_kv, problem.headdim_v),
        }
        self._padding = [
            (name, pack.padding(problem, side, strides[name], nheads=nheads, headdim=headdim))
            for (name, (logical, side, nheads, headdim)), ours in zip(
                gradients.items(), fill, strict=True
            )
            if ours and logical.padded and logical.rows
        ]
        if self._padding:
            self._fill = compiler.load(fill_padding.source(), device)
            self._fill_blocks = fill_padding.blocks(problem.batch)

    def run(self, arrays: Addresses) -> None:
        """Launches on the current stream of the current device."""
        import cupy

        delta = cupy.empty(self._lse_elements, np.float32)
        sums = None if self._deterministic else cupy.empty(self._dq_elements, np.float32)
        orders = self._orders
        if self._ragged and orders is None:
            orders = self._schedules(self._lengths.schedule)
        if self._use(cupy.cuda.get_current_stream()):
            self._hold(delta, sums, orders)

        for name, template in self._padding:
            filled = bytearray(template)
            struct.pack_into("<Q", filled, 0, getattr(arrays, name))
            self._fill(self._fill_blocks, fill_padding.THREADS, filled)
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
            delta.data.ptr,
            0 if sums is None else sums.data.ptr,
        )
        if self._row_blocks:
            self._prepare(self._row_blocks, portable_backward.ROW_THREADS, packed)
        if self._blocks:
            self._put_order(packed, orders, 0)
            config = self.config
            self._main(self._blocks, config.threads, packed, shared_bytes=config.shared_bytes)
        if self._deterministic:
            if self._dq_blocks:
                self._put_order(packed, orders, 1)
                alone = self.dq_config
                self._dq(self._dq_blocks, alone.threads, packed, shared_bytes=alone.shared_bytes)
        elif self._row_blocks:
            self._finish(self._row_blocks, portable_backward.ROW_THREADS, packed)

    def _load(self, problem: Problem, copy_bytes: int) -> None:
        """The kernels that will run."""
        device = self.device
        if self._row_blocks:
            self._prepare = compiler.load(
                portable_backward.prepare_source(problem, copy_bytes), device
            )
            if not self._deterministic:
                self._finish = compiler.load(
                    portable_backward.finish_source(problem, copy_bytes), device
                )
        if self._blocks:
            self._main = compiler.load(self.config.source(), device)
            self._main.allow_shared_memory(self.config.shared_bytes)
        if self._deterministic and self._dq_blocks:
            self._dq = compiler.load(self.dq_config.source(), device)
            self._dq.allow_shared_memory(self.dq_config.shared_bytes)

    def _schedules(self, schedule: Callable[..., Any]) -> list[Any]:
        """The order of key tiles, and where dq is computed apart, of query tiles."""
        orders = [schedule(self.config.tile_k, of="k")]
        if self._deterministic:
            orders.append(schedule(self.dq_config.tile_q, of="q"))
        return orders

    def _put_order(self, packed: bytearray, orders: list[Any] | None, n: int) -> None:
        if orders is not None:
            _TABLES.pack_into(packed, _TABLES_AT, *self._lengths.schedule_addresses(orders[n]))
