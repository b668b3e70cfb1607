"""Arrays in and out on the GPU: no copy, streams ordered both ways, captures left alone."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn._interop import streams
from rawattn._interop.arrays import (
    HOST,
    compute_stream,
    export_array,
    import_array,
    import_integers,
    on_stream_of,
)
from tests.gpu.gate import closed, still_closed

pytestmark = [pytest.mark.gpu, pytest.mark.frameworks]
cupy = pytest.importorskip("cupy")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.int32)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZE = 1 << 20
Gate = Callable[[Any], AbstractContextManager[None]]


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return module


@pytest.fixture
def jax() -> Any:
    module = pytest.importorskip("jax")
    try:
        module.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    return module


@pytest.fixture
def stream() -> Any:
    """A CuPy stream that no legacy default stream waits for."""
    return cupy.cuda.Stream(non_blocking=True)


def full(shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> Any:
    """CuPy's own arithmetic is not asked to know bfloat16."""
    host = np.full(shape, value, dtype)
    return cupy.asarray(host.view(f"u{dtype.itemsize}")).view(dtype)


def rehearsed(test: Callable[[Gate], None]) -> None:
    """Runs `test` without the gate first: loading a kernel may wait for one that is running."""
    test(lambda stream: contextlib.nullcontext())
    test(closed)


def on_gpu(jax: Any, values: np.ndarray, ordinal: int = 0) -> Any:
    return jax.device_put(values, jax.devices("gpu")[ordinal])


@each_dtype
def test_cupy_passes_through(dtype: np.dtype[Any]) -> None:
    array = cupy.zeros((2, 3, 4), dtype)
    for given in (array, array[::-1, :, ::2], array[:, :0], array[0, 0, 0]):
        view = import_array("q", given)
        assert view.array is given
        assert (view.device, view.framework, view.readonly) == (0, "cupy", False)
    assert export_array(array, "cupy", cupy.cuda.get_current_stream()) is array


def test_cupy_subclass_is_seen_as_an_array() -> None:
    class Subclass(cupy.ndarray):
        pass

    array = cupy.arange(6.0).reshape(2, 3)[:, ::2]
    given = Subclass(array.shape, array.dtype, array.data, array.strides)
    view = import_array("q", given).array
    assert type(view) is cupy.ndarray
    assert (view.data.ptr, view.shape, view.strides) == (
        given.data.ptr,
        given.shape,
        given.strides,
    )


@each_dtype
def test_torch_in(torch: Any, dtype: np.dtype[Any]) -> None:
    tensor = torch.arange(24, device="cuda").reshape(2, 3, 4).to(getattr(torch, dtype.name))
    for given in (
        tensor,
        tensor.transpose(0, 2),
        tensor[:, 1:, ::2],
        tensor[1, 2, 3],
        tensor[:1].expand(5, 3, 4),
        tensor[:, :0],
    ):
        view = import_array("q", given)
        assert type(view.array) is cupy.ndarray
        assert (view.device, view.framework, view.readonly) == (0, "torch", False)
        assert view.array.dtype == dtype
        assert view.array.shape == tuple(given.shape)
        np.testing.assert_array_equal(
            view.array.get().astype(np.float64), given.double().cpu().numpy()
        )
        if given.numel():
            assert view.array.data.ptr == given.data_ptr()


def test_torch_that_requires_grad_is_read(torch: Any) -> None:
    leaf = torch.nn.Parameter(torch.arange(3.0, device="cuda"))
    assert import_array("q", leaf).array.data.ptr == leaf.data_ptr()


def test_torch_pinned_is_host_memory(torch: Any) -> None:
    pinned = torch.arange(3.0).pin_memory()
    view = import_array("q", pinned)
    assert view.device == HOST
    assert view.array.ctypes.data == pinned.data_ptr()


@each_dtype
def test_jax_in(jax: Any, dtype: np.dtype[Any]) -> None:
    array = on_gpu(jax, np.arange(24).reshape(2, 3, 4).astype(dtype))
    for given in (array, array[0, 0, 1], array[:, :0]):
        view = import_array("q", given)
        assert type(view.array) is cupy.ndarray
        assert (view.device, view.framework, view.readonly) == (0, "jax", True)
        assert (view.array.dtype, view.array.shape) == (dtype, given.shape)
        np.testing.assert_array_equal(view.array.get(), np.asarray(given))
        if given.size:
            assert view.array.data.ptr == given.unsafe_buffer_pointer()


def test_managed_memory_is_device_memory() -> None:
    class Elsewhere:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **keywords: Any) -> Any:
            return self.array.__dlpack__(**keywords)

    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        array = cupy.arange(4.0)
    assert array.__dlpack_device__()[0] == 13
    view = import_array("q", Elsewhere(array))
    assert (view.device, view.array.data.ptr) == (0, array.data.ptr)
    assert export_array(view.array, view.framework, None) is view.array


@each_dtype
def test_torch_out(torch: Any, dtype: np.dtype[Any]) -> None:
    for shape in ((2, 3, 4), (), (0, 4)):
        array = full(shape, 5, dtype)
        tensor = export_array(array, "torch", cupy.cuda.get_current_stream())
        assert type(tensor) is torch.Tensor
        assert (tensor.device.type, tensor.device.index) == ("cuda", 0)
        assert tensor.dtype == getattr(torch, dtype.name)
        assert tuple(tensor.shape) == shape
        assert bool((tensor == 5).all())
        if array.size:
            assert tensor.data_ptr() == array.data.ptr


@each_dtype
def test_jax_out(jax: Any, dtype: np.dtype[Any]) -> None:
    for shape in ((2, 3, 4), (), (0, 4)):
        array = full(shape, 5, dtype)
        result = export_array(array, "jax", cupy.cuda.get_current_stream())
        assert isinstance(result, jax.Array)
        assert (result.dtype, result.shape) == (dtype, shape)
        assert bool((result == 5).all())
        if array.size:
            assert result.unsafe_buffer_pointer() == array.data.ptr


