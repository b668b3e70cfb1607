"""SeqLayout: what it accepts, what it refuses, and where its sequences lie."""

from __future__ import annotations

import doctest
import itertools
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn._call import integers, layout
from rawattn._call.layout import SeqLayout, bind, host_lengths

INT32_MAX = 2**31 - 1
later = partial(partial, SeqLayout)  # a layout to be made in the test


class OnDevice:
    """Stands for a CuPy array. Reading it back is an error unless the test allows it."""

    def __init__(self, values: Any, dtype: Any = np.int32, *, contiguous: bool = True) -> None:
        self._values = np.array(values, dtype)
        self.readable = False
        self.shape, self.ndim, self.size = (
            self._values.shape,
            self._values.ndim,
            self._values.size,
        )
        self.dtype = self._values.dtype
        self.strides = self._values.strides if contiguous else (2 * self.dtype.itemsize,)
        self.flags = SimpleNamespace(c_contiguous=contiguous)

    def get(self) -> np.ndarray:
        assert self.readable, "a device array was read back"
        return self._values


@pytest.fixture(autouse=True)
def _pass_device_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    importer = integers.import_integers

    def imported(name: str, value: Any) -> Any:
        return value if isinstance(value, OnDevice) else importer(name, value)

    monkeypatch.setattr(integers, "import_integers", imported)


def group(seqs: SeqLayout, rows_q: int, rows_k: int) -> layout.Lengths:
    return bind(seqs, batch=None, rows_q=rows_q, rows_k=rows_k)


def batch(seqs: SeqLayout | None, count: int, rows_q: int, rows_k: int) -> layout.Lengths:
    return bind(seqs, batch=count, rows_q=rows_q, rows_k=rows_k)


def spans(lengths: layout.Lengths) -> dict[str, list[int]]:
    host = host_lengths(lengths)
    names = ("start_q", "len_q", "start_k", "len_k")
    arrays = {name: getattr(host, name) for name in names}
    assert all(array.dtype == np.int64 for array in arrays.values())
    assert all(array.shape == (lengths.batch,) for array in arrays.values())
    return {name: array.tolist() for name, array in arrays.items()}


# -- construction --------------------------------------------------------------------------------


def test_examples_of_the_docstring() -> None:
    failed, run = doctest.testmod(layout)
    assert run > 0
    assert failed == 0


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        pytest.param([0, 3, 8], np.int64, id="list"),
        pytest.param((0, 3, 8), np.int64, id="tuple"),
        pytest.param(np.array([0, 3, 8], np.int32), np.int32, id="int32"),
        pytest.param(np.array([0, 3, 8], np.int64), np.int64, id="int64"),
        pytest.param(np.array([0, 9, 3, 9, 8], np.int32)[::2], np.int32, id="strided"),
    ],
)
def test_host_integers_become_private_contiguous_arrays(values: Any, dtype: Any) -> None:
    seqs = SeqLayout(seqstart_q=values)
    assert (seqs.batch, seqs.group) == (2, True)
    assert seqs.seqstart_q.tolist() == [0, 3, 8]
    assert seqs.seqstart_q.dtype == dtype
    assert seqs.seqstart_q.flags.c_contiguous
    assert not seqs.seqstart_q.flags.writeable


def test_later_changes_of_a_host_array_do_not_reach_the_layout() -> None:
    lengths = np.array([3, 5])
    seqs = SeqLayout(seqlen_k=lengths)
    lengths[:] = 100
    assert spans(batch(seqs, 2, 4, 8))["len_k"] == [3, 5]


def test_a_layout_is_immutable_and_equal_to_itself_alone() -> None:
    seqs, twin = SeqLayout(seqstart_q=[0, 3]), SeqLayout(seqstart_q=[0, 3])
    with pytest.raises(FrozenInstanceError):
        seqs.seqstart_q = [0, 4]  # type: ignore[misc]
    assert seqs == seqs  # noqa: PLR0124
    assert seqs != twin
    assert len({seqs, twin}) == 2


def test_a_layout_can_be_replaced_and_pickled() -> None:
    seqs = SeqLayout(seqstart_q=[0, 3, 8])
    for same in (replace(seqs, max_seqlen_k=5), pickle.loads(pickle.dumps(seqs))):
        assert same.seqstart_q.tolist() == [0, 3, 8]
        assert spans(group(same, 8, 8))["len_k"] == [3, 5]
    assert replace(seqs, max_seqlen_k=5).max_seqlen_k == 5


def test_repr_is_short_and_reads_no_device_array() -> None:
    seqs = SeqLayout(
        seqstart_q=list(range(100)), seqlen_q=OnDevice([1] * 99), seqlen_k=[1] * 99, max_seqlen_k=7
    )
    assert repr(seqs) == (
        "SeqLayout(seqstart_q=<100 int64 on the host>, seqlen_q=<99 int32 on a GPU>, "
        "seqlen_k=<99 int64 on the host>, max_seqlen_k=7)"
    )
    assert repr(SeqLayout(cu_seqlen_q=[0, 2])) == "SeqLayout(cu_seqlen_q=[0, 2])"


