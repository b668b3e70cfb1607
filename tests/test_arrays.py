"""Arrays in and out on the host: no copy, no framework imported, no leak, nothing freed early."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import types
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn._interop import arrays as _arrays
from rawattn._interop import dlpack, streams
from rawattn._interop.arrays import (
    HOST,
    empty_host,
    export_array,
    framework_of,
    import_array,
    import_integers,
    on_stream_of,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)]
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def values(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def test_imports_no_framework() -> None:
    code = (
        "import sys, numpy as np\n"
        "from rawattn._interop.arrays import import_array, framework_of, export_array\n"
        "array = import_array('q', np.zeros(3)).array\n"
        "export_array(array, framework_of(array), None)\n"
        "print(sorted({'cupy', 'torch', 'jax', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


class Elsewhere:
    """An object with DLPack alone, in a module without a from_dlpack."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array = array
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> object:
        return dlpack.write(self.array, **keywords)


def test_framework_of_numpy_and_others() -> None:
    class Subclass(np.ndarray):
        pass

    assert framework_of(np.zeros(3)) == "numpy"
    assert framework_of(np.zeros(3).view(Subclass)) == "numpy"
    assert framework_of(np.ma.zeros(3)) == "numpy"
    assert framework_of([1]) == "builtins"


@pytest.mark.frameworks
def test_framework_of_torch() -> None:
    torch = pytest.importorskip("torch")

    class Subclass(torch.Tensor):
        pass

    assert framework_of(torch.zeros(3)) == "torch"
    assert framework_of(torch.nn.Parameter(torch.zeros(3))) == "torch"
    assert framework_of(torch.zeros(3).as_subclass(Subclass)) == "torch"


@pytest.mark.frameworks
def test_framework_of_jax() -> None:
    jax = pytest.importorskip("jax")
    assert framework_of(jax.numpy.zeros(3)) == "jax"


@pytest.mark.parametrize("place", ["newframe", "newframe.core", "newframe.utils.dlpack"])
def test_a_framework_nobody_has_heard_of(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Its from_dlpack is found where the type lives, above it, or in a dlpack submodule."""
    names = ["newframe", "newframe.core", "newframe.utils", "newframe.utils.dlpack"]
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["newframe"].utils = modules["newframe.utils"]  # type: ignore[attr-defined]
    modules["newframe.utils"].dlpack = modules["newframe.utils.dlpack"]  # type: ignore[attr-defined]
    array_type = type("Array", (Elsewhere,), {"__module__": "newframe.core"})
    modules[place].from_dlpack = lambda x: array_type(np.from_dlpack(x))  # type: ignore[attr-defined]

    given = array_type(np.arange(3.0))
    view = import_array("q", given)
    assert view.framework == ("newframe.core" if place == "newframe.core" else "newframe")
    result = export_array(view.array, view.framework, None)
    assert type(result) is array_type
    assert result.array.ctypes.data == given.array.ctypes.data


def test_no_from_dlpack_gives_numpy() -> None:
    view = import_array("q", Elsewhere(np.arange(3.0)))
    assert export_array(view.array, view.framework, None) is view.array


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
    with on_stream_of(given, framework_of(given)) as stream:  # leaves the complaint to import_array
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


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda torch: torch.arange(4.0).to(torch.complex64).conj().imag, "resolve_neg"),
        (lambda torch: torch.zeros(2, 2).to_sparse(), "layout"),
        (lambda torch: torch.zeros(2, device="meta"), "meta"),
        (lambda torch: torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda torch: torch.Size([2]), "asarray"),
        (lambda torch: torch.float16, "accepted"),
    ],
    ids=["negated", "sparse", "meta", "float8", "size", "dtype"],
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


class Crafted(Elsewhere):
    """A producer whose capsule has some fields changed."""

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
    """CuPy arrays over device addresses need no GPU until somebody touches them."""
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


def test_gpu_array_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    given = Elsewhere(np.zeros(3), device=(2, 0))
    with pytest.raises(ImportError, match="cuda13"):
        import_array("q", given)
    with pytest.raises(ImportError, match="cuda13"):
        on_stream_of(given, framework_of(given))


@pytest.mark.parametrize(
    ("framework", "handle", "capturing", "argument"),
    [
        ("jax", 0, False, 1),
        ("jax", 4096, False, 4096),
        ("jax", 4096, True, None),
        ("other", 4096, True, -1),
        ("tensorflow", 4096, False, None),
    ],
)
def test_stream_argument(
    monkeypatch: pytest.MonkeyPatch, framework: str, handle: int, capturing: bool, argument: Any
) -> None:
    monkeypatch.setattr(streams, "is_capturing", lambda handle: capturing)
    assert _arrays._wait_argument(framework, handle) == argument


def test_same_stream_is_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a stream that captures with one that does not; neither touches CUDA."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    streams.order(4096, 4096, 0)
    monkeypatch.setattr(streams, "is_capturing", lambda handle: handle == 4096)
    streams.order(4096, 8192, 0)
    streams.order(0, 4096, 0)
    with pytest.raises(ImportError):
        streams.order(0, 8192, 0)


def test_legacy_stream_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not streams.is_capturing(0)
    assert not streams.is_capturing(1)


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
@pytest.mark.parametrize("framework", ["torch", "jax"])
@each_float
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
    for _ in range(400):  # 200 MiB if they stayed
        there_and_back()
    assert resident_bytes() - before < 32 << 20


@pytest.mark.frameworks
def test_capsules_do_not_leak() -> None:
    """Small ones: what a capsule itself takes."""
    torch = pytest.importorskip("torch")
    array, tensor = empty_host((2, 2), BFLOAT16), torch.zeros(2, 2, dtype=torch.bfloat16)
    for n in range(60_000):
        if n == 10_000:
            before = resident_bytes()
        export_array(array, "torch", None)
        import_array("q", tensor)
    assert resident_bytes() - before < 2 << 20  # 50000 shapes and strides are more


@pytest.mark.parametrize(
    "given",
    [[0, 3, 5], (0, 3, 5), range(3), [], [[1, 2], [3, 4]], [np.int32(4), 2], [1 << 40]],
    ids=str,
)
def test_lists_of_int(given: Any) -> None:
    array = import_integers("seqlen_q", given)
    assert array.dtype == np.int64
    np.testing.assert_array_equal(array, np.array(given, np.int64))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integer_arrays_are_not_copied(dtype: str) -> None:
    array = np.arange(6, dtype=dtype)[::2]
    assert import_integers("seqlen_q", array) is array


@pytest.mark.frameworks
def test_integers_of_other_frameworks() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("int32", "int64"):
        tensor = torch.arange(3, dtype=getattr(torch, dtype))
        view = import_integers("seqlen_q", tensor)
        assert (view.dtype, view.ctypes.data) == (np.dtype(dtype), tensor.data_ptr())


@pytest.mark.parametrize(
    "given",
    [
        [1.0, 2.0],
        [1, 2.5],
        [True, False],
        [True, 2],
        [[1, 2], [3, True]],
        [np.bool_(True), 1],
        [1, [2, 3]],
        [[1], [2, 3]],
        ["1"],
        [None],
        [1 << 63],
        [1 << 70],
        5,
        np.int64(5),
        None,
        "12",
        {1, 2},
        np.zeros(2),
        np.zeros(2, bool),
        np.zeros(2, np.int8),
        np.zeros(2, np.uint32),
        np.zeros(2, ">i8"),
    ],
    ids=repr,
)
def test_integers_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^seqlen_q: got"):
        import_integers("seqlen_q", given)
