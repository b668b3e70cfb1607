"""The process that kernels run in can access the memory that the tests share with it, and no other."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import weakref

import numpy as np
import pytest

from tests.shim.arena import arena
from tests.shim.runner import Runner
from tests.shim.shim import Builder, Fault, Memory
from tests.shim.test_machine import POINTERS, THREADS, probe

COPY = "p.y[thread] = p.x[thread];"


def copy(builder: Builder, x: Memory, y: Memory) -> None:
    params = np.array([(x.address, y.address)], POINTERS)[0]
    kernel = probe(builder, COPY)
    kernel.run(params, grid=1, threads=THREADS, shared_bytes=1024, memory=[x, y])


def floats(name: str, values: object, *, readonly: bool = True) -> Memory:
    return Memory(name, np.broadcast_to(np.float32(values), THREADS), readonly=readonly)


def test_kernels_read_and_write_what_tests_do(builder: Builder) -> None:
    x, y = floats("x", 1), floats("y", 0, readonly=False)
    copy(builder, x, y)
    x.write(np.arange(THREADS))
    np.testing.assert_array_equal(y.array(), 1)
    copy(builder, x, y)
    np.testing.assert_array_equal(y.array(), np.arange(THREADS))


def test_what_is_read_only_to_one_launch_may_be_written_by_no_other(builder: Builder) -> None:
    x, y = floats("x", 1), floats("y", 0)
    for _ in range(2):
        with pytest.raises(Fault, match=r"byte \d+ of y \(256 bytes\) was touched"):
            copy(builder, x, y)


def test_freed_memory_faults(builder: Builder) -> None:
    x, y = floats("x", 1), floats("y", 0, readonly=False)
    copy(builder, x, y)
    x.free()
    with pytest.raises(Fault, match=r"byte \d+ of x \(256 bytes\) was touched"):
        copy(builder, x, y)


def test_memory_that_nobody_holds_is_given_back(builder: Builder) -> None:
    x, y = floats("x", 1), floats("y", 0, readonly=False)
    lost = Memory("lost", np.zeros(1 << 22, np.uint8))
    address, blocks = lost.address, os.fstat(arena().file).st_blocks
    del lost
    gc.collect()
    assert os.fstat(arena().file).st_blocks <= blocks - (1 << 22) // 512
    assert not any(each.start <= address < each.start + each.size for each in arena().regions)
    copy(builder, x, y)


def test_the_end_of_the_process_is_told(builder: Builder) -> None:
    runner = Runner()
    x, y = floats("x", 1), floats("y", 0, readonly=False)
    kernel = probe(builder, COPY)
    kernel._runner = runner
    params = np.array([(x.address, y.address)], POINTERS)[0]
    kernel.run(params, grid=1, threads=THREADS, shared_bytes=1024)
    assert runner._process is not None
    os.kill(runner._process.pid, signal.SIGKILL)
    try:
        with pytest.raises(RuntimeError, match="ended with status -9"):
            kernel.run(params, grid=1, threads=THREADS, shared_bytes=1024)
    finally:
        kernel._runner = builder._runner
        runner.close()


def test_regions_forbidden_while_garbage_is_collected() -> None:
    """Memory that is garbage may be found so while the regions of a launch are listed."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    ours, before = arena(), gc.get_threshold()
    kept = [ours.take(mmap.PAGESIZE, readonly=True) for _ in range(50)]
    try:
        for n in range(600):
            gc.set_threshold(n % 20 + 1)  # at which of the allocations garbage is collected
            weakref.finalize(Cycle(), ours.forbid, ours.take(mmap.PAGESIZE, readonly=True))
            assert {region.start for region in ours.regions} >= {*kept}
    finally:
        gc.set_threshold(*before)
        for start in kept:
            ours.forbid(start)