def test_an_empty_layout_is_that_of_a_dense_batch() -> None:
    seqs = SeqLayout()
    assert (seqs.batch, seqs.group) == (None, False)
    lengths = batch(seqs, 3, 4, 5)
    assert spans(lengths) == {
        "start_q": [0, 0, 0],
        "len_q": [4, 4, 4],
        "start_k": [0, 0, 0],
        "len_k": [5, 5, 5],
    }
    assert (lengths.q.length, lengths.k.length, lengths.q.padded) == (None, None, False)


# Each row: id, arguments, error, what the message says in this order (name, got, accepted).
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("scalar", {"seqlen_q": np.array(3)}, ValueError, r"seqlen_q: .*\(\).*\(batch,\)"),
    ("two-axes", {"seqlen_k": [[3]]}, ValueError, r"seqlen_k: .*\(1, 1\).*\(batch,\)"),
    ("no-start", {"seqstart_q": []}, ValueError, r"seqstart_q: .*\(0,\).*\(batch \+ 1,\)"),
    ("no-cu", {"cu_seqlen_q": []}, ValueError, r"cu_seqlen_q: .*\(0,\).*\(batch \+ 1,\)"),
    ("floats", {"seqlen_q": [1.0]}, TypeError, r"seqlen_q: .*float64.*int32 and int64"),
    ("float-array", {"seqstart_q": np.zeros(2, np.float32)}, TypeError, r"seqstart_q: .*float32"),
    ("bools", {"cu_seqlen_k": [True, True]}, TypeError, r"cu_seqlen_k: .*bool"),
    ("int16", {"seqlen_q": np.ones(2, np.int16)}, TypeError, r"seqlen_q: .*int16.*int32"),
    ("text", {"seqlen_q": "12"}, TypeError, r"seqlen_q: .*str"),
    (
        "past-int64",
        {"seqlen_q": [2**63]},
        TypeError,
        r"seqlen_q: got (uint64|object); accepted are int32 and int64",
    ),
    (
        "one-length",
        {"seqlen_k": 7},
        TypeError,
        r"seqlen_k: got the int 7, expected .*\[7\] for a batch of one.*max_seqlen_k=7",
    ),
    (
        "one-numpy-length",
        {"seqlen_q": np.int64(7)},
        TypeError,
        r"seqlen_q: got the int 7, expected .*\[7\] \* batch",
    ),
    (
        "one-start",
        {"seqstart_q": 7},
        TypeError,
        r"seqstart_q: got the int 7, expected .*\[0, 7\] for one sequence of 7 rows",
    ),
    ("one-bool", {"seqlen_q": True}, TypeError, r"seqlen_q: got bool"),
    ("starts-fall", {"seqstart_q": [0, 6, 5]}, ValueError, r"seqstart_q: .*5 after 6.*index 2"),
    ("starts-below-0", {"seqstart_q": [-2, 3]}, ValueError, r"seqstart_q: .*-2.*>= 0"),
    (
        "k-starts-fall",
        {"seqstart_q": [0, 1, 2], "seqstart_k": [4, 3, 9]},
        ValueError,
        r"seqstart_k: .*3 after 4.*index 1.*not decrease",
    ),
    ("cu-falls", {"cu_seqlen_k": [0, 6, 5]}, ValueError, r"cu_seqlen_k: .*5 after 6.*not decrease"),
    ("cu-below-0", {"cu_seqlen_q": [-1, 5]}, ValueError, r"cu_seqlen_q: .*-1.*>= 0"),
    (
        "cu-wraps-around",
        {"cu_seqlen_q": [2**63 - 1, -(2**63)]},
        ValueError,
        r"cu_seqlen_q: .*after.*not decrease",
    ),
    ("length-below-0", {"seqlen_q": [3, -4]}, ValueError, r"seqlen_q: .*-4.*index 1.*>= 0"),
    (
        "past-its-room",
        {"seqstart_q": [2, 5, 9], "seqlen_q": [3, 5]},
        ValueError,
        r"seqlen_q: .*5 for sequence 1.*at most 4.*seqstart_q",
    ),
    (
        "k-past-its-room",
        {"seqstart_q": [2, 5, 9], "seqstart_k": [0, 1, 2], "cu_seqlen_k": [4, 5, 7]},
        ValueError,
        r"cu_seqlen_k: .*2 for sequence 1.*at most 1.*seqstart_k",
    ),
    (
        "past-the-room-of-q",
        {"seqstart_q": [2, 5, 9], "seqlen_k": [4, 4]},
        ValueError,
        r"seqlen_k: .*4 for sequence 0.*at most 3.*seqstart_k \(by default seqstart_q\)",
    ),
    (
        "k-starts-alone",
        {"seqstart_k": [0, 3]},
        ValueError,
        r"seqstart_k: .*without seqstart_q.*expected both",
    ),
    (
        "batches-differ",
        {"seqstart_q": [0, 3, 5], "seqlen_k": [1, 2, 2]},
        ValueError,
        r"seqlen_k: .*3 entries, expected 2: seqstart_q.*2 sequences",
    ),
    (
        "cumulative-batches-differ",
        {"seqlen_q": [3], "cu_seqlen_q": [0, 1, 2]},
        ValueError,
        r"cu_seqlen_q: .*3 entries, expected 2: seqlen_q.*1 sequences",
    ),
    (
        "device-batch-differs",
        {"seqlen_q": [3], "seqlen_k": OnDevice([1, 2])},
        ValueError,
        r"seqlen_k: .*2 entries, expected 1",
    ),
    (
        "device-two-axes",
        {"seqlen_k": OnDevice([[1, 2]])},
        ValueError,
        r"seqlen_k: .*\(1, 2\).*\(batch,\)",
    ),
    (
        "device-strided",
        {"seqlen_k": OnDevice([1, 2], contiguous=False)},
        ValueError,
        r"seqlen_k: .*stride 8 bytes.*contiguous.*copy",
    ),
    ("max-below-0", {"max_seqlen_q": -1}, ValueError, r"max_seqlen_q: .*-1.*>= 0"),
    ("max-float", {"max_seqlen_q": 4.0}, TypeError, r"max_seqlen_q: .*float.*int >= 0"),
    ("max-bool", {"max_seqlen_k": True}, TypeError, r"max_seqlen_k: .*bool.*int >= 0"),
    (
        "max-below-a-length",
        {"seqlen_k": [2, 7], "max_seqlen_k": 6},
        ValueError,
        r"max_seqlen_k: .*6.*at least 7.*seqlen_k",
    ),
    (
        "max-below-a-slot",
        {"seqstart_q": [0, 2, 9], "max_seqlen_q": 6},
        ValueError,
        r"max_seqlen_q: .*6.*at least 7.*seqstart_q",
    ),
    (
        "max-below-a-shared-slot",
        {"seqstart_q": [0, 2, 9], "max_seqlen_k": 6},
        ValueError,
        r"max_seqlen_k: .*6.*at least 7.*by default seqstart_q",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "error", "says"), [pytest.param(*row, id=name) for name, *row in REFUSED]
)
def test_construction_refuses(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}"):
        SeqLayout(**arguments)


