"""Arrays in and out on the GPU: no copy, no leak, integers of a call."""

from __future__ import annotations

import gc
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn._interop.arrays import HOST, export_array, import_array, on_stream_of
from rawattn._interop.integers import import_integers
from tests.gpu.on_gpu import SIZE, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.frameworks]
cupy = pytest.importorskip("cupy")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.int32)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def full(shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> Any:
    """Like `cupy.full`, without CuPy arithmetic in bfloat16, which it need not support."""
    host = np.full(shape, value, dtype)
    return cupy.asarray(host.view(f"u{dtype.itemsize}")).view(dtype)


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
    time.sleep(0.5)  # JAX releases its arrays only when its work on them is done
    theirs, ours = torch.cuda.memory_allocated(), pool.used_bytes()
    calls()
    deadline = time.monotonic() + 10
    while pool.used_bytes() > ours and time.monotonic() < deadline:
        time.sleep(0.1)
    assert torch.cuda.memory_allocated() <= theirs
    assert pool.used_bytes() <= ours


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
