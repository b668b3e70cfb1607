"""Arrays of one stream used on another: both streams are ordered, memory is not reused early, captures are unaffected."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from rawattn._interop import streams
from rawattn._interop.arrays import compute_stream, export_array, import_array, on_stream_of
from tests.gpu.gate import closed, still_closed
from tests.gpu.on_gpu import SIZE

pytestmark = [pytest.mark.gpu, pytest.mark.frameworks]
cupy = pytest.importorskip("cupy")

Gate = Callable[[Any], AbstractContextManager[None]]


def rehearsed(test: Callable[[Gate], None]) -> None:
    """Runs `test` without the gate first, because loading a kernel may wait for kernels that run."""
    test(lambda stream: contextlib.nullcontext())
    test(closed)


def test_compute_stream(torch: Any, stream: Any) -> None:
    side = torch.cuda.Stream()
    assert compute_stream("torch", 0).ptr == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(side), stream:
        assert compute_stream("torch", 0).ptr == side.cuda_stream
        assert compute_stream("cupy", 0) is stream
        assert compute_stream("jax", 0) is stream


def test_on_stream_of_torch(torch: Any, stream: Any) -> None:
    """Inside the block CuPy uses torch's stream and torch's allocator; outside it is as before."""
    tensor = torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    with stream, torch.cuda.stream(side):
        ours, theirs = (
            cupy.get_default_memory_pool().used_bytes(),
            torch.cuda.memory_allocated(),
        )
        with on_stream_of(tensor, "torch") as current:
            assert cupy.cuda.get_current_stream().ptr == current.ptr == side.cuda_stream
            block = cupy.empty(1 << 20, np.uint8)
            assert torch.cuda.memory_allocated() - theirs >= 1 << 20
            assert cupy.get_default_memory_pool().used_bytes() == ours
            with cupy.cuda.Stream(non_blocking=True):  # on other streams CuPy uses its own memory
                other = cupy.empty(1 << 20, np.uint8)
            assert cupy.get_default_memory_pool().used_bytes() - ours >= 1 << 20
            with on_stream_of(tensor, "torch") as again:
                assert again.ptr == current.ptr
            assert streams.current_stream("cupy", 0) == stream.ptr
        assert cupy.cuda.get_current_stream() is stream
        assert streams.current_stream("cupy", 0) == stream.ptr
        result = export_array(block, "torch", current)
        del block, other
        assert torch.cuda.memory_allocated() - theirs >= 1 << 20
        del result
        assert torch.cuda.memory_allocated() == theirs


def test_same_stream_waits_for_nothing(torch: Any) -> None:
    """On the same stream neither the host nor the stream waits: work behind the gate stays there."""
    side = torch.cuda.Stream()

    def test(gate: Gate) -> None:
        tensor = torch.ones(SIZE, device="cuda")
        side.synchronize()
        with gate(compute_stream("torch", 0)):
            tensor.fill_(3)
            with on_stream_of(tensor, "torch") as current:
                view = import_array("q", tensor, stream=current).array
                result = export_array(view * 2, "torch", current)
            result += 1
            assert gate is not closed or still_closed(current)
        assert bool((result == 7).all())

    with torch.cuda.stream(side):
        rehearsed(test)


def test_torch_is_ready_on_a_cupy_stream(torch: Any, stream: Any) -> None:
    side = torch.cuda.Stream()

    def test(gate: Gate) -> None:
        tensor = torch.zeros(SIZE, device="cuda")
        side.synchronize()
        with gate(compute_stream("torch", 0)):
            tensor.fill_(3)
            copy = import_array("k", tensor).array.copy()
        assert bool((copy.get() == 3).all())

    with torch.cuda.stream(side), stream:
        rehearsed(test)


def test_cupy_is_ready_on_a_torch_stream(torch: Any, stream: Any) -> None:
    side = torch.cuda.Stream()
    tensor = torch.zeros(1, device="cuda")

    def test(gate: Gate) -> None:
        array = cupy.zeros(SIZE, np.float32)
        stream.synchronize()
        with gate(stream):
            array.fill(3)
            with on_stream_of(tensor, "torch") as current:
                view = import_array("k", array, stream=current).array
                copy = export_array(view.copy(), "torch", current)
        assert bool((copy == 3).all())

    with torch.cuda.stream(side), stream:
        rehearsed(test)


def test_results_are_ready_on_another_torch_stream(torch: Any, stream: Any) -> None:
    side = torch.cuda.Stream()

    def test(gate: Gate) -> None:
        array = cupy.zeros(SIZE, np.float32)
        stream.synchronize()
        with gate(stream):
            array.fill(3)
            copy = export_array(array, "torch", stream).clone()
        assert bool((copy == 3).all())

    with torch.cuda.stream(side), stream:
        rehearsed(test)


def test_results_are_ready_in_jax(jax: Any, stream: Any) -> None:
    copied = jax.jit(lambda x: x + 0)

    def test(gate: Gate) -> None:
        array = cupy.zeros(SIZE, np.float32)
        stream.synchronize()
        with gate(stream):
            array.fill(3)
            copy = copied(export_array(array, "jax", stream))
        assert bool((copy == 3).all())

    with stream:
        rehearsed(test)


def test_jax_is_ready_on_a_cupy_stream(jax: Any, stream: Any) -> None:
    @jax.jit
    def slowly(x: Any, noise: Any) -> Any:
        for _ in range(8):
            noise = noise @ noise
        return x + 3 + 0 * noise[0, 0]

    x, noise = jax.numpy.zeros(SIZE), jax.numpy.zeros((2048, 2048))
    slowly(x, noise).block_until_ready()
    with stream:
        for _ in range(10):
            copy = import_array("k", slowly(x, noise)).array.copy()
            assert bool((copy.get() == 3).all())


def test_caller_reads_out_after_it_is_written(torch: Any, stream: Any) -> None:
    """The caller may read a tensor given as `out=` to work on a CuPy stream at once: its own stream waits for the write."""
    side = torch.cuda.Stream()

    def test(gate: Gate) -> None:
        out = torch.zeros(SIZE, device="cuda")
        side.synchronize()
        with gate(stream):
            view = import_array("out", out)
            view.array.fill(3)
            del view
            copy = out.clone()
        assert bool((copy == 3).all())

    with torch.cuda.stream(side), stream:
        rehearsed(test)


def test_torch_does_not_reuse_memory_in_use(torch: Any, stream: Any) -> None:
    side = torch.cuda.Stream()

    def test(gate: Gate) -> None:
        tensor = torch.full((SIZE,), 3.0, device="cuda")
        side.synchronize()
        address = tensor.data_ptr()
        with gate(stream):
            copy = import_array("k", tensor).array.copy()
            del tensor
            other = torch.full((SIZE,), 5.0, device="cuda")
            assert other.data_ptr() == address, "the test needs the same memory again"
        assert bool((copy.get() == 3).all())

    with torch.cuda.stream(side), stream:
        rehearsed(test)


def test_jax_does_not_reuse_memory_in_use(jax: Any, stream: Any) -> None:
    make = jax.jit(lambda x: jax.numpy.full((SIZE,), x))

    def test(gate: Gate) -> None:
        array = make(3.0).block_until_ready()
        with gate(stream):
            copy = import_array("k", array).array.copy()
            del array
            gc.collect()
            others = [make(5.0).block_until_ready() for _ in range(8)]
            assert gate is not closed or still_closed(stream)
        assert bool((copy.get() == 3).all())
        assert len(others) == 8

    with stream:
        rehearsed(test)


def test_torch_graph(torch: Any) -> None:
    """Import, work and export can be captured, and the graph's memory is not reused afterwards."""
    tensor = torch.zeros(SIZE, device="cuda")

    def doubled(tensor: Any) -> Any:
        with on_stream_of(tensor, "torch") as current:
            view = import_array("q", tensor, stream=current).array
            return export_array(view + view, "torch", current)

    doubled(tensor)  # compiles CuPy's kernel
    torch.cuda.synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = doubled(tensor)
        result = between + 1
        del between
    others = [torch.full((SIZE,), 7.0, device="cuda") for _ in range(8)]
    others += [cupy.full(SIZE, 7.0, np.float32) for _ in range(8)]
    for value in (1, 2):
        tensor.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((result == 2 * value + 1).all())
    assert all(bool((other == 7).all()) for other in others), "a replay wrote elsewhere"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_others_arrays_leave_a_cupy_capture_alone(
    framework: str, request: pytest.FixtureRequest, stream: Any
) -> None:
    module = request.getfixturevalue(framework)
    if framework == "torch":
        other = module.full((SIZE,), 3.0, device="cuda")
        module.cuda.synchronize()
    else:
        other = module.numpy.full((SIZE,), 3.0).block_until_ready()
    with stream:
        array = cupy.zeros(SIZE, np.float32)
        array += import_array("k", other).array
        stream.synchronize()
        stream.begin_capture()
        view = import_array("k", other, stream=stream).array
        array += view
        del view
        graph = stream.end_capture()
        graph.launch(stream)
        graph.launch(stream)
        assert bool((array.get() == 9).all())