# -- other ways to construct -----------------------------------------------------------------------


class Cupy:
    """As much of CuPy as works on `OnDevice` arrays, which never leave the device."""

    device = nullcontext()

    @staticmethod
    def zeros(shape: int, dtype: Any) -> OnDevice:
        return OnDevice(np.zeros(shape), dtype)

    @staticmethod
    def cumsum(array: OnDevice, *, dtype: Any, out: np.ndarray) -> None:
        np.cumsum(array._values, dtype=dtype, out=out)


class Mask(OnDevice):
    """A padding mask on the device."""

    def sum(self, *, axis: int, dtype: Any) -> OnDevice:
        return OnDevice(self._values.sum(axis=axis), dtype)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(name: str, value: Any, stream: Any) -> Any:
        return SimpleNamespace(array=value) if isinstance(value, Mask) else importer(name, value)

    importer = integers.import_array
    monkeypatch.setattr(integers, "import_array", imported)
    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    monkeypatch.setattr(OnDevice, "device", nullcontext(), raising=False)
    monkeypatch.setattr(
        OnDevice, "__getitem__", lambda self, index: self._values[index], raising=False
    )


def read(array: OnDevice) -> list[int]:
    array.readable = True
    return array.get().tolist()


@pytest.mark.parametrize(
    "lengths", [[3, 0, 2], (3, 0, 2), np.array([3, 0, 2], np.int32), np.array([3, 0, 2])]
)
def test_from_lengths(lengths: Any) -> None:
    seqs = SeqLayout.from_lengths(lengths)
    assert (seqs.batch, seqs.group, seqs.seqstart_k) == (3, True, None)
    assert seqs.seqstart_q.tolist() == [0, 3, 3, 5]
    assert seqs.seqstart_q.dtype == np.int64
    assert spans(group(seqs, 5, 5))["len_k"] == [3, 0, 2]
    cross = SeqLayout.from_lengths(lengths, [1, 4, 4], max_seqlen_k=4)
    assert spans(group(cross, 5, 9)) == {
        "start_q": [0, 3, 3],
        "len_q": [3, 0, 2],
        "start_k": [0, 1, 5],
        "len_k": [1, 4, 4],
    }
    assert cross.max_seqlen_k == 4


def test_from_lengths_of_no_sequence() -> None:
    assert SeqLayout.from_lengths([]).seqstart_q.tolist() == [0]


