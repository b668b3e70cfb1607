"""`SeqLayout.from_lengths` and `SeqLayout.from_padding_mask`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn._call import integers
from rawattn._call.seq_layout import SeqLayout
from tests.layout.on_device import OnDevice, batch, group, spans


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
    assert (seqs.batch, seqs.packed, seqs.seqstart_k) == (3, True, None)
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
    assert (seqs.batch, seqs.packed) == (3, False)
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
