"""DLPack capsules of any producer: the memory that they may describe, and which are refused."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import pytest

from rawattn._interop import dlpack
from rawattn._interop.arrays import HOST, import_array
from tests.host_arrays import BFLOAT16, FLOATS, Elsewhere, values


class Crafted(Elsewhere):
    """A producer whose capsule has some fields overwritten."""

    def __init__(self, array: np.ndarray, *, version: int = 1, flags: int = 0, **fields: Any):
        super().__init__(array)
        self.version, self.flags, self.fields = version, flags, fields

    def __dlpack__(self, **keywords: Any) -> object:
        capsule = dlpack.write(self.array, max_version=(1, 0))
        name = b"dltensor_versioned"
        managed = dlpack._ManagedVersioned.from_address(dlpack._capsule_pointer(capsule, name))
        managed.major, managed.flags = self.version, self.flags
        for field, value in self.fields.items():
            setattr(managed.tensor, field, value)
        return capsule


NULL = ctypes.POINTER(ctypes.c_int64)()


def test_capsule_without_strides_is_in_c_order() -> None:
    array = values((2, 3, 4), np.float32)
    view = import_array("q", Crafted(array, strides=NULL)).array
    assert view.strides == array.strides
    np.testing.assert_array_equal(view, array)


def test_capsule_with_a_byte_offset() -> None:
    array = values((10,), BFLOAT16)
    shifted = Crafted(array[:4], byte_offset=6)
    np.testing.assert_array_equal(import_array("q", shifted).array, array[3:7])


def test_capsule_with_negative_strides() -> None:
    array = values((3, 4), np.float32)[::-1, ::-2]
    view = import_array("q", Elsewhere(array)).array
    assert view.strides == array.strides
    np.testing.assert_array_equal(view, array)


def test_read_only_capsule() -> None:
    array = values((3,), np.float32)
    assert not import_array("q", Crafted(array, flags=2)).readonly  # another flag: copied
    view = import_array("q", Crafted(array, flags=1))
    assert view.readonly
    with pytest.raises(ValueError, match="read-only"):
        view.array[0] = 1


def test_pinned_memory_is_host_memory() -> None:
    array = values((3,), np.float32)
    view = import_array("q", Crafted(array, device_type=3))
    assert (view.device, view.array.ctypes.data) == (HOST, array.ctypes.data)


def test_null_pointer_of_nothing() -> None:
    view = import_array("q", Crafted(np.empty((2, 0, 3), np.float16), data=None))
    assert view.array.shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "DLPack version 2"),
        ({"code": 3}, "dtype code 3"),
        ({"lanes": 2}, "2 lanes"),
        ({"bits": 8}, "8 bits"),
        ({"device_type": 10}, "device type 10"),
    ],
    ids=str,
)
def test_capsule_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(TypeError, match=r"^q: got .*Crafted") as error:
        import_array("q", Crafted(values((3,), np.float32), **changes))
    assert words in str(error.value)


def test_used_capsule_is_refused() -> None:
    class Spent(Elsewhere):
        capsule: object = None

        def __dlpack__(self, **keywords: Any) -> object:
            if self.capsule is None:
                self.capsule = self.array.__dlpack__()
            return self.capsule

    producer = Spent(np.zeros(3))
    np.from_dlpack(producer)
    with pytest.raises(TypeError, match="unused"):
        import_array("q", producer)


def test_producer_from_before_dlpack_1() -> None:
    class Old(Elsewhere):
        def __dlpack__(self, stream: int | None = None) -> object:
            return self.array.__dlpack__()

    array = values((3, 4), np.float32).T
    view = import_array("q", Old(array)).array
    assert view.ctypes.data == array.ctypes.data
    np.testing.assert_array_equal(view, array)


def test_device_views() -> None:
    """CuPy arrays over device addresses need no GPU until their memory is accessed."""
    cupy = pytest.importorskip("cupy")
    for dtype in FLOATS:
        tensor = dlpack.read(Elsewhere(values((2, 3, 4), dtype)[:, ::2]).__dlpack__())
        owner = Elsewhere(np.zeros(0))
        view = dlpack.device_view(tensor._replace(device_type=2, device_id=1), owner)
        assert type(view) is cupy.ndarray
        assert (view.data.ptr, view.data.device_id) == (tensor.pointer, 1)
        assert (view.shape, view.strides) == (tensor.shape, tensor.strides)
        assert view.dtype == dtype
        alive = weakref.ref(owner)
        del owner
        assert alive() is not None
        del view
        assert alive() is None