def test_from_lengths_does_not_wrap_where_int32_would() -> None:
    seqs = SeqLayout.from_lengths(np.full(4, 2**30, np.int32))
    assert seqs.seqstart_q[-1] == 2**32


@pytest.mark.usefixtures("cupy")
def test_from_lengths_on_the_device() -> None:
    seqs = SeqLayout.from_lengths(OnDevice([3, 0, 2]), OnDevice([2**31 - 1, 1, 1]), max_seqlen_q=3)
    assert (seqs.batch, seqs.max_seqlen_q) == (3, 3)
    assert isinstance(seqs.seqstart_q, OnDevice)
    assert seqs.seqstart_q.dtype == seqs.seqstart_k.dtype == np.int64
    assert read(seqs.seqstart_q) == [0, 3, 3, 5]
    assert read(seqs.seqstart_k) == [0, 2**31 - 1, 2**31, 2**31 + 1]


MASK = np.array([[True, True, True], [True, False, False], [False, False, False]])


def test_from_padding_mask() -> None:
    seqs = SeqLayout.from_padding_mask(MASK)
    assert (seqs.batch, seqs.group) == (3, False)
    assert spans(batch(seqs, 3, 3, 3)) == {
        "start_q": [0, 0, 0],
        "len_q": [3, 1, 0],
        "start_k": [0, 0, 0],
        "len_k": [3, 1, 0],
    }
    cross = SeqLayout.from_padding_mask(MASK, MASK[::-1, :2])
    assert (cross.seqlen_q.tolist(), cross.seqlen_k.tolist()) == ([3, 1, 0], [0, 1, 2])
    assert SeqLayout.from_padding_mask(np.ones((2, 0), bool)).seqlen_q.tolist() == [0, 0]


@pytest.mark.usefixtures("cupy")
def test_from_padding_mask_on_the_device() -> None:
    # Not a prefix in its last row: to see that, it would have to be read.
    seqs = SeqLayout.from_padding_mask(Mask([[1, 1, 1], [1, 0, 0], [0, 1, 0]], bool), MASK)
    assert isinstance(seqs.seqlen_q, OnDevice)
    assert read(seqs.seqlen_q) == [3, 1, 1]
    assert seqs.seqlen_k.tolist() == [3, 1, 0]


@pytest.mark.gpu
def test_both_on_a_gpu() -> None:
    import cupy

    lengths = cupy.asarray(np.array([3, 0, 2], np.int32))
    packed = SeqLayout.from_lengths(lengths, cupy.full(3, 2**30, np.int32))
    assert isinstance(packed.seqstart_q, cupy.ndarray)
    assert packed.seqstart_q.get().tolist() == [0, 3, 3, 5]
    assert packed.seqstart_k.get().tolist() == [0, 2**30, 2**31, 3 * 2**30]
    padded = SeqLayout.from_padding_mask(cupy.asarray(MASK))
    assert isinstance(padded.seqlen_q, cupy.ndarray)
    assert padded.seqlen_q.get().tolist() == [3, 1, 0]


@pytest.mark.gpu
@pytest.mark.frameworks
def test_both_on_a_gpu_on_the_stream_of_torch() -> None:
    import cupy

    torch = pytest.importorskip("torch")
    with torch.cuda.stream(torch.cuda.Stream()):
        busy = torch.ones(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-4
        # Comes long after the host has asked for it.
        lengths = (busy[0, :3] * 0).to(torch.int64) + torch.tensor([3, 0, 2], device="cuda")
        packed = SeqLayout.from_lengths(lengths)
        padded = SeqLayout.from_padding_mask(lengths[:, None] > torch.arange(3, device="cuda"))
        torch.cuda.current_stream().synchronize()
    assert isinstance(packed.seqstart_q, cupy.ndarray)
    assert packed.seqstart_q.get().tolist() == [0, 3, 3, 5]
    assert padded.seqlen_q.get().tolist() == [3, 0, 2]


@pytest.mark.frameworks
def test_both_of_host_arrays_of_frameworks() -> None:
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    for array in (torch.tensor, jax.numpy.array):
        seqs = SeqLayout.from_lengths(array([3, 0, 2]), array([1, 1, 1]))
        assert seqs.seqstart_q.tolist() == [0, 3, 3, 5]
        assert seqs.seqstart_k.tolist() == [0, 1, 2, 3]
        assert SeqLayout.from_padding_mask(array(MASK.tolist())).seqlen_k.tolist() == [3, 1, 0]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        pytest.param(
            lambda: SeqLayout.from_lengths([3, -1]), ValueError, r"lengths_q: got -1", id="negative"
        ),
        pytest.param(
            lambda: SeqLayout.from_lengths(5),
            TypeError,
            r"lengths_q: got the int 5, expected .*\[5\] for a batch of one.*as long$",
            id="one-int",
        ),
        pytest.param(
            lambda: SeqLayout.from_lengths([3], [[1]]),
            ValueError,
            r"lengths_k: got shape \(1, 1\), expected \(batch,\)",
            id="two-axes",
        ),
        pytest.param(
            lambda: SeqLayout.from_lengths([3], [1, 2]),
            ValueError,
            r"lengths_k: got 2 sequences, expected 1, as in lengths_q",
            id="batches-differ",
        ),
        pytest.param(
            lambda: SeqLayout.from_padding_mask(MASK, MASK[:2]),
            ValueError,
            r"mask_k: got 2 sequences, expected 3, as in mask_q",
            id="masks-differ",
        ),
        pytest.param(
            lambda: SeqLayout.from_padding_mask(MASK, MASK[:, ::-1]),
            ValueError,
            r"mask_k: got row 1 with padding at position 1 before a real token at 2.*on the right",
            id="left-padded",
        ),
        pytest.param(
            lambda: SeqLayout.from_padding_mask(MASK.astype(np.int64)),
            TypeError,
            r"mask_q: got dtype int64, expected bool.*mask_q != 0",
            id="integers",
        ),
        pytest.param(
            lambda: SeqLayout.from_padding_mask(MASK[0]),
            ValueError,
            r"mask_q: got shape \(3,\), expected \(batch, seqlen\)",
            id="one-axis",
        ),
        pytest.param(
            lambda: SeqLayout.from_padding_mask([[True]]), TypeError, r"mask_q: got list", id="list"
        ),
    ],
)
def test_other_constructors_refuse(
    make: Callable[[], SeqLayout], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=f"^{says}"):
        make()


