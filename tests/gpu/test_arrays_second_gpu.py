"""Arrays on a second GPU, whichever is the current one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._interop import streams
from rawattn._interop.arrays import export_array, import_array, on_stream_of
from tests.gpu.on_gpu import SIZE, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.frameworks]
cupy = pytest.importorskip("cupy")


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
    """Streams of the second GPU are ordered too, also its legacy stream, whose handle 0 means that of the current GPU."""
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
    for ordinal, current in ((second_gpu, 0), (0, second_gpu)):
        arrays = [on_gpu(jax, x, ordinal) for x in host]
        with cupy.cuda.Device(current):
            out = rawattn.attention(*arrays)
        assert out.devices() == arrays[0].devices()
        np.testing.assert_allclose(np.asarray(out), expected, atol=1e-5)


def test_jax_on_the_second_gpu(jax: Any, second_gpu: int) -> None:
    array = on_gpu(jax, np.full(SIZE, 3, np.float32), second_gpu)
    view = import_array("q", array)
    assert (view.device, view.array.data.ptr) == (second_gpu, array.unsafe_buffer_pointer())
    before = cupy.cuda.runtime.getDevice()  # work of JAX makes its device the current one
    with on_stream_of(array, "jax") as current, cupy.cuda.Device(second_gpu):
        result = export_array(view.array + 1, "jax", current)
    assert cupy.cuda.runtime.getDevice() == before
    assert result.devices() == array.devices()
    assert bool((result == 4).all())
