"""Integer arguments: lists, arrays of frameworks, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn._interop import integers
from rawattn._interop.integers import import_integers


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


@pytest.mark.parametrize("given", [[2**63], [2**63, 1], [[0, 2**70]], [-(2**63) - 1, 0]], ids=repr)
def test_integers_beyond_int64(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^seqlen_q: got -?\d+ in a list, .* that fit int64"):
        import_integers("seqlen_q", given)


@pytest.mark.parametrize(
    ("shape", "dense", "dtype", "stream", "made"),
    [
        ((5,), True, "int32", 7, np.dtype(np.int32)),
        ((5,), True, "int64", 7, np.dtype(np.int64)),
        ((5,), (2,), "int32", 7, None),
        ((5, 1), True, "int32", 7, None),
        ((), True, "int32", 7, None),
        ((5,), True, "float32", 7, None),
        ((5,), True, "int32", 8, None),  # another stream has to wait
        ((5,), None, "int32", 7, None),  # not on a GPU
    ],
)
def test_tensors_of_torch_that_are_read_by_their_attributes(
    shape: Any, dense: Any, dtype: str, stream: int, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [1 << 20], (shape, dense, dtype, 3, 0), False
    own = SimpleNamespace(
        read_one=lambda tensor: None if dense is None else read,
        dtype_of=np.dtype,
        stream=lambda device: stream,
        is_cupy_current=lambda stream, device: (stream, device) == (7, 3),
    )
    monkeypatch.setattr(integers, "native_of", lambda framework: own)
    monkeypatch.setattr(integers.dlpack, "device_array", lambda *form: form)
    tensor = object()
    found = integers.of_torch(tensor)
    if made is None:
        assert found is None
        return
    assert found is not None
    assert (found.data.ptr, found.data.device_id) == (1 << 20, 3)
    assert (found.size, found.dtype) == (5, made)
    assert found.array == (1 << 20, (5,), made, None, 3, tensor)
    assert integers.as_array(found) is found.array