def test_lengths_given_as_starts_keep_working() -> None:
    lengths = group(SeqLayout(seqstart_q=[2, 3, 5]), 7, 7)
    assert spans(lengths)["start_q"] == [2, 3]
    assert spans(lengths)["len_q"] == [1, 2]
    assert lengths.q.padded


# -- binding to arrays ---------------------------------------------------------------------------

# Each row: id, layout, batch (None in group mode), rows_q, rows_k, error, message.
MISFITS: list[tuple[str, Any, int | None, int, int, type[Exception], str]] = [
    ("no-layout", [0, 5], None, 5, 5, TypeError, r"seqs: got list, expected a SeqLayout"),
    ("packed-without", None, None, 5, 5, ValueError, r"seqs: got None.*seqstart_q"),
    (
        "packed-without-starts",
        later(cu_seqlen_q=[0, 5]),
        None,
        5,
        5,
        ValueError,
        r"seqs: got a SeqLayout without seqstart_q.*expected SeqLayout\(seqstart_q",
    ),
    (
        "starts-in-batch-mode",
        later(seqstart_q=[0, 5]),
        1,
        5,
        5,
        ValueError,
        r"seqs: got seqstart_q.*four axes.*expected lengths alone",
    ),
    (
        "batch-of-another-size",
        later(seqlen_k=[1, 2, 3]),
        2,
        5,
        5,
        ValueError,
        r"seqs: .*3 sequences, expected 2",
    ),
    (
        "end-past-q",
        later(seqstart_q=[0, 6], seqstart_k=[0, 5]),
        None,
        5,
        5,
        ValueError,
        r"seqstart_q: .*6, expected at most 5, the rows of q",
    ),
    (
        "end-past-k",
        later(seqstart_q=[0, 5], seqstart_k=[0, 6]),
        None,
        5,
        5,
        ValueError,
        r"seqstart_k: .*6, expected at most 5, the rows of k",
    ),
    (
        "shared-starts-but-fewer-keys",
        later(seqstart_q=[0, 6]),
        None,
        6,
        5,
        ValueError,
        r"seqstart_k: got None.*seqstart_q.*q has 6 rows and k has 5; pass seqstart_k",
    ),
    (
        "shared-starts-but-more-keys",
        later(seqstart_q=[0, 3, 5], seqlen_k=[2, 2]),
        None,
        5,
        9,
        ValueError,
        r"seqstart_k: got None.*seqstart_q.*q has 5 rows and k has 9; pass seqstart_k",
    ),
    (
        "shared-device-starts",
        later(seqstart_q=OnDevice([0, 3, 6])),
        None,
        6,
        7,
        ValueError,
        r"seqstart_k: got None.*q has 6 rows and k has 7",
    ),
    (
        "start-past-q-in-an-empty-batch",
        later(seqstart_q=[6]),
        None,
        5,
        6,
        ValueError,
        r"seqstart_q: .*6, expected at most 5",
    ),
    (
        "length-past-q",
        later(seqlen_q=[5, 6]),
        2,
        5,
        5,
        ValueError,
        r"seqlen_q: .*6 for sequence 1, expected at most 5, the rows of q",
    ),
    (
        "cu-past-k",
        later(cu_seqlen_k=[0, 6]),
        1,
        9,
        5,
        ValueError,
        r"cu_seqlen_k: .*6 for sequence 0, expected at most 5, the rows of k",
    ),
    (
        "length-past-device-starts",
        later(seqstart_q=OnDevice([0, 3, 6]), seqlen_q=[1, 7]),
        None,
        6,
        6,
        ValueError,
        r"seqlen_q: .*7 for sequence 1, expected at most 6",
    ),
    (
        "all-past-device-starts",
        later(seqstart_q=OnDevice([0, 3, 6]), cu_seqlen_k=[0, 4, 7]),
        None,
        6,
        6,
        ValueError,
        r"cu_seqlen_k: .*7 rows in all, expected at most 6",
    ),
    (
        "max-below-the-shape",
        later(max_seqlen_q=4),
        2,
        5,
        5,
        ValueError,
        r"max_seqlen_q: got 4, expected at least 5.*shape of q",
    ),
    (
        "sequence-past-int32",
        None,
        1,
        INT32_MAX + 1,
        5,
        ValueError,
        rf"q: .*{INT32_MAX + 1} rows, expected at most {INT32_MAX}$",
    ),
    (
        "device-sequence-past-int32",
        later(seqstart_q=[0, 5], seqstart_k=OnDevice([0, 5])),
        None,
        5,
        2**40,
        ValueError,
        rf"k: .*{2**40} rows, expected at most {INT32_MAX}; give SeqLayout\(max_seqlen_k",
    ),
]