def test_compute_stream(torch: Any, stream: Any) -> None:
    side = torch.cuda.Stream()
    assert compute_stream("torch", 0).ptr == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(side), stream:
        assert compute_stream("torch", 0).ptr == side.cuda_stream
        assert compute_stream("cupy", 0) is stream
        assert compute_stream("jax", 0) is stream


def test_on_stream_of_torch(torch: Any, stream: Any) -> None:
    """CuPy is on torch's stream and in torch's memory inside, and as before outside."""
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
            with cupy.cuda.Stream(non_blocking=True):  # torch's memory is not for other streams
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
    """Neither the host nor the stream: what is behind the gate stays there."""
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
    """A tensor given as `out=` to work on a CuPy stream."""
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


def test_nothing_leaks(torch: Any, jax: Any, stream: Any) -> None:
    tensor, array = torch.zeros(SIZE, device="cuda"), jax.numpy.zeros(SIZE)
    pool = cupy.get_default_memory_pool()

    def calls() -> None:
        for _ in range(300):
            with on_stream_of(tensor, "torch") as current:
                view = import_array("q", tensor, stream=current).array
                export_array(view + 1, "torch", current)
            with stream:
                import_array("k", tensor)
                view = import_array("q", array, stream=stream).array
                export_array(view + 1, "jax", stream)
            del view
        gc.collect()
        torch.cuda.synchronize()

    calls()
    time.sleep(0.5)  # JAX lets go of its arrays when it is done with them
    theirs, ours = torch.cuda.memory_allocated(), pool.used_bytes()
    calls()
    deadline = time.monotonic() + 10
    while pool.used_bytes() > ours and time.monotonic() < deadline:
        time.sleep(0.1)
    assert torch.cuda.memory_allocated() <= theirs
    assert pool.used_bytes() <= ours


def test_torch_graph(torch: Any) -> None:
    """Import, work, export inside a capture; the graph's memory stays its own afterwards."""
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


def test_integers_on_the_gpu(torch: Any, jax: Any) -> None:
    for given in (
        cupy.arange(3, dtype=np.int32),
        torch.arange(3, device="cuda"),
        jax.numpy.arange(3),
    ):
        view = import_integers("seqlen_q", given)
        assert type(view) is cupy.ndarray
        assert view.dtype.kind == "i"
        np.testing.assert_array_equal(view.get(), [0, 1, 2])
    for refused in (cupy.zeros(3), cupy.zeros(3, bool), torch.zeros(3, device="cuda")):
        with pytest.raises(TypeError, match=r"^seqlen_q: got"):
            import_integers("seqlen_q", refused)


@pytest.fixture
def second_gpu() -> int:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    return 1


def test_torch_on_the_second_gpu(torch: Any, second_gpu: int) -> None:
    device = torch.device("cuda", second_gpu)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        tensor = torch.full((SIZE,), 3.0, device=device)
    side.synchronize()
    assert torch.cuda.current_device() == cupy.cuda.runtime.getDevice() == 0
    view = import_array("q", tensor)
    assert (view.device, view.array.data.ptr) == (second_gpu, tensor.data_ptr())
    assert cupy.cuda.runtime.getDevice() == 0
    with torch.cuda.stream(side), torch.cuda.device(0):
        with on_stream_of(tensor, "torch") as current:
            assert cupy.cuda.runtime.getDevice() == second_gpu
            assert current.ptr == side.cuda_stream
            result = export_array(
                import_array("q", tensor, stream=current).array + 1, "torch", current
            )
        assert cupy.cuda.runtime.getDevice() == 0
    side.synchronize()
    assert result.device == device
    assert bool((result == 4).all())


def test_orders_streams_of_the_second_gpu(second_gpu: int) -> None:
    """Also its legacy stream, whose handle, 0, means the current GPU's."""
    with cupy.cuda.Device(second_gpu):
        side = cupy.cuda.Stream(non_blocking=True)
        counter = cupy.zeros(64 << 20, np.float32)
        for _ in range(50):
            counter += 1
    assert cupy.cuda.runtime.getDevice() == 0
    streams.order(0, side.ptr, second_gpu)
    with cupy.cuda.Device(second_gpu), side:
        assert counter[-1:].get() == 50


def test_jax_on_either_gpu_while_the_other_is_current(jax: Any, second_gpu: int) -> None:
    rng = np.random.default_rng(0)
    host = rng.standard_normal((3, 1, 40, 2, 16), dtype=np.float32)
    expected = rawattn.attention(*host, backend="cpu")
    for place, current in ((second_gpu, 0), (0, second_gpu)):
        arrays = [on_gpu(jax, x, place) for x in host]
        with cupy.cuda.Device(current):
            out = rawattn.attention(*arrays)
        assert out.devices() == arrays[0].devices()
        np.testing.assert_allclose(np.asarray(out), expected, atol=1e-5)


def test_jax_on_the_second_gpu(jax: Any, second_gpu: int) -> None:
    array = on_gpu(jax, np.full(SIZE, 3, np.float32), second_gpu)
    view = import_array("q", array)
    assert (view.device, view.array.data.ptr) == (second_gpu, array.unsafe_buffer_pointer())
    before = cupy.cuda.runtime.getDevice()  # JAX makes the device of its work the current one
    with on_stream_of(array, "jax") as current, cupy.cuda.Device(second_gpu):
        result = export_array(view.array + 1, "jax", current)
    assert cupy.cuda.runtime.getDevice() == before
    assert result.devices() == array.devices()
    assert bool((result == 4).all())
