"""Results leave without a copy. Their memory is freed when the last reference to it goes, and not before."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from typing import Any

import numpy as np
import pytest

from rawattn._interop.arrays import empty_host, export_array, import_array
from tests import exhaustive
from tests.host_arrays import BFLOAT16, FLOATS, Elsewhere, each_float, values


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_view_keeps_the_memory_until_it_dies() -> None:
    producer = Elsewhere(values((3, 4), BFLOAT16))
    alive = weakref.ref(producer.array)
    view = import_array("q", producer).array
    part = view[1:]
    del producer, view
    gc.collect()
    assert alive() is not None
    del part
    assert alive() is None


@pytest.mark.frameworks
@each_float
def test_torch_out(dtype: np.dtype[Any]) -> None:
    torch = pytest.importorskip("torch")
    for array in (values((2, 3, 4), dtype), empty_host((), dtype), np.empty((0, 4), dtype)):
        tensor = export_array(array, "torch", None)
        assert type(tensor) is torch.Tensor
        assert tensor.dtype == getattr(torch, dtype.name)
        assert tuple(tensor.shape) == array.shape
        if array.size:
            assert tensor.data_ptr() == array.ctypes.data
            tensor.fill_(7)
            assert (array == 7).all()


@pytest.mark.frameworks
@each_float
def test_jax_out(dtype: np.dtype[Any]) -> None:
    jax = pytest.importorskip("jax")
    for array in (empty_host((2, 3, 4), dtype), empty_host((), dtype), empty_host((0, 4), dtype)):
        array[...] = 7
        result = export_array(array, "jax", None)
        assert isinstance(result, jax.Array)
        assert (result.dtype, result.shape) == (dtype, array.shape)
        if array.size:
            assert result.unsafe_buffer_pointer() == array.ctypes.data
            assert bool((result == 7).all())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5, 7)])
@each_float
def test_empty_host(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    arrays = [empty_host(shape, dtype) for _ in range(20)]
    for array in arrays:
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0 or not array.size


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("dtype", "framework"),
    exhaustive.thin(itertools.product(FLOATS, ["torch", "jax"]), 3),
    ids=str,
)
def test_exported_memory_lives_and_dies_with_the_result(
    framework: str, dtype: np.dtype[Any]
) -> None:
    pytest.importorskip(framework)
    array = empty_host((64, 1024), dtype)
    array[...] = 3
    alive = weakref.ref(array.base)
    result = export_array(array, framework, None)
    del array
    gc.collect()
    assert alive() is not None
    other = empty_host((64, 1024), dtype)
    other[...] = 5
    assert float(result[0, 0]) == float(result[63, 1023]) == 3
    del result
    gc.collect()
    assert alive() is None


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_nothing_leaks(framework: str) -> None:
    pytest.importorskip(framework)

    def there_and_back() -> None:
        array = empty_host((1 << 18,), BFLOAT16)
        array[...] = 1
        view = import_array("q", export_array(array, framework, None))
        assert view.array.ctypes.data == array.ctypes.data

    there_and_back()
    before = resident_bytes()
    for _ in range(400):  # 400 arrays that leak would be 200 MiB
        there_and_back()
    assert resident_bytes() - before < 32 << 20


@pytest.mark.frameworks
def test_capsules_do_not_leak() -> None:
    """Capsules of small arrays leak nothing either, such as shapes and strides."""
    torch = pytest.importorskip("torch")
    array, tensor = empty_host((2, 2), BFLOAT16), torch.zeros(2, 2, dtype=torch.bfloat16)
    for n in range(60_000):
        if n == 10_000:
            before = resident_bytes()
        export_array(array, "torch", None)
        import_array("q", tensor)
    assert resident_bytes() - before < 2 << 20  # 50000 leaked shapes and strides would be more