@pytest.mark.parametrize(
    ("seqs", "count", "rows_q", "rows_k", "error", "says"),
    [pytest.param(*row, id=name) for name, *row in MISFITS],
)
def test_bind_refuses(
    seqs: Any, count: int | None, rows_q: int, rows_k: int, error: type[Exception], says: str
) -> None:
    seqs = seqs() if callable(seqs) else seqs
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(error, match=f"^{says}"):
            bind(seqs, batch=count, rows_q=rows_q, rows_k=rows_k)


def test_a_sequence_of_int32_max_rows_is_legal() -> None:
    assert batch(None, 1, INT32_MAX, 5).q.max_seqlen == INT32_MAX


def test_lengths_of_a_dense_batch() -> None:
    lengths = batch(None, 2, 4, 5)
    assert (lengths.batch, lengths.group, lengths.on_host) == (2, False, True)
    for side, rows in ((lengths.q, 4), (lengths.k, 5)):
        assert (side.start, side.length) == (None, None)
        assert (side.rows, side.max_seqlen, side.padded) == (rows, rows, False)


@pytest.mark.parametrize(
    ("given", "length", "lens"),
    [
        pytest.param({}, None, [4, 6], id="physical"),
        pytest.param({"seqlen_k": [1, 6]}, [1, 6], [1, 6], id="seqlen"),
        pytest.param({"cu_seqlen_k": [0, 3, 5]}, [0, 3, 5], [3, 2], id="cu_seqlen"),
        pytest.param(
            {"seqlen_k": [1, 6], "cu_seqlen_k": [0, 3, 5]}, [0, 3, 5], [3, 2], id="cu-over-seqlen"
        ),
        pytest.param(
            {"seqlen_k": [-1, 600], "cu_seqlen_k": [10, 13, 15]},
            [10, 13, 15],
            [3, 2],
            id="values-of-the-loser-do-not-count",
        ),
    ],
)
def test_precedence_of_logical_lengths(given: Any, length: Any, lens: list[int]) -> None:
    seqs = SeqLayout(seqstart_q=[0, 1, 1], seqstart_k=[2, 6, 12], **given)
    lengths = group(seqs, 1, 12)
    assert (None if lengths.k.length is None else lengths.k.length.tolist()) == length
    assert lengths.k.cumulative == ("cu_seqlen_k" in given)
    assert lengths.k.max_seqlen == max(lens)
    assert spans(lengths) == {
        "start_q": [0, 1],
        "len_q": [1, 0],
        "start_k": [2, 6],
        "len_k": lens,
    }


def test_sides_are_independent() -> None:
    lengths = batch(SeqLayout(seqlen_q=[1, 2], cu_seqlen_k=[0, 7, 7]), 2, 3, 8)
    assert spans(lengths)["len_q"] == [1, 2]
    assert spans(lengths)["len_k"] == [7, 0]
    assert (lengths.q.cumulative, lengths.k.cumulative) == (False, True)


def test_starts_of_k_default_to_those_of_q() -> None:
    lengths = group(SeqLayout(seqstart_q=[1, 4, 6], seqlen_q=[2, 2]), 7, 7)
    assert lengths.k.start is lengths.q.start
    assert spans(lengths) == {
        "start_q": [1, 4],
        "len_q": [2, 2],
        "start_k": [1, 4],
        "len_k": [3, 2],
    }


