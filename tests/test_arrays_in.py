"""Arrays of NumPy, torch and JAX come in without a copy, or are refused with a remedy in the message."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from rawattn._interop.arrays import HOST, export_array, framework_of, import_array, on_stream_of
from tests.host_arrays import FLOATS, each_float, values


@each_float
def test_numpy_passes_through(dtype: np.dtype[Any]) -> None:
    array = values((2, 3, 4), dtype)
    frozen = array.copy()
    frozen.flags.writeable = False
    for given in (array, array[::-1, :, ::2], array[:0], array[0, 0, 0:1].reshape(()), frozen):
        view = import_array("q", given)
        assert view.array is given
        assert (view.device, view.framework) == (HOST, "numpy")
        assert view.readonly == (given is frozen)
    assert export_array(array, "numpy", None) is array


def test_numpy_subclass_is_seen_as_an_array(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "weights", np.float32, "w+", shape=(2, 3))
    view = import_array("q", mapped)
    assert type(view.array) is np.ndarray
    assert view.array.ctypes.data == mapped.ctypes.data


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.ma.masked_array(np.zeros(3), [0, 1, 0]), ["masked array", "filled"]),
        (np.zeros(3, ">f4"), [">f4", "newbyteorder"]),
        ([[1.0, 2.0]], ["list", "numpy.asarray(key)"]),
        ((1.0,), ["tuple", "numpy.asarray(key)"]),
        (np.float32(1), ["float32", "numpy.asarray(key)"]),
        (1.0, ["float", "__dlpack__"]),
        (None, ["NoneType", "__dlpack__"]),
        ("text", ["str", "__dlpack__"]),
        (np.ndarray, ["type", "__dlpack__"]),
        (types.SimpleNamespace(__cuda_array_interface__={}), ["cupy.asarray(key)"]),
    ],
    ids=lambda x: "" if isinstance(x, list) else type(x).__name__,
)
def test_refused(given: Any, words: list[str]) -> None:
    with pytest.raises(TypeError, match=r"^key: got") as error:
        import_array("key", given)
    for word in words:
        assert word in str(error.value)
    with on_stream_of(given, framework_of(given)) as stream:  # import_array reports the error
        assert stream is None


def test_numpy_matrix_is_refused() -> None:
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0]])
    with pytest.raises(TypeError, match=r"^q: got a numpy\.matrix; pass numpy\.asarray"):
        import_array("q", matrix)


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "dtype", [*FLOATS, *map(np.dtype, (bool, "int32", "int64", "uint8", "float64"))], ids=str
)
def test_torch_in(dtype: np.dtype[Any]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype.name))
    for given in (
        tensor,
        tensor.transpose(0, 2),
        tensor[:, 1:, ::2],
        tensor[1, 2, 3],
        tensor[:1].expand(5, 3, 4),
        tensor[:, :0],
    ):
        view = import_array("q", given)
        assert (view.device, view.framework, view.readonly) == (HOST, "torch", False)
        assert view.array.dtype == dtype
        assert view.array.shape == tuple(given.shape)
        np.testing.assert_array_equal(view.array.astype(np.float64), given.double().numpy())
        if given.numel():
            assert view.array.ctypes.data == given.data_ptr()
            assert view.array.flags.writeable
            strides = [
                s // dtype.itemsize
                for s, n in zip(view.array.strides, given.shape, strict=True)
                if n > 1
            ]
            assert strides == [s for s, n in zip(given.stride(), given.shape, strict=True) if n > 1]


@pytest.mark.frameworks
def test_torch_that_requires_grad_is_read() -> None:
    torch = pytest.importorskip("torch")
    leaf = torch.nn.Parameter(torch.arange(3.0))
    for given in (leaf, leaf * 2):
        view = import_array("q", given)
        assert view.array.ctypes.data == given.data_ptr()
        assert given.requires_grad


def freed(tensor: Any) -> Any:
    """The tensor, without its memory, as a sharded parameter between its uses."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda torch: torch.arange(4.0).to(torch.complex64).conj().imag, "resolve_neg"),
        (lambda torch: torch.zeros(2, 2).to_sparse(), "layout"),
        (lambda torch: torch.zeros(2, device="meta"), "meta"),
        (lambda torch: torch._efficientzerotensor((2,)), "it has no memory"),
        (lambda torch: freed(torch.zeros(2)), "it has no memory"),
        (lambda torch: torch.empty(2, dtype=torch.float8_e8m0fnu), "float8_e8m0fnu"),
        (lambda torch: torch.Size([2]), "asarray"),
        (lambda torch: torch.float16, "accepted"),
    ],
    ids=["negated", "sparse", "meta", "zeros", "freed", "float8", "size", "dtype"],
)
def test_torch_refused(make: Any, words: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^q: got") as error:
        import_array("q", make(torch))
    assert words in str(error.value)


@pytest.mark.frameworks
@pytest.mark.parametrize("dtype", [*FLOATS, *map(np.dtype, (bool, "int32"))], ids=str)
def test_jax_in(dtype: np.dtype[Any]) -> None:
    jax = pytest.importorskip("jax")
    array = jax.device_put(values((2, 3, 4), dtype), jax.devices("cpu")[0])
    for given in (array, array[0, 0, 1], array[:, :0]):
        view = import_array("q", given)
        assert (view.device, view.framework, view.readonly) == (HOST, "jax", True)
        assert view.array.dtype == dtype
        assert view.array.shape == given.shape
        assert not view.array.flags.writeable
        np.testing.assert_array_equal(view.array, np.asarray(given))
        if given.size:
            assert view.array.ctypes.data == given.unsafe_buffer_pointer()


@pytest.mark.frameworks
def test_jax_tracer_is_refused() -> None:
    jax = pytest.importorskip("jax")

    def traced(q: Any) -> Any:
        with pytest.raises(TypeError, match=r"^q: got .*Tracer"):
            import_array("q", q)
        return q

    jax.jit(traced)(jax.numpy.zeros(3))
