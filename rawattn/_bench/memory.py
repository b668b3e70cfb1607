"""The device memory that a backward needs beyond its inputs, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rawattn._bench import grids, measure
from rawattn._bench.cases import Case
from rawattn._bench.ours import Ours
from rawattn._bench.report import Figure

_MIB = 1 << 20
_CASES = ("dense D128 S4096 causal", "ragged D128 H16/16 causal")


def allowed(case: Case) -> int:
    """The bytes of a float32 dQ and of 2 float32 for each row and head."""
    return case.tokens * case.nheads_q * 4 * (case.headdim + 2)


def figures(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """MiB that a dense and a ragged call need, and that they may need."""
    import cupy

    by_name = {case.name: case for case in grids.backward()}
    found = []
    for case in map(by_name.__getitem__, _CASES):
        inputs = measure.make_inputs(case, dtype, l2_bytes=0)[0]
        into = tuple(map(cupy.empty_like, inputs.qkv))
        for what, deterministic in (("default", False), ("deterministic", True)):
            call = Ours(what, deterministic=deterministic).backward(case, inputs)
            extra = beyond(call, into)
            found.append(
                Figure(f"memory beyond gradients, {what}: {case.name}", extra / _MIB, "MiB")
            )
        most = f"float32 dQ and 2 float32 of a row and head: {case.name}"
        found.append(Figure(most, allowed(case) / _MIB, "MiB"))
    return found


def beyond(call: Callable[..., Any], into: tuple[Any, ...]) -> int:
    """The most bytes that two equal calls take from CuPy's pool, with gradients written to given arrays.

    The pool is new, so the memory that it owns at the end is the largest amount in use at once, including what is kept between
    calls, in multiples of 512 bytes. (Memory that an earlier call of the same kind kept in another pool is not counted.)
    """
    import cupy

    import rawattn

    gradients = rawattn.Gradients(*into)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        for _ in range(2):
            call(into=gradients)
            # The pool must outlive kernels that still use its memory.
            cupy.cuda.runtime.deviceSynchronize()
        return int(pool.total_bytes())