@pytest.mark.parametrize(
    ("seqs", "count", "rows", "padded"),
    [
        pytest.param(later(seqstart_q=[0, 2, 5]), None, 5, False, id="packed-full"),
        pytest.param(later(seqstart_q=[1, 2, 5]), None, 5, True, id="packed-lead"),
        pytest.param(later(seqstart_q=[0, 2, 5]), None, 6, True, id="packed-tail"),
        pytest.param(later(seqstart_q=[0, 2, 5], seqlen_q=[2, 2]), None, 5, True, id="gap"),
        pytest.param(later(seqstart_q=[0, 2, 5], seqlen_q=[2, 3]), None, 5, False, id="no-gap"),
        pytest.param(later(seqstart_q=OnDevice([0, 5])), None, 5, True, id="device-starts"),
        pytest.param(later(seqstart_q=OnDevice([0, 5]), seqlen_q=[5]), None, 5, True, id="mixed"),
        pytest.param(
            later(seqstart_q=[0, 5], seqlen_q=OnDevice([5])), None, 5, True, id="mixed-too"
        ),
        pytest.param(later(seqstart_q=OnDevice([0, 5])), None, 0, False, id="device-no-rows"),
        pytest.param(later(seqstart_q=[0]), None, 3, True, id="no-sequence-but-rows"),
        pytest.param(later(seqstart_q=[0]), None, 0, False, id="no-sequence-no-rows"),
        pytest.param(later(seqlen_q=[5, 5]), 2, 5, False, id="batch-full"),
        pytest.param(later(cu_seqlen_q=[0, 5, 9]), 2, 5, True, id="batch-short"),
        pytest.param(later(seqlen_q=OnDevice([5, 5])), 2, 5, True, id="batch-device"),
        pytest.param(later(seqlen_k=OnDevice([5, 5])), 2, 5, False, id="other-side-on-device"),
        pytest.param(later(seqlen_q=OnDevice([])), 0, 5, False, id="batch-0"),
    ],
)
def test_padded_is_false_only_when_that_is_proven(
    seqs: Any, count: int | None, rows: int, padded: bool
) -> None:
    rows_k = rows if count is None else 5
    assert bind(seqs(), batch=count, rows_q=rows, rows_k=rows_k).q.padded is padded


@pytest.mark.parametrize(
    ("seqs", "count", "rows", "bound"),
    [
        pytest.param(later(seqlen_q=[3, 2]), 2, 9, 3, id="host-lengths"),
        pytest.param(later(seqlen_q=[3, 2], max_seqlen_q=8), 2, 9, 3, id="host-over-given"),
        pytest.param(later(seqstart_q=[0, 4, 5]), None, 9, 4, id="host-starts"),
        pytest.param(later(seqlen_q=OnDevice([3, 2])), 2, 9, 9, id="device-lengths"),
        pytest.param(later(seqlen_q=OnDevice([3, 2]), max_seqlen_q=4), 2, 9, 4, id="device-given"),
        pytest.param(
            later(seqlen_q=OnDevice([3, 2]), max_seqlen_q=2**40), 2, 9, 9, id="given-past-rows"
        ),
        pytest.param(later(seqstart_q=OnDevice([0, 4, 5])), None, 9, 9, id="device-starts"),
        pytest.param(
            later(seqstart_q=OnDevice([0, 4, 5]), max_seqlen_q=5), None, 9, 5, id="starts-given"
        ),
        pytest.param(
            later(seqstart_q=[0, 4, 5], seqlen_q=OnDevice([3, 1])), None, 9, 4, id="host-slots"
        ),
        pytest.param(
            later(seqstart_q=OnDevice([0, 4, 5]), seqlen_q=[3, 1]), None, 9, 3, id="host-lens"
        ),
        pytest.param(later(max_seqlen_q=20), 2, 9, 9, id="physical"),
        pytest.param(later(seqlen_q=[0, 0], max_seqlen_q=0), 2, 9, 0, id="all-empty"),
        pytest.param(later(max_seqlen_q=3), 0, 9, 9, id="batch-0"),
        pytest.param(
            later(seqstart_q=OnDevice([0, 4]), max_seqlen_q=4, max_seqlen_k=4),
            None,
            2**40,
            4,
            id="huge-total",
        ),
    ],
)
def test_max_seqlen_is_the_tightest_bound_that_needs_no_read(
    seqs: Any, count: int | None, rows: int, bound: int
) -> None:
    rows_k = rows if count is None else 5
    assert bind(seqs(), batch=count, rows_q=rows, rows_k=rows_k).q.max_seqlen == bound


@pytest.mark.parametrize(
    ("seqs", "on_host"),
    [
        pytest.param(later(seqstart_q=[0, 3], seqlen_k=[2]), True, id="host"),
        pytest.param(later(seqstart_q=OnDevice([0, 3])), False, id="starts-on-device"),
        pytest.param(later(seqstart_q=[0, 3], seqlen_k=OnDevice([2])), False, id="mixed"),
        pytest.param(
            later(seqstart_q=[0, 3], seqlen_k=OnDevice([2]), cu_seqlen_k=[0, 2]),
            True,
            id="the-loser-on-device",
        ),
    ],
)
def test_on_host(seqs: Any, on_host: bool) -> None:
    assert group(seqs(), 3, 3).on_host is on_host


