"""Copies of operands that a kernel cannot read where they lie, made on the stream before it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rawattn._call.problem import Problem
from rawattn._compile import compiler
from rawattn._kernels import source
from rawattn._kernels.portable import repack
from rawattn._runtime import pack
from rawattn._runtime.launch import grid

_ADDRESSES = struct.Struct("<2Q")  # from, to: the head of RepackParams


class Repack:
    """One of q, k and v, copied to rows that begin at multiples of 16 bytes."""

    def __init__(
        self, problem: Problem, name: str, strides: tuple[int, ...], *, pointers: int, device: int
    ) -> None:
        """strides: in bytes, of the public shape; pointers: all addresses OR-ed together."""
        queries = name == "q"
        batch = 1 if problem.group else problem.batch
        rows = problem.rows_q if queries else problem.rows_k
        nheads = problem.nheads_q if queries else problem.nheads_kv
        headdim = problem.headdim_v if name == "v" else problem.headdim
        whole = repack.strides(batch, rows, nheads, headdim)
        self.strides = whole[1:] if problem.group else whole
        self._elements = batch * whole[0] // 2
        self._blocks = grid(name, repack.blocks(batch * rows), 1)
        self._template = pack.repack(problem, strides, batch=batch, rows=rows, nheads=nheads)
        copy_bytes = source.access_bytes(headdim * 2, pointers, *strides[:-1])
        self._kernel = compiler.load(repack.source(headdim, copy_bytes), device)

    def run(self, address: int) -> Any:
        """The copy, enqueued on the current stream."""
        import cupy

        copy = cupy.empty(self._elements, np.uint16)
        packed = bytearray(self._template)
        _ADDRESSES.pack_into(packed, 0, address, copy.data.ptr)
        self._kernel(self._blocks, repack.THREADS, packed)
        return copy