def test_binding_is_remembered_per_shape() -> None:
    seqs = SeqLayout(seqlen_k=OnDevice([1, 2]))
    first = batch(seqs, 2, 4, 5)
    assert batch(seqs, 2, 4, 5) is first
    assert batch(seqs, 2, 4, 6).k.rows == 6
    assert batch(None, 2, 4, 5) is batch(None, 2, 4, 5)


def test_bindings_do_not_pile_up() -> None:
    seqs = SeqLayout(seqlen_k=OnDevice([1, 2]))
    for rows in range(3, 200):
        assert batch(seqs, 2, 4, rows).k.rows == rows
    assert len(seqs._bindings) <= 16


def test_an_empty_batch() -> None:
    nothing = {"start_q": [], "len_q": [], "start_k": [], "len_k": []}
    assert spans(batch(None, 0, 4, 5)) == nothing
    assert spans(batch(SeqLayout(seqlen_q=[], cu_seqlen_k=[3]), 0, 4, 5)) == nothing
    assert spans(group(SeqLayout(seqstart_q=[2]), 4, 4)) == nothing
    assert group(SeqLayout(seqstart_q=[2]), 4, 4).batch == 0


# -- host lengths --------------------------------------------------------------------------------


def test_device_arrays_are_held_by_reference_and_read_at_each_call() -> None:
    lens = OnDevice([1, 2])
    lengths = batch(SeqLayout(seqlen_k=lens), 2, 4, 5)
    assert lengths.k.length is lens
    lens.readable = True
    assert spans(lengths)["len_k"] == [1, 2]
    lens._values[:] = [5, 0]
    assert spans(lengths)["len_k"] == [5, 0]


def test_differences_of_int32_do_not_overflow() -> None:
    lens = OnDevice([-(2**31), 2**31 - 1])
    lens.readable = True
    assert spans(batch(SeqLayout(cu_seqlen_k=lens), 1, 4, 5))["len_k"] == [5]


JUNK = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 20)


@given(
    data=st.lists(JUNK, min_size=9, max_size=9),
    cumulative=st.booleans(),
    rows=st.integers(0, 15),
)
def test_junk_on_the_device_stays_inside_the_array(
    data: list[int], cumulative: bool, rows: int
) -> None:
    starts = OnDevice(data[:5], np.int64)
    lens = OnDevice(data[4:] if cumulative else data[5:], np.int64)
    starts.readable = lens.readable = True
    name = "cu_seqlen_q" if cumulative else "seqlen_q"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integers, "import_integers", lambda _, value: value)
        seqs = SeqLayout(seqstart_q=starts, **{name: lens})
    lengths = group(seqs, rows, rows)
    host = host_lengths(lengths)
    for start, length in ((host.start_q, host.len_q), (host.start_k, host.len_k)):
        assert np.all(start >= 0)
        assert np.all(length >= 0)
        assert np.all(start + length <= rows)
    # Where the junk makes sense, it is what counts.
    slots = [(a, b) for a, b in itertools.pairwise(data[:5])]
    for i, (a, b) in enumerate(slots):
        if 0 <= a <= b <= rows:
            assert host.start_k[i] == a
            assert host.len_k[i] == b - a


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int, list[tuple[int, int]]]:
    """Arguments for one side in group mode, its rows, and (start, length) of its sequences."""
    gaps = draw(st.lists(st.integers(0, 3), max_size=6))
    lens = [draw(st.integers(0, 5)) for _ in gaps]
    lead, tail = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    starts = [lead, *(lead + sum(lens[:i]) + sum(gaps[:i]) for i in range(1, len(lens) + 1))]
    sequences = list(zip(starts, lens, strict=False))
    arguments: dict[str, Any] = {"seqstart": starts}
    how = draw(st.sampled_from(["seqlen", "cu_seqlen"] + ["physical"] * (sum(gaps) == 0)))
    if how == "seqlen":
        arguments["seqlen"] = lens
    elif how == "cu_seqlen":
        base = draw(st.integers(0, 4))
        arguments["cu_seqlen"] = [base + sum(lens[:i]) for i in range(len(lens) + 1)]
    return arguments, starts[-1] + tail, sequences


@given(layouts())
def test_random_packed_batches(drawn: tuple[dict[str, Any], int, list[tuple[int, int]]]) -> None:
    arguments, rows, sequences = drawn
    seqs = SeqLayout(**{f"{name}_{side}": x for name, x in arguments.items() for side in "qk"})
    lengths = group(seqs, rows, rows)
    got = spans(lengths)
    for side in "qk":
        assert list(zip(got[f"start_{side}"], got[f"len_{side}"], strict=True)) == sequences
    covered = {row for start, length in sequences for row in range(start, start + length)}
    assert lengths.q.padded == (len(covered) < rows)
    assert lengths.q.max_seqlen == max((length for _, length in sequences), default=0)
